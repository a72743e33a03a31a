"""The lease of a replica: how long it may go on to own its sessions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tenuto.base.errors import NotAcknowledged

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def awake_or_not() -> float:
    """Returns seconds by a clock that continues while the process, or the machine, sleeps."""
    return time.clock_gettime(_CLOCK)


class ReplicaLease:
    """The time until which this replica owns the sessions in its memory.

    Invariant: it ends at most `seconds` after the beginning of the last heartbeat, and all sessions that other replicas
    claimed before that heartbeat have been dropped. So until it ends, by this process's clock, no other replica owns a
    session that is in memory here, unless the database's clock has jumped since. Answers say that a session is here
    only while the lease holds.

    `lapses` counts the heartbeats with which sessions may have been lost; it is raised before these are dropped.
    `failing`: whether the database could not be asked at the last heartbeat. `closing` is set once the lease is not
    prolonged any more. `Member` writes all three.
    """

    def __init__(self, seconds: float, now: Callable[[], float], sleep: Callable[[float], None]) -> None:
        """Begins before the replica joins its fleet. `now`: a clock that continues while the process sleeps."""
        self.seconds = seconds
        self.now = now
        self._sleep = sleep
        self._until = now() + seconds
        self._sure = True  # whether all claims before the last heartbeat are known
        self.lapses = 0
        self.failing = False
        self.closing = threading.Event()

    def holds(self) -> bool:
        """Whether it has not ended."""
        return self.now() < self._until

    def deadline(self) -> float:
        """Returns the time at which a request that begins now stops waiting for a heartbeat."""
        return self.now() + self.seconds

    def require(self, deadline: float) -> None:
        """Waits until it holds. Raises `NotAcknowledged` if it is not prolonged before the deadline."""
        while not self.holds():
            if self.now() > deadline or self.closing.is_set():
                raise NotAcknowledged(
                    "this replica cannot prolong its lease, so it may not own its sessions; ask again"
                )
            self._sleep(0.01)

    def begin_beat(self) -> tuple[float, bool]:
        """Begins a heartbeat. Returns the time, and whether the lease still holds and all claims before the last
        heartbeat are known. Otherwise sessions may have been lost, whatever the database says."""
        began, sure = self.now(), self._sure and self.holds()
        self._sure = False
        return began, sure

    def prolong(self, began: float) -> None:
        """Ends the heartbeat that began at `began`. All lost sessions must have been dropped."""
        self._until, self._sure = began + self.seconds, True
