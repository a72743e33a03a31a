"""Parking of idle sessions in tiers, from which their state comes back when they need it."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain

import numpy as np

from tenuto.base.checks import MAX_COUNT
from tenuto.base.config import EngineConfig, user_path
from tenuto.base.errors import InvariantError
from tenuto.base.plan import Copier
from tenuto.base.wire.state_file import CopiedState
from tenuto.memory.lineage import Lineage, cut, is_pure
from tenuto.memory.memory import Memory
from tenuto.memory.pool import Holder, Lease
from tenuto.memory.rows import Longs
from tenuto.memory.tiers.contents import Content
from tenuto.memory.tiers.disk import Disk
from tenuto.memory.tiers.left_state import Wanted
from tenuto.memory.tiers.lent import LentUnits
from tenuto.memory.tiers.moves import Carrier, Move
from tenuto.memory.tiers.parked import Parked, StoredUnit, size_of
from tenuto.memory.tiers.saves import Saves
from tenuto.memory.tiers.tiers import Tiers
from tenuto.memory.tiers.unit_files import UnitFiles
from tenuto.session.session import Session

FAILURES = {"copy": "copy failed"}
"""What the failures of a move are called where parked sessions are computed again; others are "unreadable"."""


class Parking:
    """Parks sessions off the device, and brings their state back to units on it. The parked memory of a session is a
    cache: its tokens can always be computed again. Without tiers, nothing is ever parked.

    Invariant: a session's parked memory is the state of the first tokens of its history, without the last token, as is
    its memory at rest. Units that are restored are compared with these tokens. Parked memory stays while the session is
    on the device, so that only new units are copied when it leaves again. Each record says with which weights its state
    was computed. Only state of the weights in use is saved for the next process.
    """

    def __init__(
        self,
        config: EngineConfig,
        memory: Memory,
        copier: Copier,
        disk: Disk | None,
        carrier: Carrier,
        timer: Callable[[], float],
        identity: str,
    ) -> None:
        """`disk`, `identity`: see `Engine`. Raises `ConfigError`."""
        if disk is None and config.disk_tier:
            disk = UnitFiles(user_path(config.disk_tier), config.disk_tier_size or MAX_COUNT, identity)
        self.tiers = Tiers(memory.pools, copier, config.host_tier, disk, memory.page_size, timer, carrier, identity)
        lasting = [not group.needs_checkpoints for group in memory.groups]
        self.saves = Saves(self.tiers, memory.page_size, lasting)
        self.keeps = config.checkpoint_rate > 0 and disk is not None  # whether state is saved while the engine runs
        self.unsaved: dict[Session, float] = {}  # sessions whose saved state may lack something, since when
        self._memory = memory
        self._timer = timer
        self._sessions: dict[Session, Parked] = {}
        # the contents named last, needed again until state comes back: of a session, at a version and position
        self._named: tuple[tuple[Session, int, int, Lineage], list[list[Content]]] | None = None
        self.parked = 0  # total number of sessions parked
        self.recomputed: Counter[str] = Counter()  # parked sessions that are computed again, by cause

    def __len__(self) -> int:
        return len(self.tiers) - len(self.saves)

    @property
    def restores(self) -> bool:
        """Whether there are tiers, from which sessions can be restored."""
        return self.tiers.has_host or self.tiers.has_disk

    @property
    def copying(self) -> bool:
        """Whether copies to the device are under way, which will free units or let turns continue."""
        return len(self.tiers.moves) > 0

    @property
    def used(self) -> dict[str, int]:
        """The number of bytes used, by tier; empty without tiers."""
        return {"host": self.tiers.copies.host_used, "disk": self.tiers.copies.disk_used} if self.restores else {}

    # -- leaving

    def park(self, session: Session) -> bool:
        """Copies the session's memory, which is about to be released. Returns whether all of it is parked now."""
        memory = session.memory
        if not self.restores or not self._settled(session):
            return False
        names = self._contents(session, memory.computed, memory.lineage)
        parked = self.tiers.park(memory.computed, memory.kept(), names, memory.lineage, session.expected)
        if parked is None:
            return False
        self._replace(session, parked)
        self.parked += 1
        return True

    def savable(self, session: Session) -> int:
        """Returns the number of tokens of the history whose state was computed with the weights in use, and is on the
        device or parked."""
        parked, position = self._sessions.get(session), self._settled(session) if session.memory.is_current else 0
        if parked is not None and parked in self.tiers and is_pure(parked.lineage, self._memory.weights):
            position = max(position, parked.position)
        return position

    @staticmethod
    def _settled(session: Session) -> int:
        """Returns the number of tokens of the history whose state the session has on the device; 0 if it may also have
        that of its open turn's input, which may not become history."""
        memory = session.memory
        return memory.computed if memory.computed < len(session.history) and not memory.arriving else 0

    def copied(
        self, session: Session, position: int, ranges: Sequence[tuple[int, int]]
    ) -> list[list[StoredUnit]] | None:
        """Returns copies of units [first, end) of each group, of those kept for `position`, which is at most
        `savable`; the caller has a reference to each. Returns `None` if copying failed."""
        memory = session.memory
        if self._settled(session) >= position:
            kept = [units[first:end] for units, (first, end) in zip(memory.kept(), ranges, strict=True)]
            return self.tiers.copies.take(kept, self._contents(session, position, memory.lineage, ranges))
        parked = self._sessions[session]
        units = [stored[first:end] for stored, (first, end) in zip(parked.units, ranges, strict=True)]
        for unit in chain(*units):
            unit.references += 1
        return units

    def saved(self, session: Session) -> Parked | None:
        """Returns the record of the session's saved state, which is not unread, or `None`."""
        record = self.saves.record(session.key)
        if record is None or not record.unread:
            return record
        names = self._contents(session, record.position, self._memory.current)
        return self.saves.learn(session.key, names, whole=self.needs_whole)

    def lend(self, session: Session) -> LentUnits | None:
        """Lends the parked memory of a session, which another thread may read until `Tiers.take_back`."""
        parked = self._find(session)
        if parked is None:
            return None
        return self.tiers.lend(parked, self._contents(session, parked.position, parked.lineage))

    def parked_at(self, session: Session) -> tuple[int, str]:
        """Returns the number of tokens whose memory is parked, and the tier from which it would come back; 0 and "" if
        there are none. Changes nothing."""
        parked = self._sessions.get(session)
        if parked is None or parked not in self.tiers:
            return 0, ""
        return parked.position, "disk" if parked.on_disk else "host"

    def records(self, session: Session) -> list[Parked]:
        """Returns the session's parked memory and its saved state, with all of their units."""
        found = self._sessions.get(session), self.saved(session)
        return [record for record in found if record is not None and record in self.tiers]

    def sharing(self, units: Collection[StoredUnit]) -> Counter[str]:
        """Returns, by session id, how many of these units sessions have parked or saved."""
        parked = ((session.id, parked) for session, parked in self._sessions.items() if parked in self.tiers)
        found: dict[str, set[StoredUnit]] = {}
        for session_id, record in chain(parked, self.saves.by_session()):
            found.setdefault(session_id, set()).update(unit for unit in record if unit in units)
        return Counter({session_id: len(same) for session_id, same in found.items() if same})

    def position(self, session: Session) -> int:
        """Returns the number of tokens whose memory is parked or saved."""
        parked = self._find(session)
        return parked.position if parked is not None else 0

    def _find(self, session: Session) -> Parked | None:
        """Returns the session's parked memory, or without any its saved state."""
        parked = self._sessions.get(session)
        if parked is not None and parked in self.tiers:
            return parked
        record = self.saved(session)
        if record is None or not 0 < record.position < len(session.history):
            return None
        names = self._contents(session, record.position, self._memory.current)
        shared = self.tiers.share(record, record.position, names, self._memory.current)
        self._replace(session, shared)
        return shared

    def wanted(self, session: Session, most: int) -> Wanted | None:
        """Returns the state of up to `most` tokens that a session without any needs, or `None`."""
        length = max(0, len(session.history) - 1)
        position = most if most <= length else 0 if self.needs_whole else length
        if not position or session.memory.computed or self.position(session):
            return None
        copies = self.tiers.copies
        return Wanted(
            version=session.version,
            position=position,
            names=self._contents(session, position, self._memory.current),
            unit_bytes=[copies.unit_bytes(group) for group in range(len(self._memory.groups))],
            page_size=self._memory.page_size,
            whole=self.needs_whole,
            meaning=self.tiers.meaning,
            identity=self.tiers.identity,
        )

    def hold(self, session: Session, state: CopiedState) -> bool:
        """Parks a session with state from another engine or process. Returns False if there is no room."""
        names = self._contents(session, state.position, self._memory.current)
        parked = self.tiers.hold(state.position, state.groups, names, self._memory.current)
        self._replace(session, parked)
        self._note_unsaved(session)
        return parked is not None

    @property
    def needs_whole(self) -> bool:
        """Whether parked memory can be resumed only where it ends."""
        return self._memory.needs_checkpoints

    def _replace(self, session: Session, parked: Parked | None) -> None:
        before = self._sessions.pop(session, None)
        if before is not None:
            self.tiers.forget(before)
        if parked is not None:
            self._sessions[session] = parked
            self._check(session, parked)

    @staticmethod
    def _check(session: Session, parked: Parked) -> None:
        """Raises `InvariantError` if the class's invariant does not hold."""
        if not 0 < parked.position < len(session.history):
            raise InvariantError(
                f"session {session.id} of {len(session.history)} tokens is parked with the state of {parked.position}"
            )

    def weights_change(self, sessions: Iterable[Session], identity: str, *, keep: bool) -> None:
        """Called before other weights are in use, of this identity, while no copy is under way: ends all saved state.
        With `keep`, sessions may use what they have parked and saved, until they are closed; otherwise nothing is
        parked."""
        if keep:
            for session in sessions:
                self._find(session)
        self.saves.forget_all()
        self.tiers.become(identity, keep=keep)

    def is_parked_current(self, session: Session) -> bool:
        """Whether all parked state of the session was computed with the weights in use."""
        parked = self._find(session)
        return parked is None or is_pure(parked.lineage, self._memory.weights)

    # -- changes of the session

    def changed(self, session: Session, kept: int) -> None:
        """Cuts the session's parked memory and its saved state to the first `kept` tokens of its history, after later
        ones have changed."""
        parked, most = self._sessions.get(session), max(0, kept - 1)
        if parked is not None and parked.position > most:
            self._replace(session, self._part(session, parked, most))
        self._cut_saved(session, most)
        self._note_unsaved(session)

    def _cut_saved(self, session: Session, most: int) -> None:
        if self.saves.reaches(session.key) <= most:
            return
        if self.needs_whole or not most or self.saved(session) is None:
            self.saves.forget(session.key)
        else:
            self.saves.cut(session.key, most, self._counts(session, most))

    def _note_unsaved(self, session: Session) -> None:
        if self.keeps and session.policy.lasting:
            self.unsaved.setdefault(session, self._timer())

    def fork(self, parent: Session, child: Session) -> None:
        """Shares the parent's parked memory or saved state with a fork, whose history is the beginning of the parent's,
        unless the device has as much for it."""
        most = max(0, len(child.history) - 1)
        self._note_unsaved(child)
        if child.memory.computed >= most:
            return
        parked = self._find(parent)
        if parked is not None:
            self._replace(child, self._part(child, parked, most))

    def came(self, session: Session) -> None:
        """Discards the saved state of an earlier session with the key of a new one: the earlier one was given up, and
        may have changed since."""
        self.saves.forget(session.key)

    def forget(self, session: Session, *, keep_saved: bool = False) -> None:
        """Discards the parked memory of a session that is closed or must not be restored, and its saved state, unless
        another engine will look for that (`keep_saved`)."""
        self._replace(session, None)
        if not keep_saved:
            self.saves.forget(session.key)
        self.unsaved.pop(session, None)

    def _part(self, session: Session, parked: Parked, position: int) -> Parked | None:
        """Returns a second `Parked` of at most `position` tokens, or `None` if it could not be resumed."""
        position = self._resumable(parked, position)
        if not position:
            return None
        return self.tiers.share(parked, position, self._contents(session, position, parked.lineage), parked.lineage)

    def _resumable(self, parked: Parked, target: int) -> int:
        """Returns the highest position at or below `target` at which the parked memory can be resumed, or 0."""
        if parked not in self.tiers:
            return 0
        if target >= parked.position:
            return parked.position
        return 0 if self._memory.needs_checkpoints else max(0, target)

    @staticmethod
    def _counts(session: Session, position: int) -> list[int]:
        """Returns the number of units of each group that are kept for a position."""
        return [table.kept_units(position) for table in session.memory.tables]

    def _contents(
        self, session: Session, position: int, lineage: Lineage, ranges: Sequence[tuple[int, int]] | None = None
    ) -> list[list[Content]]:
        """Returns the contents of the units that are kept for a position and were computed with the weights of
        `lineage`, by group. `ranges`: the units [first, end) of each group to name; `end` is the number of all units,
        or the range is empty."""
        name, history, tables = session.digests.contents, session.history, session.memory.tables
        if ranges is not None:
            return [
                name(history, table.kept_ranges(position, first), lineage) if first < end else []
                for table, (first, end) in zip(tables, ranges, strict=True)
            ]
        wanted = session, session.version, position, cut(lineage, position)
        if self._named is None or self._named[0] != wanted:
            self._named = wanted, [name(history, table.kept_ranges(position), lineage) for table in tables]
        return self._named[1]

    # -- coming back

    def restorable(self, session: Session, target: int) -> int:
        """Returns the position, at or below `target`, to which the session's state can be brought back; 0 if it has
        none off the device that goes farther than its memory, or computing it takes less time."""
        if session.memory.turn is not None or (parked := self._find(session)) is None:
            return 0
        position = self._resumable(parked, target)
        if position < session.memory.resumable(target) + self._memory.page_size:
            return 0
        tier = "disk" if parked.on_disk else "host"
        if not parked.trial and not self.tiers.rates.worth(tier, size_of(parked), position):
            return 0
        self.tiers.use(parked, session.expected)  # so that it does not make room for others now
        return position

    def lacking(self, session: Session, position: int, *, alone: bool = False) -> Longs:
        """Returns the units of each group, int64 [groups], that `acquire` takes; `alone`: see `Restoring.units`."""
        parked, counts = self._sessions[session], self._counts(session, position)
        if alone:
            return np.array(counts, np.int64)
        lacking = np.array(self.tiers.lacking(parked, counts), np.int64)
        for group, count in enumerate(counts):  # a shared last page is copied before it is written
            lacking[group] += self.tiers.on_device(parked, group, count)[-1:] not in ([], [None])
        return lacking

    def acquire(
        self, session: Session, position: int, holder: Holder, slots: tuple[Lease, ...] | None = None
    ) -> list[Lease] | None:
        """Returns leases of `holder` on the units of each group kept for `position`: those that the device still has,
        and others of `slots` or, without them, free ones. Returns `None`, having taken nothing, if there are too
        few."""
        leases: list[Lease] = []
        for group, count in enumerate(self._counts(session, position)):
            lease = self._acquire(self._sessions[session], group, count, position, holder, slots)
            if lease is None:
                for taken in leases:
                    taken.release()
                return None
            leases.append(lease)
        return leases

    def bring_back(self, session: Session, position: int, leases: Sequence[Lease]) -> list[Move]:
        """Begins to copy the state of the first `position` tokens to units that `acquire` returned. Returns the moves
        to wait for."""
        parked = self._sessions[session]
        moves = self.tiers.bring_back(parked, leases, self._contents(session, position, parked.lineage))
        self._named = None
        return moves

    def lineage(self, session: Session) -> Lineage:
        """Returns the weights that computed the session's parked state."""
        return self._sessions[session].lineage

    def expect(self, session: Session) -> None:
        """Changes the order in which the session's parked state makes room, after its expectation has changed."""
        if (parked := self._sessions.get(session)) is not None:
            self.tiers.use(parked, session.expected)

    def finish(self) -> None:
        """Waits for copies under way; no turn waits for them."""
        self.tiers.moves.wait()
        self.tiers.take_moved()
        self.tiers.writes.wait()
        self.tiers.take_written()

    def _acquire(
        self,
        parked: Parked,
        group: int,
        count: int,
        position: int,
        holder: Holder,
        slots: tuple[Lease, ...] | None,
    ) -> Lease | None:
        """Returns a lease on the `count` units kept for `position`: those that the device still has, and fresh ones."""
        pool = self._memory.pools[group]
        there = self.tiers.on_device(parked, group, count)
        missing = sum(unit is None for unit in there)
        if slots is not None and self._memory.groups[group].units_at_start:
            fresh = slots[group].take(0, missing, holder) if len(slots[group]) >= missing else None
        else:
            fresh = pool.acquire(missing, holder)
        if fresh is None:
            return None
        new = iter(fresh.units)
        units = array("i", (next(new) if unit is None else unit for unit in there))
        shared = pool.share(units, holder, pool.reads(position))
        fresh.release()
        return shared

    def failed(self, session: Session, cause: str) -> None:
        """Discards state of a session that could not be brought back."""
        self.recomputed[cause] += 1
        self.forget(session)
        session.memory.lost = "parked"

    def audit(self) -> None:
        """Raises `InvariantError` if the records of parked memory are inconsistent."""
        there = len(self.saves)
        for session, parked in self._sessions.items():
            self._check(session, parked)
            there += parked in self.tiers
        if there != len(self.tiers):
            raise InvariantError(f"{len(self.tiers)} sequences are parked or saved, but sessions refer to {there}")
        self.saves.audit()
        self.tiers.audit(self.saves.units())
