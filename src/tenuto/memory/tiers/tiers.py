"""The host and disk tiers: copies of units, each kept once for all sequences that use it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import numpy as np

from tenuto.base.errors import InvariantError
from tenuto.base.plan import Bytes, Copier, CopyFailed
from tenuto.memory.pool import Lease, Pool
from tenuto.memory.tiers.contents import Content, Contents
from tenuto.memory.tiers.lent import LentUnits
from tenuto.memory.tiers.moves import Carrier, Move, MovesUnderWay, Target
from tenuto.memory.tiers.parked import ELSEWHERE, Parked, StoredUnit, recounted, size_of
from tenuto.memory.tiers.rates import Rates
from tenuto.memory.tiers.snapshots import SavedMemory, Snapshot, decoded
from tenuto.memory.tiers.taken_over import FoundUnits, snapshot_of
from tenuto.memory.tiers.unit_files import Disk, DiskFailed, UnitFile
from tenuto.memory.tiers.writes import WritesUnderWay, in_groups


class Tiers:
    """Parks and restores memory. The least recently used parked memory moves from host memory to disk, and is discarded
    from disk. A unit that several parked sequences share is kept, moved and restored once.

    Invariants: `host_used` is the size of all stored units with `data`, each of which belongs to some `Parked` of
    `_in_host`, or is `leaving`. Every `Parked` is in `_in_host` or in `_on_disk`, each in the order of their last use.
    `_file_bytes` is the size of all files that stored units refer to, and with `writes.size` never exceeds the
    disk's budget. A stored unit is only used for a sequence whose tokens its content covers.
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
        """`identity` stands for the meaning of units' contents; state with another identity is never taken over."""
        self._pools = pools
        self._copier = copier
        self._host_bytes = host_bytes
        self._disk = disk
        self._page_size = page_size
        self._timer = timer
        self._identity = identity
        self._copies: dict[tuple[int, int], StoredUnit] = {}  # the last copy of each unit, by group and unit
        self._in_host: OrderedDict[Parked, None] = OrderedDict()  # not moved to disk, least recently used first
        self._on_disk: OrderedDict[Parked, None] = OrderedDict()  # on disk or on their way there
        self.moves = MovesUnderWay(pools, copier, disk, carrier, timer)
        self._moving: dict[Move, list[StoredUnit]] = {}  # the units of each move under way
        self.writes = WritesUnderWay(carrier)
        self._carrier = carrier
        self.host_used = 0
        self.disk_used = 0
        self._file_bytes = 0
        self.rates = Rates()
        # Units by target: "host", "disk" or "device", or "nowhere" if they were discarded to make room:
        self.moved: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        """Failures by cause: "full" (no room on disk), "busy" (no room on disk while writes are under way), "copy", and
        the causes of `DiskFailed`."""

    def __len__(self) -> int:
        return len(self._in_host) + len(self._on_disk)

    def become(self, identity: str) -> None:
        """Changes the identity of units' contents. Nothing may be parked."""
        if len(self):
            raise InvariantError(f"{len(self)} sequences of another identity are parked")
        self._identity = identity
        if self._disk is not None:
            self._disk.become(identity)

    # -- parking

    def park(self, position: int, kept: Sequence[Sequence[int]], names: Contents) -> Parked | None:
        """Copies the units of each group that a session keeps for its first `position` tokens; `names` are their
        contents. Returns `None` if there is no room, copying failed, or computing the tokens again is faster."""
        size = sum(self._copier.unit_bytes(group) * len(units) for group, units in enumerate(kept))
        tier = "host" if size <= self._host_bytes else "disk"
        if tier == "disk" and self._disk is None:
            return None
        worth = self.rates.worth(tier, size, position)
        if not worth and not self.rates.retry(tier):
            return None
        parked = self._copied(position, kept, names)
        if parked is not None:
            parked.trial = not worth
        return self._fitted(parked) if parked is not None else None

    def save(self, position: int, kept: Sequence[Sequence[int]], names: Contents) -> Parked | None:
        """Parks units like `park`, but always on disk. Returns `None` if that is not possible."""
        parked = self._copied(position, kept, names)
        if parked is not None and not self.move_to_disk(parked):
            self.forget(parked)
            return None
        return parked

    def _copied(self, position: int, kept: Sequence[Sequence[int]], names: Contents) -> Parked | None:
        """Copies units to host memory, even beyond its budget. Returns `None` if copying failed."""
        parked = Parked(position, [])
        try:
            for group, (units, held) in enumerate(zip(kept, names, strict=True)):
                parked.units.append(self._stored(group, units, held))
        except CopyFailed:
            self.failures["copy"] += 1
            self._discard(parked)
            return None
        self._in_host[parked] = None
        return parked

    def hold(self, position: int, groups: Sequence[Sequence[Bytes]], names: Contents) -> Parked | None:
        """Parks units of each group that were never on the device; `names` are their contents. Returns `None` if there
        is no room."""
        parked = Parked(position, [])
        for group, (units, held) in enumerate(zip(groups, names, strict=True)):
            stored = [
                StoredUnit(group, content, data.nbytes, data, ELSEWHERE, references=1)
                for data, content in zip(units, held, strict=True)
            ]
            self.host_used += size_of(stored)
            parked.units.append(stored)
        self._in_host[parked] = None
        return self._fitted(parked)

    def _stored(self, group: int, units: Sequence[int], held: Sequence[Content]) -> list[StoredUnit]:
        pool = self._pools[group]
        found = [self._copy_of(group, unit, content) for unit, content in zip(units, held, strict=True)]
        missing = [i for i, copy in enumerate(found) if copy is None]
        if missing:
            began = self._timer()
            data = self._copier.read_units(group, np.array([units[i] for i in missing], np.int32))
            self.rates.note("park", data.nbytes, self._timer() - began)
            for row, i in enumerate(missing):
                place = units[i], pool.generation[units[i]]
                copy = StoredUnit(group, held[i], data[row].nbytes, data[row], place)
                self._copies[group, units[i]] = found[i] = copy
                self.host_used += copy.size
            self.moved["host"] += len(missing)
        stored = [copy for copy in found if copy is not None]
        for copy in stored:
            copy.references += 1
        return stored

    def _copy_of(self, group: int, unit: int, content: Content) -> StoredUnit | None:
        """Returns an existing copy of the unit if it has all of `content`. It has only part of it if slots of the page
        were filled since. Raises `InvariantError` if it has anything else."""
        copy = self._copies.get((group, unit))
        if copy is None or not copy.references or copy.place != (unit, self._pools[group].generation[unit]):
            return None
        if copy.content.covers(content):
            return copy
        if not content.covers(copy.content):
            raise InvariantError(f"unit {unit} of {self._pools[group].name} holds other tokens than its copy")
        return None

    def _fitted(self, parked: Parked) -> Parked | None:
        """Moves the least recently used memory to disk, or discards it, until the rest fits host memory, without the
        units on their way to disk. Discards `parked` if that failed, and returns it if it is still there."""
        while (too_much := self.host_used - self.writes.size > self._host_bytes) and self._in_host:
            oldest = next(iter(self._in_host))
            worth = oldest.trial or self.rates.worth("disk", size_of(oldest), oldest.position)
            if not worth or not self._leave(oldest):
                self.forget(oldest)
        if too_much:
            self.forget(parked)
        return parked if parked in self else None

    def _leave(self, parked: Parked) -> bool:
        """Writes the units of `parked` that are in host memory to disk. Returns False without a disk tier, or if it has
        no room. Waits for the writes under way if they have no room for it."""
        if self._disk is None:
            return False
        if not self.writes.has_room(size_of(parked.staying)):
            self.writes.wait()
            self.take_written()
        units = parked.staying  # after the wait, since the units of a failed write stay too
        if units and not self._make_room(size_of(units), parked):
            self.failures["busy" if self.writes.size else "full"] += 1
            return False
        if parked in self._in_host:
            del self._in_host[parked]
            self._on_disk[parked] = None
        if not units:
            return True
        self.writes.begin(units, self._disk)
        self.take_written()
        return True

    def _make_room(self, size: int, parked: Parked | None = None) -> bool:
        """Discards the least recently used memory on disk until `size` more bytes, for `parked`, fit. Pinned memory and
        memory on its way to disk stay. Returns False if there is not enough room."""
        budget = self._disk.budget if self._disk is not None else 0
        while self._file_bytes + self.writes.size + size > budget:
            victims = (
                each
                for each in self._on_disk
                if each is not parked and not each.pinned and not any(unit.leaving for unit in each)
            )
            victim = next(victims, None) if size <= budget else None
            if victim is None:
                return False
            self.moved["nowhere"] += sum(map(len, victim.units))
            self.forget(victim)
        return True

    def take_written(self) -> None:
        """Processes writes that have ended."""
        for write, units in self.writes.take_units():
            if write.file is not None:
                self._arrived(units, write.file)
            else:
                self._not_written(units, write.failure)
            for unit in units:
                self._release(unit)

    def _not_written(self, units: Sequence[StoredUnit], cause: str) -> None:
        """Discards the parked memory that these units belong to. If the file system is full although the budget is not,
        also discards the least recently used memory on disk, so that the next write finds room."""
        self.failures[cause] += 1
        lost = set(units)
        for parked in [each for each in self._on_disk if not lost.isdisjoint(each)]:
            self.forget(parked)
        if cause == "full" and self._disk is not None:
            self._make_room(max(0, self._disk.budget - self._file_bytes - self.writes.size) + size_of(units))

    def _arrived(self, units: Sequence[StoredUnit], file: UnitFile) -> None:
        """Records that the units, group by group, have been written to `file`."""
        file.wanted = len(units)
        self._file_bytes += file.size
        for _, same in in_groups(units):
            for row, unit in enumerate(same):
                unit.data, unit.file, unit.row = None, file, row
                self.host_used -= unit.size
                self.disk_used += unit.size
        self.moved["disk"] += len(units)

    def move_to_disk(self, parked: Parked) -> bool:
        """Moves the units of `parked` in host memory to disk, and waits for that. Returns False if it failed."""
        if not self._leave(parked):
            return False
        self.writes.wait()
        self.take_written()
        return parked in self

    # -- restoring

    def lacking(self, parked: Parked, units: Sequence[int]) -> list[int]:
        """Returns the number of units of each group to acquire to restore the first `units` of each."""
        return [self.on_device(parked, group, n).count(None) for group, n in enumerate(units)]

    def _on_device(self, unit: StoredUnit) -> int | None:
        """Returns the unit of the pool that still has the same contents, or will have them when a move has ended."""
        number, generation = unit.place
        pool = self._pools[unit.group]
        there = pool.counts[number] > 0 and pool.generation[number] == generation
        return number if there and (unit.move is None or unit.move.usable) else None

    def on_device(self, parked: Parked, group: int, count: int) -> list[int | None]:
        """Returns, for each of the first `count` units of a group, the unit on the device that has the same contents or
        will have them, or `None`."""
        return [self._on_device(unit) for unit in parked.units[group][:count]]

    def bring_back(self, parked: Parked, leases: Sequence[Lease], names: Contents) -> list[Move]:
        """Copies the first units of each group to those of `leases`, unless they are there already, and returns the
        moves to wait for. Units that are on their way are not moved again. `names`: the contents that the units must
        have, derived from the tokens of the receiving session. Raises `InvariantError` if they have other contents."""
        parked.check(names)
        moves: dict[Move, None] = {}
        moving: list[StoredUnit] = []
        targets: list[Target] = []
        for group, lease in enumerate(leases):
            for stored, unit, content in zip(parked.units[group], lease.units, names[group], strict=False):
                if self._on_device(stored) is None:
                    moving.append(stored)
                    targets.append(Target(unit, stored.copy(content)))
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
        """Processes moves that have ended."""
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
        """Records that a copy will not arrive on the device."""
        if self._copies.get((unit.group, unit.place[0])) is unit:
            del self._copies[unit.group, unit.place[0]]
        unit.place = ELSEWHERE

    def lend(self, parked: Parked, names: Contents) -> LentUnits:
        """Lends the units of `parked` to another thread, which may read them until `take_back`. `names`: see
        `bring_back`."""
        shared = self.share(parked, parked.position, names)
        shared.pinned = True
        return LentUnits.of(shared, names, self._disk)

    def take_back(self, lent: LentUnits) -> None:
        """Ends a loan, after the other thread has read the units."""
        if lent.failure:
            self.failures[lent.failure] += 1
        self.forget(lent.parked)

    # -- references

    def use(self, parked: Parked) -> None:
        """Marks `parked` as the most recently used."""
        for kept in (self._in_host, self._on_disk):
            if parked in kept:
                kept.move_to_end(parked)

    def share(self, parked: Parked, position: int, names: Contents) -> Parked:
        """Returns a second `Parked` for the first `position` tokens, with the first units of each group. `names`: see
        `bring_back`."""
        parked.check(names)
        shared = Parked(position, [stored[: len(held)] for stored, held in zip(parked.units, names, strict=True)])
        for unit in shared:
            unit.references += 1
        (self._in_host if parked in self._in_host else self._on_disk)[shared] = None
        return shared

    def forget(self, parked: Parked) -> None:
        """Discards `parked`, which is no longer needed."""
        if parked in self:
            self._in_host.pop(parked, None)
            self._on_disk.pop(parked, None)
            self._discard(parked)

    def __contains__(self, parked: Parked | None) -> bool:
        return parked in self._in_host or parked in self._on_disk

    def _discard(self, parked: Parked) -> None:
        for unit in parked:
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
                self._file_bytes -= unit.file.size
                self._disk.remove(unit.file)
            unit.file = None

    def audit(self) -> None:
        """Recounts references and bytes. Raises `InvariantError`."""
        found: Counter[StoredUnit] = Counter(chain.from_iterable((*self._in_host, *self._on_disk)))
        found.update(chain(*self._moving.values(), self.writes.units()))
        counted = self.host_used, self.disk_used, self._file_bytes
        if (bytes_found := recounted(found)) != counted:
            raise InvariantError(f"host memory, disk and files have {bytes_found} bytes, counted as {counted}")
        if self._disk is not None and self._file_bytes + self.writes.size > self._disk.budget:
            raise InvariantError(f"files have {self._file_bytes} bytes, and {self.writes.size} bytes are leaving")

    # -- from one process to the next

    @property
    def has_host(self) -> bool:
        return self._host_bytes > 0

    @property
    def has_disk(self) -> bool:
        return self._disk is not None

    def write_index(self, saved: Sequence[tuple[str, str, bytes, Parked]]) -> bool:
        """Writes the index of memory on disk: for each entry tenant, session, tokens (int32) and units. Returns False,
        and counts a failure, if that failed."""
        if self._disk is None:
            return False
        snapshot = snapshot_of(self._identity, self._unit_bytes(), self._page_size, saved)
        try:
            self._disk.write_index(snapshot.encoded())
        except DiskFailed as error:
            self.failures[error.cause] += 1
            return False
        return True

    def _unit_bytes(self) -> list[int]:
        return [self._copier.unit_bytes(group) for group in range(len(self._pools))]

    def read_index(self) -> Snapshot | None:
        """Returns the index that an earlier process wrote, or `None`. Raises `SnapshotUnusable` or `DiskFailed`."""
        data = self._disk.read_index() if self._disk is not None else None
        return decoded(data, self._identity, self._unit_bytes(), self._page_size) if data is not None else None

    def take_over(
        self, snapshot: Snapshot | None, wanted: Iterable[tuple[SavedMemory, int, Contents]]
    ) -> list[Parked | None]:
        """Takes over memory on disk. `wanted`, in the order of last use, has for each saved memory the number of tokens
        to take, and the contents that their units must have, derived from the session's tokens. Returns `None` for
        memory whose files are gone. Removes everything else from the disk."""
        if self._disk is None:
            return []
        found = FoundUnits(snapshot, self._disk.files(), self._unit_bytes())
        taken = [found.parked(saved, position, names) for saved, position, names in wanted]
        self._on_disk.update((parked, None) for parked in taken if parked is not None)
        kept = found.files_in_use
        self.disk_used = size_of(found.units.values())
        self._file_bytes = sum(file.size for file in kept)
        self._disk.take_over(kept)
        self._make_room(0)  # the budget may be smaller than it was
        return [parked if parked in self else None for parked in taken]

    def close(self, *, keep: bool = False) -> None:
        """Ends parking and restoring: cancels jobs under way, waits for them, and closes the disk; see `Disk.close`."""
        self.moves.cancel()
        self.writes.cancel()
        self._carrier.close()
        if self._disk is not None:
            self._disk.close(keep=keep)
