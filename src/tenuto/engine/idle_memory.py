"""The engine's interface to memory of idle sessions off the device, and its implementation without tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tenuto.base.errors import InvariantError
from tenuto.base.wire.state_file import CopiedState
from tenuto.memory.pool import Lease
from tenuto.memory.rows import Longs
from tenuto.memory.tiers.lent import LentUnits
from tenuto.sched.admission import Restoring
from tenuto.session.session import Session
from tenuto.session.turn import Turn


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Counters of tiers: sessions `parked` now, total sessions `restored`, bytes `used` by tier, total units `moved` by
    target, and `failures` by cause."""

    parked: int = 0
    restored: int = 0
    used: Mapping[str, int] = field(default_factory=dict)
    moved: Mapping[str, int] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)


class IdleMemory(Restoring, Protocol):
    """Parks sessions off the device and restores them when their turns start. See `Parking`."""

    @property
    def copying(self) -> bool:
        """Whether copies to the device are under way, which will free units or let turns continue."""

    @property
    def counts(self) -> TierCounts: ...

    def park(self, session: Session) -> bool:
        """Copies the session's memory, which is about to be released. Returns whether all of it is parked now."""

    def lend(self, session: Session) -> LentUnits | None:
        """Lends the parked memory of a session, which another thread may read until `take_back`."""

    def take_back(self, lent: LentUnits) -> None:
        """Ends a loan, whether the memory was read or not."""

    def position(self, session: Session) -> int:
        """Returns the number of tokens whose memory is parked."""

    def hold(self, session: Session, state: CopiedState) -> bool:
        """Parks a session with state from another engine or process. Returns False if there is no room."""

    def changed(self, session: Session, kept: int) -> None:
        """Cuts the session's parked memory to the first `kept` tokens of its history, after later ones have changed."""

    def fork(self, parent: Session, child: Session) -> None:
        """Shares the parent's parked memory with a fork, whose history is the beginning of the parent's."""

    def forget(self, session: Session) -> None:
        """Discards the parked memory of a session that is closed or must not be restored."""

    def restore(self, turn: Turn, slots: tuple[Lease, ...]) -> None:
        """Begins to restore the memory that `plan` found for the turn, into `slots`, the units reserved for the turn's
        start, and free units. The session has these units at once, but if the turn `awaits` them, they have no contents
        until `arrivals` returns the turn."""

    def awaits(self, turn: Turn) -> bool:
        """Whether the turn has to wait because its session's memory is arriving."""

    def begun(self, turn: Turn) -> None:
        """Records that the waiting turn has begun on its session's memory; no other turn may until it has arrived."""

    def arrivals(self) -> Iterable[tuple[Turn, bool]]:
        """Returns the turns whose sessions' memory has arrived since the last call, or with `False` those for which it
        has failed to arrive; that memory must be given up and computed again."""

    def give_up(self, turn: Turn) -> None:
        """Gives up the arriving memory of a turn that has left its row and released its own. The session keeps no
        memory on the device; its parked memory stays."""

    def on_copied(self, told: Callable[[], None]) -> None:
        """Sets `told` to be called, in any thread, when copies for which a turn may wait have ended."""

    def note_computed(self, tokens: int, seconds: float) -> None:
        """Records the time of computing tokens, which restoring them would save."""

    def become(self, identity: str) -> None:
        """Changes the identity of units' contents after the weights were replaced. Nothing may be parked."""

    def finish(self) -> None:
        """Waits for copies under way; no turn waits for them."""

    def audit(self) -> None:
        """Raises `InvariantError` if the records of parked memory are inconsistent."""

    def close(self, *, keep: bool) -> None:
        """Releases the disk tier, and removes its files unless `keep` is set."""


class NoParking:
    """An `IdleMemory` without tiers: a session that leaves the device keeps only its tokens, and no turn waits for
    memory. Methods that are only called after a restore raise `InvariantError`."""

    restores = False
    copying = False
    counts = TierCounts()

    def park(self, session: Session) -> bool:
        return False

    def lend(self, session: Session) -> None:
        return None

    def take_back(self, lent: LentUnits) -> None:
        raise InvariantError("nothing is parked, so nothing was lent")

    def position(self, session: Session) -> int:
        return 0

    def hold(self, session: Session, state: CopiedState) -> bool:
        return False

    def changed(self, session: Session, kept: int) -> None:
        """Does nothing: the session is not parked."""

    def fork(self, parent: Session, child: Session) -> None:
        """Does nothing: the parent is not parked."""

    def forget(self, session: Session) -> None:
        """Does nothing: the session is not parked."""

    def plan(self, turn: Turn) -> int:
        return 0

    def units(self, turn: Turn, *, alone: bool = False) -> Longs:
        raise InvariantError(f"no memory is parked with which {turn.name} could begin")

    def restore(self, turn: Turn, slots: tuple[Lease, ...]) -> None:
        """Does nothing: the turn's session is not parked."""

    def awaits(self, turn: Turn) -> bool:
        return False

    def begun(self, turn: Turn) -> None:
        raise InvariantError(f"{turn.name} does not wait for memory")

    def arrivals(self) -> tuple[()]:
        return ()

    def give_up(self, turn: Turn) -> None:
        raise InvariantError(f"{turn.name} does not wait for memory")

    def on_copied(self, told: Callable[[], None]) -> None:
        """Does nothing: there are no copies."""

    def note_computed(self, tokens: int, seconds: float) -> None:
        """Does nothing: tokens are never restored instead of computed."""

    def become(self, identity: str) -> None:
        """Does nothing: there are no copies."""

    def finish(self) -> None:
        """Does nothing: there are no copies."""

    def audit(self) -> None:
        """Does nothing: nothing is parked."""

    def close(self, *, keep: bool) -> None:
        """Does nothing: there is no disk tier."""
