"""Idle sessions leave the device, and come back when their turns start."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from tenuto.base.plan import Bytes
from tenuto.base.state_file import CopiedState
from tenuto.memory.memory import Memory
from tenuto.memory.parked import Parked
from tenuto.memory.pool import HolderKind, Lease
from tenuto.memory.rows import Longs
from tenuto.memory.snapshots import SavedMemory, Snapshot
from tenuto.memory.tiers import Tiers
from tenuto.sched.batch import is_computed, start_target
from tenuto.session.session import Session, Turn


class Parking:
    """Which session is parked where. What is parked of a session is a cache: its tokens can always be computed again.

    Invariant: what is parked of a session holds for the first tokens of its history. It stays while the session is in
    memory, so that only what is new is copied when it leaves again.
    """

    holder_kind: ClassVar[HolderKind] = "copy"
    holder_name = "copies to the device"

    def __init__(self, memory: Memory, tiers: Tiers) -> None:
        self._memory = memory
        self._sessions: dict[Session, Parked] = {}
        self.tiers = tiers
        self._planned: tuple[Turn | None, int] = None, 0
        self.parked = 0  # sessions, ever
        self.restored = 0
        self.restored_tokens = 0
        self.recomputed: Counter[str] = Counter()  # sessions that had been parked and are computed again, by cause

    def leases(self) -> list[Lease]:
        """Nothing between steps: copies are made at once."""
        return []

    def __len__(self) -> int:
        return sum(parked in self.tiers for parked in self._sessions.values())

    # -- leaving

    def park(self, session: Session) -> bool:
        """Copy what the session keeps, which is about to be released. Whether all of it is parked now."""
        memory = session.memory
        position = min(memory.computed, len(session.history))
        if position < memory.computed or memory.computed == 0:
            return False  # it has more, of its turn's input, which may not become history
        parked = self.tiers.park(position, memory.kept())
        if parked is None:
            return False
        self._replace(session, parked)
        self.parked += 1
        return True

    def has(self, session: Session) -> bool:
        """Whether some of it is parked."""
        return (parked := self._sessions.get(session)) is not None and parked in self.tiers

    def save(self, session: Session, *, late: bool) -> int:
        """See that what there is of a session is on disk, if it is not too `late` to write. Of how many tokens it
        is."""
        memory, parked = session.memory, self._sessions.get(session)
        there = parked.position if parked is not None and parked in self.tiers else 0
        if memory.computed > there and not late:
            written = self.tiers.save(memory.computed, memory.kept())
            if written is not None:
                self._replace(session, written)
                return written.position
        if parked is None or not there or (late and parked.in_host) or not self.tiers.move_to_disk(parked):
            return 0
        return there

    def write_index(self, saved: Sequence[tuple[Session, int]]) -> bool:
        """Write down what is on disk of sessions, each of so many tokens. False if that failed."""
        return self.tiers.write_index(
            [
                (*session.key, session.history[:position].tobytes(), self._sessions[session])
                for session, position in saved
            ]
        )

    def state(self, session: Session) -> CopiedState | None:
        """A copy of what is parked of a session, if it can be read."""
        parked = self._sessions.get(session)
        if parked is None or parked not in self.tiers:
            return None
        position, groups = parked.position, self.tiers.copies(parked)
        return CopiedState(position, groups) if groups is not None else None

    def hold(self, session: Session, state: CopiedState) -> bool:
        """Park a session with state that comes from elsewhere. False if there is no room."""
        used = [table.used(state.position) for table in session.memory.tables]
        parked = self.tiers.hold(state.position, state.groups, used)
        self._replace(session, parked)
        return parked is not None

    @property
    def needs_whole(self) -> bool:
        """Whether parked memory can be resumed only where it ends."""
        return self._memory.needs_checkpoints

    def take_over(
        self, snapshot: Snapshot | None, wanted: Sequence[tuple[Session, SavedMemory, int]]
    ) -> Iterator[tuple[Session, SavedMemory, int | None]]:
        """Park sessions with the memory of so many tokens that was saved for them: how many each has now, or `None` if
        its files are gone. What was saved besides is removed."""
        taken = self.tiers.take_over(
            snapshot, [(saved, position, self._counts(session, position)) for session, saved, position in wanted]
        )
        for (session, saved, _), parked in zip(wanted, taken, strict=True):
            self._replace(session, parked)
            yield session, saved, parked.position if parked is not None else None

    def _replace(self, session: Session, parked: Parked | None) -> None:
        before = self._sessions.pop(session, None)
        if before is not None:
            self.tiers.forget(before)
        if parked is not None:
            self._sessions[session] = parked

    # -- what happens to the session

    def changed(self, session: Session, kept: int) -> None:
        """Only the first `kept` tokens of the history are what they were."""
        parked, most = self._sessions.get(session), max(0, kept - 1)
        if parked is not None and parked.position > most:
            self._replace(session, self._part(session, parked, most))

    def fork(self, parent: Session, child: Session) -> None:
        """The child's history is the beginning of its parent's."""
        parked = self._sessions.get(parent)
        if parked is not None and parked in self.tiers:
            self._replace(child, self._part(child, parked, max(0, len(child.history) - 1)))

    def forget(self, session: Session) -> None:
        """The session is gone, or nothing of it is to be restored."""
        self._replace(session, None)

    def _part(self, session: Session, parked: Parked, position: int) -> Parked | None:
        """A second `Parked` of at most `position` tokens; `None` if nothing of it serves."""
        position = self._resumable(parked, position)
        return self.tiers.share(parked, position, self._counts(session, position)) if position else None

    def _resumable(self, parked: Parked, target: int) -> int:
        """The highest position at or below `target` at which the parked memory can be resumed; 0 if nowhere."""
        if parked not in self.tiers:
            return 0
        if target >= parked.position:
            return parked.position
        return 0 if self._memory.needs_checkpoints else max(0, target)

    @staticmethod
    def _counts(session: Session, position: int) -> list[int]:
        """Units of each group that are kept of a position."""
        return [table.kept_units(position) for table in session.memory.tables]

    # -- coming back

    def plan(self, turn: Turn) -> int:
        """Where a waiting turn would begin if its session were restored; 0 if that is not possible, or no gain. It is
        restored if the turn starts next."""
        self._planned = turn, self._position(turn)
        return self._planned[1]

    def _position(self, turn: Turn) -> int:
        session, parked = turn.session, self._sessions.get(turn.session)
        if parked is None or session.memory.turn is not None:
            return 0
        position = self._resumable(parked, start_target(turn))
        if position < session.memory.resumable(start_target(turn)) + self._memory.page_size:
            return 0
        tier = "disk" if parked.on_disk else "host"
        return position if self.tiers.rates.worth(tier, parked.size, position) else 0

    def units(self, turn: Turn) -> Longs:
        """Units of each group to acquire for what was just planned, int64 [groups]."""
        session, position = turn.session, self._planned[1]
        parked, counts = self._sessions[session], self._counts(session, position)
        lacking = np.array(self.tiers.lacking(parked, counts), np.int64)
        for group, count in enumerate(counts):  # a last page that others have is copied before it is written
            lacking[group] += self.tiers.on_device(parked, group, count)[-1:] not in ([], [None])
        return lacking

    def restore(self, turn: Turn, slots: tuple[Lease, ...]) -> None:
        """Bring back the session's memory, in what was acquired for the turn to start with, `slots`, and in free units.
        If that fails, it is computed again."""
        planned, position = self._planned
        self._planned = None, 0
        if planned is not turn or not position or is_computed(turn):  # it may have found more elsewhere since
            return
        session, parked = turn.session, self._sessions[turn.session]
        self.tiers.use(parked)
        counts = self._counts(session, position)
        data = self.tiers.fetch(parked, counts)
        if data is None:
            self._failed(session, "unreadable")
            return
        leases: list[Lease] = []
        for group, count in enumerate(counts):
            lease = self._acquire(parked, group, count, slots)
            if lease is not None:
                leases.append(lease)
            if lease is None or not self._fill(group, lease, data[group]):
                for taken in leases:
                    taken.release()
                self._failed(session, "no room" if lease is None else "copy failed")
                return
        for group, lease in enumerate(leases):
            self.tiers.landed(parked, group, lease.units)
        session.memory.drop()
        session.memory.receive(position, leases)
        self.restored += 1
        self.restored_tokens += position

    def _fill(self, group: int, lease: Lease, data: list[Bytes | None]) -> bool:
        """Write what is not on the device. False if that failed."""
        filled = [(unit, copy) for unit, copy in zip(lease.units, data, strict=True) if copy is not None]
        return self.tiers.write(group, [unit for unit, _ in filled], [copy for _, copy in filled])

    def _acquire(self, parked: Parked, group: int, count: int, slots: tuple[Lease, ...]) -> Lease | None:
        """A lease on `count` units: those that the device still has, and fresh ones."""
        pool = self._memory.pools[group]
        there = self.tiers.on_device(parked, group, count)
        missing = sum(unit is None for unit in there)
        if self._memory.groups[group].units_at_start:
            fresh = slots[group].take(0, missing, self) if len(slots[group]) >= missing else None
        else:
            fresh = pool.acquire(missing, self)
        if fresh is None:
            return None
        new = iter(fresh.units)
        units = array("i", (next(new) if unit is None else unit for unit in there))
        shared = pool.share(units, self)
        fresh.release()
        return shared

    def _failed(self, session: Session, cause: str) -> None:
        self.recomputed[cause] += 1
        self.forget(session)
        session.memory.lost = "parked"

    def audit(self) -> None:
        """Raises `InvariantError`."""
        self.tiers.audit()
