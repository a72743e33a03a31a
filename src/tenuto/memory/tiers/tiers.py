"""The host and disk tiers: copies of units, each kept once for all sequences that use it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice

import numpy as np

from tenuto.base.errors import InvariantError
from tenuto.base.plan import Bytes, Copier, CopyFailed
from tenuto.memory.pool import Lease, Pool
from tenuto.memory.tiers.contents import Content, Contents
from tenuto.memory.tiers.disk import Disk, DiskFailed, UnitFile
from tenuto.memory.tiers.lent import LentUnits
from tenuto.memory.tiers.moves import Carrier, Lister, Move, MovesUnderWay, Target, Write
from tenuto.memory.tiers.parked import ELSEWHERE, Parked, StoredUnit, recounted, size_of
from tenuto.memory.tiers.rates import Rates
from tenuto.memory.tiers.writes import WritesUnderWay, group_of, in_groups

VICTIMS = 8
"""The number of least recently used records of which the one with the fewest tokens makes room first."""


class Tiers:
    """Parks and restores memory. The least recently used parked memory moves from host memory to disk, and is discarded
    from disk. A unit that several parked sequences share is kept, moved and restored once.

    Invariants: `host_used` is the size of all stored units with `data`. Every `Parked` is in `_in_host`, whose units
    stay in host memory, or in `_on_disk`, each in the order of their last use. `disk_used` is the size of all files
    that stored units and `unread` records refer to, and with `writes.size` never exceeds the disk's budget. A stored
    unit is only used for a sequence whose tokens its content covers.
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
        self._at: dict[tuple[UnitFile, int, int], StoredUnit] = {}  # units in files, by file, group and row
        self.host_used = 0
        self.disk_used = 0
        self.unlisted: list[Parked] = []  # listed records that were discarded; taken by `Saves`
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
            self.clear_index()

    def clear_index(self) -> None:
        """Begins an empty index of the disk, or counts a failure."""
        try:
            if self._disk is not None:
                self._disk.index.clear(self.meaning)
        except DiskFailed as error:
            self.failures[error.cause] += 1

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
        copied = self.copied(kept, names, in_host=tier == "host")
        if copied is None:
            return None
        parked = Parked(position, copied, trial=not worth)
        self._to_host(parked)
        return self._fitted(parked)

    def copied(
        self, kept: Sequence[Sequence[int]], names: Contents, *, in_host: bool = False
    ) -> list[list[StoredUnit]] | None:
        """Returns copies of units by group, with a reference of the caller to each; those that are not on disk, or with
        `in_host` all, are in host memory, even beyond its budget. Returns `None` if copying failed."""
        copies: list[list[StoredUnit]] = []
        try:
            for group, (units, held) in enumerate(zip(kept, names, strict=True)):
                copies.append(self._stored(group, units, held, in_host=in_host))
        except CopyFailed:
            self.failures["copy"] += 1
            self.release(chain(*copies))
            return None
        return copies

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
        self._to_host(parked)
        return self._fitted(parked)

    def _stored(self, group: int, units: Sequence[int], held: Sequence[Content], *, in_host: bool) -> list[StoredUnit]:
        pool = self._pools[group]
        found = [self._copy_of(group, unit, content) for unit, content in zip(units, held, strict=True)]
        missing = [i for i, copy in enumerate(found) if copy is None or (in_host and copy.data is None)]
        if missing:
            began = self._timer()
            data = self._copier.read_units(group, np.array([units[i] for i in missing], np.int32))
            self.rates.note("park", data.nbytes, self._timer() - began)
            for row, i in enumerate(missing):
                copy = found[i]
                if copy is None:
                    place = units[i], pool.generation[units[i]]
                    copy = StoredUnit(group, held[i], data[row].nbytes, None, place)
                    self._copies[group, units[i]] = found[i] = copy
                copy.data = data[row]
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

    def _to_host(self, parked: Parked) -> None:
        self._in_host[parked] = None
        for unit in parked:
            unit.hosts += 1

    def _out_of_host(self, parked: Parked) -> None:
        del self._in_host[parked]
        for unit in parked:
            unit.hosts -= 1
            self._shed(unit)

    def _shed(self, unit: StoredUnit) -> None:
        """Discards the copy in host memory of a unit on disk that nobody needs there."""
        if unit.file is not None and unit.data is not None and not unit.hosts and not unit.leaving:
            unit.data = None
            self.host_used -= unit.size

    def _fitted(self, parked: Parked) -> Parked | None:
        """Moves the least recently used memory to disk, or discards it, until the rest fits host memory, without the
        units on their way to disk. Discards `parked` if that failed, and returns it if it is still there."""
        if size_of(parked) > self._host_bytes and not self._leave(parked):
            self.forget(parked)
        while (too_much := self.host_used - self.writes.size > self._host_bytes) and self._in_host:
            oldest = next(iter(self._in_host))
            worth = oldest.trial or self.rates.worth("disk", size_of(oldest), oldest.position)
            if not worth or not self._leave(oldest):
                self.forget(oldest)
        if too_much:
            self.forget(parked)
        return parked if parked in self else None

    def _leave(self, parked: Parked) -> bool:
        """Writes the units of `parked` that are in host memory alone to disk. Returns False without a disk tier, or if
        it has no room. Waits for the writes under way if they have no room for it."""
        if self._disk is None:
            return False
        if not self.writes.has_room(size_of(parked.staying)):
            self.writes.wait()
            self.take_written()
        units = parked.staying  # after the wait, since the units of a failed write stay too
        if units and not self.make_room(size_of(units), parked):
            self.failures["busy" if self.writes.size else "full"] += 1
            return False
        if parked in self._in_host:
            self._out_of_host(parked)
            self._on_disk[parked] = None
        if units:
            self.writes.begin([sorted(units, key=group_of)], self._disk)
            self.take_written()
        return True

    def make_room(self, size: int, parked: Parked | None = None) -> bool:
        """Discards memory on disk until `size` more bytes, for `parked`, fit: what was used least recently, and of that
        first what takes the fewest tokens to compute. Pinned memory and memory on its way to disk stay. Returns False
        if there is not enough room."""
        budget = self._disk.budget if self._disk is not None else 0
        while self.disk_used + self.writes.size + size > budget:
            victims = (
                each
                for each in self._on_disk
                if each is not parked and not each.pinned and not any(unit.leaving for unit in each)
            )
            oldest = islice(victims, VICTIMS if size <= budget else 0)
            victim = min(oldest, key=lambda each: each.position, default=None)
            if victim is None:
                return False
            self.moved["nowhere"] += sum(map(len, victim.units))
            self.forget(victim)
        return True

    def begin_write(self, batches: Sequence[Sequence[StoredUnit]], listed: Lister) -> Write:
        """Begins to write batches of units that are only in host memory, each in the order of groups and to a separate
        file, and then to change the index of the disk. There must be a disk, with room for the units."""
        if self._disk is None:
            raise InvariantError("units are saved, but there is no disk tier")
        return self.writes.begin(batches, self._disk, listed)

    def take_written(self) -> None:
        """Processes writes that have ended."""
        for write, batches in self.writes.take_batches():
            if not write.failure:
                for file, units in zip(write.files, batches, strict=True):
                    self._arrived(units, file)
            else:
                self._not_written(list(chain(*batches)), write.failure, alone=2 if write.saves else 0)
            self.release(chain(*batches))

    def _not_written(self, units: Sequence[StoredUnit], cause: str, alone: int) -> None:
        """Discards the parked memory that these units belong to; those with `alone` references belong to none. If the
        file system is full although the budget is not, also discards the least recently used memory on disk, so that
        the next write finds room."""
        self.failures[cause] += 1
        lost = {unit for unit in units if unit.references > alone}
        for parked in [each for each in self._on_disk if not lost.isdisjoint(each)] if lost else ():
            self.forget(parked)
        if cause == "full" and self._disk is not None:
            self.make_room(max(0, self._disk.budget - self.disk_used - self.writes.size) + size_of(units))

    def _arrived(self, units: Sequence[StoredUnit], file: UnitFile) -> None:
        """Records that the units, group by group, have been written to `file`."""
        file.wanted = len(units)
        self.disk_used += file.size
        for group, same in in_groups(units):
            for row, unit in enumerate(same):
                unit.file, unit.row = file, row
                self._at[file, group, row] = unit
                self._shed(unit)
        self.moved["disk"] += len(units)

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
        if parked in self._in_host:
            self._to_host(shared)
        else:
            self._on_disk[shared] = None
        return shared

    def forget(self, parked: Parked) -> None:
        """Discards `parked`, which is no longer needed."""
        if parked not in self:
            return
        if parked in self._in_host:
            self._out_of_host(parked)
        self._on_disk.pop(parked, None)
        self.release(parked)
        self.forget_files(parked)
        parked.units = [[] for _ in parked.units]
        if parked.key is not None:
            self.unlisted.append(parked)

    def __contains__(self, parked: Parked | None) -> bool:
        return parked in self._in_host or parked in self._on_disk

    def release(self, units: Iterable[StoredUnit]) -> None:
        """Ends a reference to each of the units."""
        for unit in units:
            self._release(unit)

    def _release(self, unit: StoredUnit) -> None:
        unit.references -= 1
        if unit.references:
            self._shed(unit)
            return
        if self._copies.get((unit.group, unit.place[0])) is unit:
            del self._copies[unit.group, unit.place[0]]
        if unit.data is not None:
            self.host_used -= unit.size
            unit.data = None
        if unit.file is not None:
            del self._at[unit.file, unit.group, unit.row]
            self._unwanted(unit.file)
            unit.file = None

    def _unwanted(self, file: UnitFile) -> None:
        """Ends a use of the file, which is removed after the last."""
        file.wanted -= 1
        if not file.wanted and self._disk is not None:
            self.disk_used -= file.size
            self._disk.remove(file)

    def audit(self, others: Iterable[StoredUnit] = ()) -> None:
        """Recounts references and bytes; `others`: units with references from elsewhere, once for each. Raises
        `InvariantError`."""
        found: Counter[StoredUnit] = Counter(chain.from_iterable((*self._in_host, *self._on_disk)))
        found.update(chain(*self._moving.values(), self.writes.units(), others))
        counted = self.host_used, self.disk_used
        if (bytes_found := recounted(found, self._on_disk)) != counted:
            raise InvariantError(f"host memory and files have {bytes_found} bytes, counted as {counted}")
        hosts = Counter(chain.from_iterable(self._in_host))
        if any(unit.hosts != hosts[unit] for unit in found):
            raise InvariantError("a stored unit counts a wrong number of records in host memory")
        if self._disk is not None and self.disk_used + self.writes.size > self._disk.budget:
            raise InvariantError(f"files have {self.disk_used} bytes, and {self.writes.size} bytes are leaving")

    # -- from one process to the next

    @property
    def has_host(self) -> bool:
        return self._host_bytes > 0

    @property
    def has_disk(self) -> bool:
        return self._disk is not None

    @property
    def disk(self) -> Disk | None:
        """The disk tier, if there is one."""
        return self._disk

    def unit_bytes(self, group: int) -> int:
        """The size of a unit of `group` in bytes."""
        return self._copier.unit_bytes(group)

    def worth_saving(self, counts: Sequence[int], tokens: int) -> bool:
        """Whether bringing back `counts` units of each group from disk takes less time than computing `tokens`, or has
        to be measured again."""
        size = sum(self.unit_bytes(group) * count for group, count in enumerate(counts))
        return self.rates.worth("disk", size, tokens) or self.rates.retry("disk")

    @property
    def meaning(self) -> str:
        """The identity of units with their layout, for an index."""
        sizes = [self.unit_bytes(group) for group in range(len(self._pools))]
        return f"{self._identity}, pages of {self._page_size}, units of {sizes}"

    def take_over(self, records: Iterable[Parked]) -> None:
        """Takes over unread `records` of memory that an earlier process has left on disk, in the order of their last
        use. Removes everything else from the disk."""
        if self._disk is None:
            return
        self._on_disk.update((record, None) for record in records)
        files = {file for record in self._on_disk for file in record.unread}
        self.disk_used = sum(file.size for file in files)
        self._disk.take_over(files)
        self.make_room(0)  # the budget may be smaller than it was

    def learn(self, record: Parked, places: Sequence[tuple[UnitFile, int, int, Content]]) -> bool:
        """Fills an unread record with the units in `places`: file, group, row and the content that each must have, in
        the order of groups. Returns False, having changed nothing, if one is known to have another content."""
        for file, group, row, content in places:
            known = self._at.get((file, group, row))
            if known is not None and not known.content.covers(content):
                return False
        for file, group, row, content in places:
            place = file, group, row
            if place not in self._at:
                size = self.unit_bytes(group)
                self._at[place] = StoredUnit(group, content, size, None, ELSEWHERE, file=file, row=row)
                file.wanted += 1
            self._at[place].references += 1
            record.units[group].append(self._at[place])
        self.forget_files(record)
        return True

    def forget_files(self, record: Parked) -> None:
        """Ends the uses of files that `record` has as an unread one."""
        files, record.unread = record.unread, ()
        for file in files:
            self._unwanted(file)

    def add(self, record: Parked) -> None:
        """Adds a record without units, to be filled by `Saves`."""
        self._on_disk[record] = None

    def close(self, *, keep: bool = False) -> None:
        """Ends parking and restoring: cancels jobs under way, waits for them, and closes the disk; see `Disk.close`."""
        self.moves.cancel()
        self.writes.cancel()
        self._carrier.close()
        if self._disk is not None:
            self._disk.close(keep=keep)
