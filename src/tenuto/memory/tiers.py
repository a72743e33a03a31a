"""Host memory and disk: copies of units that are not on the device, each kept once for all who want it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import cast

import numpy as np

from tenuto.base.errors import InvariantError
from tenuto.base.plan import Bytes, Copier, CopyFailed
from tenuto.memory.moves import Carrier, Job, Jobs, Move, Moves, Target, Write
from tenuto.memory.parked import ELSEWHERE, KeptUnits, Parked, StoredUnit
from tenuto.memory.pool import Lease, Pool
from tenuto.memory.rates import Rates
from tenuto.memory.snapshots import Run, SavedMemory, Snapshot, decoded
from tenuto.memory.unit_files import Disk, DiskFailed, UnitFile

MAX_LEAVING = 2**29
"""Bytes of host memory, or one session, that may be on their way to disk besides what host memory may hold; for what
exceeds that a step waits."""
_group_of = attrgetter("group")


class Tiers:
    """Parks and brings back memory. Parked memory that was used least recently leaves host memory for disk, and disk
    for nowhere. A unit that several parked sequences share is kept, moved and restored once.

    Invariant: `host_used` is the size of all stored units with `data`, each of which belongs to some `Parked` of
    `_in_host`, or is `leaving`.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        copier: Copier,
        host_bytes: int,
        disk: Disk | None,
        page_size: int,
        timer: Callable[[], float],
        carrier: Carrier,
        identity: str = "",
    ) -> None:
        """`identity`: of what is in units; state is never taken over from a tier of another one."""
        self._pools = pools
        self._copier = copier
        self._host_bytes = host_bytes
        self._disk = disk
        self._page_size = page_size
        self._timer = timer
        self._identity = identity
        self._copies: dict[tuple[int, int], StoredUnit] = {}  # the last copy of each unit, by group and unit
        self._parked: dict[Parked, None] = {}
        self._in_host: OrderedDict[Parked, None] = OrderedDict()  # those not moved to disk, least recently used first
        self.moves = Moves(pools, copier, disk, carrier, timer)
        self._moving: dict[Move, list[StoredUnit]] = {}  # what each move under way brings
        self.writes: Jobs[Write] = Jobs(carrier)
        self._leaving: dict[Write, list[StoredUnit]] = {}  # what each write under way has, in its order
        self._leaving_bytes = 0
        self._carrier = carrier
        self.host_used = 0
        self.disk_used = 0
        self.rates = Rates()
        self.moved: Counter[str] = Counter()  # units, by where to: "host", "disk", "device"
        self.failures: Counter[str] = Counter()  # by cause

    def __len__(self) -> int:
        return len(self._parked)

    def become(self, identity: str) -> None:
        """What is in units is of another `identity` from now on. Nothing is parked yet."""
        if self._parked:
            raise InvariantError(f"{len(self._parked)} sequences are parked of another identity")
        self._identity = identity
        if self._disk is not None:
            self._disk.become(identity)

    # -- parking

    def park(self, position: int, kept: Sequence[KeptUnits]) -> Parked | None:
        """Copy what a session keeps for its first `position` tokens; `None` if there is no room, copying failed or
        computing it again is faster."""
        size = sum(self._unit_size(group) * len(each.units) for group, each in enumerate(kept))
        tier = "host" if size <= self._host_bytes else "disk"
        if (tier == "disk" and self._disk is None) or not self.rates.worth(tier, size, position):
            return None
        parked = self._copied(position, kept)
        if parked is not None and not self._fit():
            self.forget(parked)
        return parked if parked in self._parked else None

    def save(self, position: int, kept: Sequence[KeptUnits]) -> Parked | None:
        """As `park`, but to disk in any case; `None` if that is not possible."""
        parked = self._copied(position, kept)
        if parked is not None and not self.move_to_disk(parked):
            self.forget(parked)
            return None
        return parked

    def _copied(self, position: int, kept: Sequence[KeptUnits]) -> Parked | None:
        """In host memory, however much that takes."""
        parked = Parked(position, [])
        try:
            for group, each in enumerate(kept):
                parked.units.append(self._stored(group, each))
        except CopyFailed:
            self.failures["copy"] += 1
            self._discard(parked)
            return None
        self._parked[parked] = self._in_host[parked] = None
        return parked

    def hold(self, position: int, groups: Sequence[Sequence[Bytes]], used: Sequence[int]) -> Parked | None:
        """Park what was never on the device: units of each group, of the last of which the first `used` slots are of
        value. `None` if there is no room."""
        parked = Parked(position, [])
        for group, (units, last) in enumerate(zip(groups, used, strict=True)):
            slots = [self._page_size] * (len(units) - 1) + [last]
            stored = [
                StoredUnit(group, n, data.nbytes, data, ELSEWHERE, references=1)
                for data, n in zip(units, slots, strict=False)
            ]
            self.host_used += _size(stored)
            parked.units.append(stored)
        self._parked[parked] = self._in_host[parked] = None
        if not self._fit():
            self.forget(parked)
        return parked if parked in self._parked else None

    def _unit_size(self, group: int) -> int:
        return self._copier.unit_bytes(group)

    def _stored(self, group: int, kept: KeptUnits) -> list[StoredUnit]:
        pool, units = self._pools[group], list(kept.units)
        used = [self._page_size] * (len(units) - 1) + [kept.used] if units else []
        found = [self._copy_of(group, unit, n) for unit, n in zip(units, used, strict=True)]
        missing = [i for i, copy in enumerate(found) if copy is None]
        if missing:
            began = self._timer()
            data = self._copier.read_units(group, np.array([units[i] for i in missing], np.int32))
            self.rates.note("park", data.nbytes, self._timer() - began)
            for row, i in enumerate(missing):
                place = units[i], pool.generation[units[i]]
                copy = StoredUnit(group, used[i], data[row].nbytes, data[row], place)
                self._copies[group, units[i]] = found[i] = copy
                self.host_used += copy.size
            self.moved["host"] += len(missing)
        stored = [copy for copy in found if copy is not None]
        for copy in stored:
            copy.references += 1
        return stored

    def _copy_of(self, group: int, unit: int, used: int) -> StoredUnit | None:
        """A copy of the unit as it is now, or was when no more than `used` of its slots were."""
        copy = self._copies.get((group, unit))
        current = copy is not None and copy.place == (unit, self._pools[group].generation[unit])
        return copy if copy is not None and current and copy.references and copy.used >= used else None

    def _fit(self) -> bool:
        """Move the least recently used to disk, or nowhere, until host memory holds the rest, not counting what is on
        its way to disk. False if that failed."""
        while self._too_much and self._in_host:
            parked = next(iter(self._in_host))
            if not self.rates.worth("disk", parked.size, parked.position) or not self._leave(parked):
                self.forget(parked)
        return not self._too_much

    @property
    def _too_much(self) -> bool:
        return self.host_used - self._leaving_bytes > self._host_bytes

    def _leave(self, parked: Parked) -> bool:
        """Have what of it is in host memory written to disk. False if there is none. Waits, if more than `MAX_LEAVING`
        bytes would be on their way."""
        if self._disk is None:
            return False
        if self._leaving_bytes and self._leaving_bytes + _size(self._staying(parked)) > MAX_LEAVING:
            self.writes.wait()
            self.take_written()
        units = self._staying(parked)  # now, since those of a write that has failed stay, too
        self._in_host.pop(parked, None)
        if not units:
            return True
        units.sort(key=lambda unit: unit.group)
        data = {group: [u.data for u in same if u.data is not None] for group, same in groupby(units, _group_of)}
        write = Write(data, self._disk, cast("Callable[[Job], None]", self.writes.tell))
        self._leaving[write] = units
        self._leaving_bytes += _size(units)
        for unit in units:
            unit.leaving = True
            unit.references += 1
        self.writes.carry(write)
        self.take_written()
        return True

    @staticmethod
    def _staying(parked: Parked) -> list[StoredUnit]:
        """Those in host memory that are not on their way to disk."""
        return [unit for unit in parked if unit.data is not None and not unit.leaving]

    def take_written(self) -> None:
        """Note what has become of writes that have ended."""
        for write in self.writes.take_ended():
            units, file = self._leaving.pop(write), write.file
            self._leaving_bytes -= _size(units)
            for unit in units:
                unit.leaving = False
            if file is not None:
                self._on_disk(units, file)
            else:
                self.failures[write.failure] += 1
                lost = set(units)
                for parked in [each for each in self._parked if each not in self._in_host]:
                    if not lost.isdisjoint(parked):
                        self.forget(parked)
            for unit in units:
                self._release(unit)

    def _on_disk(self, units: Sequence[StoredUnit], file: UnitFile) -> None:
        """The units, group by group, have been written to `file`."""
        file.wanted = len(units)
        for _, same in groupby(units, _group_of):
            for row, unit in enumerate(same):
                unit.data, unit.file, unit.row = None, file, row
                self.host_used -= unit.size
                self.disk_used += unit.size
        self.moved["disk"] += len(units)

    def move_to_disk(self, parked: Parked) -> bool:
        """Move to disk, now, what of it is in host memory. False if that is not possible."""
        if not self._leave(parked):
            return False
        self.writes.wait()
        self.take_written()
        return parked in self._parked

    # -- bringing back

    def lacking(self, parked: Parked, units: Sequence[int]) -> list[int]:
        """How many units of each group have to be acquired to bring back the first `units` of each."""
        return [
            sum(self._on_device(unit) is None for unit in stored[:n])
            for stored, n in zip(parked.units, units, strict=True)
        ]

    def _on_device(self, unit: StoredUnit) -> int | None:
        """The unit of the pool that still has the same, or will have it when a move has arrived."""
        number, generation = unit.place
        pool = self._pools[unit.group]
        there = pool.counts[number] > 0 and pool.generation[number] == generation
        return number if there and (unit.move is None or unit.move.usable) else None

    def on_device(self, parked: Parked, group: int, count: int) -> list[int | None]:
        """For each of the first `count` units of a group, the unit on the device that has the same, or will have it, if
        there is one."""
        return [self._on_device(unit) for unit in parked.units[group][:count]]

    def bring_back(self, parked: Parked, leases: Sequence[Lease]) -> list[Move]:
        """Have the first units of each group come to those of `leases`, where they are not yet: the moves to wait for.
        What is on its way for somebody else is not moved again."""
        moves: dict[Move, None] = {}
        moving: list[StoredUnit] = []
        targets: list[Target] = []
        for group, lease in enumerate(leases):
            for stored, unit in zip(parked.units[group], lease.units, strict=False):
                if self._on_device(stored) is None:
                    moving.append(stored)
                    targets.append(Target(group, unit, stored.size, stored.data, stored.file, stored.row))
                elif stored.move is not None:
                    moves[stored.move] = None
        if targets:
            move = self.moves.begin(targets)
            moves[move] = None
            self._moving[move] = moving
            for stored, target in zip(moving, targets, strict=True):
                stored.place = target.unit, self._pools[stored.group].generation[target.unit]
                stored.move = move
                stored.references += 1
                self._copies[stored.group, target.unit] = stored
        for move in moves:
            move.wanted += 1
        return list(moves)

    def take_moved(self) -> None:
        """Note what has become of moves that have ended."""
        for move in self.moves.take_ended():
            if move.failure and not move.cancelled:
                self.failures[move.failure] += 1
            self.rates.note("disk", *move.read)
            self.rates.note("host", *move.written)
            self.moved["device"] += len(move.targets) if move.usable else 0
            for stored in self._moving.pop(move):
                if stored.move is move:
                    stored.move = None
                    if not move.usable:
                        self._not_there(stored)
                self._release(stored)

    def _not_there(self, unit: StoredUnit) -> None:
        """What was on its way to the device will not arrive."""
        if self._copies.get((unit.group, unit.place[0])) is unit:
            del self._copies[unit.group, unit.place[0]]
        unit.place = ELSEWHERE

    def copies(self, parked: Parked) -> list[list[Bytes]] | None:
        """All its units, those read that are not in host memory. `None` if that failed."""
        read: dict[StoredUnit, Bytes] = {}
        try:
            for (group, file), units in _by_place(parked).items():
                if file is not None and self._disk is not None:
                    found = self._disk.read(file, {group: [unit.row for unit in units]})
                    read.update(zip(units, found[group], strict=True))
        except DiskFailed as error:
            self.failures[error.cause] += 1
            self.forget(parked)
            return None
        return [[unit.data if unit.data is not None else read[unit] for unit in group] for group in parked.units]

    # -- references

    def use(self, parked: Parked) -> None:
        """It was of use."""
        if parked in self._in_host:
            self._in_host.move_to_end(parked)

    def share(self, parked: Parked, position: int, counts: Sequence[int]) -> Parked:
        """A second one of the first `position` tokens: the first `counts` units of each group."""
        shared = Parked(position, [stored[:n] for stored, n in zip(parked.units, counts, strict=True)])
        for group in shared.units:
            for unit in group:
                unit.references += 1
        self._parked[shared] = self._in_host[shared] = None
        return shared

    def forget(self, parked: Parked) -> None:
        """It is not needed any more."""
        if parked in self._parked:
            del self._parked[parked]
            self._in_host.pop(parked, None)
            self._discard(parked)

    def __contains__(self, parked: Parked) -> bool:
        return parked in self._parked

    def _discard(self, parked: Parked) -> None:
        for group in parked.units:
            for unit in group:
                self._release(unit)
        parked.units = [[] for _ in parked.units]

    def _release(self, unit: StoredUnit) -> None:
        unit.references -= 1
        if unit.references:
            return
        if self._copies.get((unit.group, unit.place[0])) is unit:
            del self._copies[unit.group, unit.place[0]]
        if unit.data is not None:
            self.host_used -= unit.size
            unit.data = None
        elif unit.file is not None:
            self.disk_used -= unit.size
            unit.file.wanted -= 1
            if not unit.file.wanted and self._disk is not None:
                self._disk.remove(unit.file)
            unit.file = None

    def audit(self) -> None:
        """Recount references and bytes. Raises `InvariantError`."""
        found: Counter[StoredUnit] = Counter(u for parked in self._parked for group in parked.units for u in group)
        for units in (*self._moving.values(), *self._leaving.values()):
            found.update(units)
        host = sum(unit.size for unit in found if unit.data is not None)
        disk = sum(unit.size for unit in found if unit.file is not None)
        if any(unit.references != n or (unit.data is None) == (unit.file is None) for unit, n in found.items()):
            raise InvariantError("a stored unit has a wrong count of references, or is in two places or none")
        if (host, disk) != (self.host_used, self.disk_used):
            raise InvariantError(
                f"stored units: {host} bytes in host memory and {disk} on disk, "
                f"counted as {self.host_used} and {self.disk_used}"
            )

    # -- from one process to the next

    @property
    def has_disk(self) -> bool:
        return self._disk is not None

    def write_index(self, saved: Sequence[tuple[str, str, bytes, Parked]]) -> bool:
        """Write down whose memory is on disk: tenant, session, and the tokens, int32, of which it is. False, counted,
        if that failed."""
        if self._disk is None:
            return False
        files: dict[UnitFile, int] = {}
        sessions = [
            SavedMemory(
                tenant=tenant,
                session=session,
                tokens=tokens,
                groups=[_runs(group, files) for group in parked.units],
            )
            for tenant, session, tokens, parked in saved
        ]
        snapshot = Snapshot(
            identity=self._identity,
            unit_bytes=self._unit_bytes(),
            page_size=self._page_size,
            files=[file.name for file in files],
            sessions=sessions,
        )
        try:
            self._disk.write_index(snapshot.encoded())
        except DiskFailed as error:
            self.failures[error.cause] += 1
            return False
        return True

    def _unit_bytes(self) -> list[int]:
        return [self._unit_size(group) for group in range(len(self._pools))]

    def read_index(self) -> Snapshot | None:
        """What a process before this one has written down, if anything. Raises `SnapshotUnusable` or `DiskFailed`."""
        data = self._disk.read_index() if self._disk is not None else None
        return decoded(data, self._identity, self._unit_bytes(), self._page_size) if data is not None else None

    def take_over(
        self, snapshot: Snapshot | None, wanted: Iterable[tuple[SavedMemory, int, Sequence[int]]]
    ) -> list[Parked | None]:
        """Go on with what is on disk: of each saved memory the first `counts` units of each group, for its first
        `position` tokens; `None` for those whose files are gone. All else that is on disk is removed."""
        if self._disk is None:
            return []
        there = self._disk.files()
        names = snapshot.files if snapshot is not None else []
        files = [UnitFile(name, there[name], 0) if name in there else None for name in names]
        units: dict[tuple[int, int, int], StoredUnit] = {}
        taken = [self._taken_over(saved, position, counts, files, units) for saved, position, counts in wanted]
        self._disk.take_over(file for file in files if file is not None and file.wanted)
        return taken

    def _taken_over(
        self,
        saved: SavedMemory,
        position: int,
        counts: Sequence[int],
        files: Sequence[UnitFile | None],
        units: dict[tuple[int, int, int], StoredUnit],
    ) -> Parked | None:
        """`units`: those that others have, too, by group, file and row."""
        places = [
            [(run, run.row + i) for run in runs for i in range(run.count)][:count]
            for runs, count in zip(saved.groups, counts, strict=True)
        ]
        complete = all(len(found) == count for found, count in zip(places, counts, strict=True))
        if not complete or any(files[run.file] is None for found in places for run, _ in found):
            return None
        parked = Parked(position, [[] for _ in places])
        for group, found in enumerate(places):
            for run, row in found:
                file = files[run.file]
                unit = units.get((group, run.file, row))
                if unit is None and file is not None:
                    unit = StoredUnit(group, run.used, self._unit_size(group), None, ELSEWHERE, file=file, row=row)
                    units[group, run.file, row] = unit
                    self.disk_used += unit.size
                    file.wanted += 1
                if unit is not None:
                    unit.references += 1
                    parked.units[group].append(unit)
        self._parked[parked] = None
        return parked

    def close(self, *, keep: bool = False) -> None:
        """Nothing is parked or brought back any more; see `Disk.close`. Moves under way are cancelled and waited
        for."""
        self.moves.cancel()
        self.writes.cancel()
        self._carrier.close()
        if self._disk is not None:
            self._disk.close(keep=keep)


def _size(units: Iterable[StoredUnit]) -> int:
    """Bytes."""
    return sum(unit.size for unit in units)


def _by_place(parked: Parked) -> dict[tuple[int, UnitFile | None], list[StoredUnit]]:
    """Its units by group and file; `None`: in host memory."""
    places: dict[tuple[int, UnitFile | None], list[StoredUnit]] = {}
    for unit in parked:
        places.setdefault((unit.group, unit.file), []).append(unit)
    return places


def _runs(units: Sequence[StoredUnit], files: dict[UnitFile, int]) -> list[Run]:
    """Where units on disk are; `files` numbers the files."""
    places = [
        (files.setdefault(unit.file, len(files)), unit.row - i, unit.used)
        for i, unit in enumerate(units)
        if unit.file is not None
    ]
    if len(places) < len(units):
        raise InvariantError("a unit that is not on disk would be written down as if it were")
    runs, start = [], 0
    for (file, shift, used), same in groupby(places):
        count = sum(1 for _ in same)
        runs.append(Run(file, shift + start, count, used))
        start += count
    return runs
