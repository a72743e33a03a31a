"""The host and disk tiers: copies of units, each kept once for all sequences that use it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from tenuto.base.errors import InvariantError
from tenuto.base.plan import Bytes, Copier
from tenuto.base.use_order import UseOrder
from tenuto.memory.lineage import Lineage, cut
from tenuto.memory.pool import Lease, Pool
from tenuto.memory.tiers.contents import Contents
from tenuto.memory.tiers.copies import Copies
from tenuto.memory.tiers.disk import Disk, DiskFailed, UnitFile
from tenuto.memory.tiers.lent import LentUnits
from tenuto.memory.tiers.moves import Carrier, Lister, Move, MovesUnderWay, Target, Write
from tenuto.memory.tiers.parked import Parked, StoredUnit, recounted, size_of
from tenuto.memory.tiers.rates import Rates
from tenuto.memory.tiers.victims import victims
from tenuto.memory.tiers.writes import WritesUnderWay, group_of


class Tiers:
    """Parks and restores memory. Parked memory that is used last moves from host memory to disk, and is discarded from
    disk; see `UseOrder`. A unit that several parked sequences share is kept, moved and restored once.

    Invariants: every `Parked` is in `_in_host`, whose units stay in host memory, or in `_on_disk`. `copies.disk_used`
    with `writes.size` never exceeds the disk's budget. A stored unit is only used for a sequence whose tokens its
    content covers.
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
        self._host_bytes = host_bytes
        self._disk = disk
        self._page_size = page_size
        self.identity = identity
        self._in_host: UseOrder[Parked] = UseOrder(timer)  # not moved to disk
        self._on_disk: UseOrder[Parked] = UseOrder(timer)  # on disk or on their way there
        self.moves = MovesUnderWay(pools, copier, disk, carrier, timer)
        self._moving: dict[Move, list[StoredUnit]] = {}  # the units of each move under way
        self.writes = WritesUnderWay(carrier)
        self._carrier = carrier
        self.unlisted: list[Parked] = []  # listed records that were discarded; taken by `Saves`
        self.rates = Rates()
        self.copies = Copies(pools, copier, disk, timer, self.rates)
        self.moved, self.failures = self.copies.moved, self.copies.failures

    def __len__(self) -> int:
        return len(self._in_host) + len(self._on_disk)

    def become(self, identity: str, *, keep: bool = False) -> None:
        """Changes the identity of the state that is saved from now on, and begins an empty index. Nothing may be
        parked, unless it may be used by those who have parked it (`keep`)."""
        if len(self) and not keep:
            raise InvariantError(f"{len(self)} sequences of another identity are parked")
        self.identity = identity
        if self._disk is not None:
            self._disk.become(identity, keep=keep)
            self.clear_index()

    def clear_index(self) -> None:
        """Begins an empty index of the disk, or counts a failure."""
        try:
            if self._disk is not None:
                self._disk.index.clear(self.meaning)
        except DiskFailed as error:
            self.failures[error.cause] += 1

    # -- parking

    def park(
        self,
        position: int,
        kept: Sequence[Sequence[int]],
        names: Contents,
        lineage: Lineage,
        expected: float | None = None,
    ) -> Parked | None:
        """Copies the units of each group that a session keeps for its first `position` tokens; `names` are their
        contents, with the weights of `lineage`. `expected`: when the session is expected to use them again. Returns
        `None` if there is no room, copying failed, or computing the tokens again is faster."""
        size = self.copies.bytes_of(map(len, kept))
        tier = "host" if size <= self._host_bytes else "disk"
        if tier == "disk" and self._disk is None:
            return None
        worth = self.rates.worth(tier, size, position)
        if not worth and not self.rates.retry(tier):
            return None
        copied = self.copies.take(kept, names, in_host=tier == "host")
        if copied is None:
            return None
        parked = Parked(position, copied, lineage, trial=not worth, expected=expected)
        self._to_host(parked)
        return self._fitted(parked)

    def hold(
        self, position: int, groups: Sequence[Sequence[Bytes]], names: Contents, lineage: Lineage
    ) -> Parked | None:
        """Parks units of each group that were never on the device; `names` are their contents, with the weights of
        `lineage`. Returns `None` if there is no room."""
        parked = Parked(position, self.copies.hold(groups, names), lineage)
        self._to_host(parked)
        return self._fitted(parked)

    def _to_host(self, parked: Parked) -> None:
        self._in_host.add(parked, parked.expected)
        for unit in parked:
            unit.hosts += 1

    def _out_of_host(self, parked: Parked) -> None:
        self._in_host.discard(parked)
        for unit in parked:
            unit.hosts -= 1
            self.copies.shed(unit)

    def _fitted(self, parked: Parked) -> Parked | None:
        """Moves the memory that is used last to disk, or discards it, until the rest fits host memory, without the
        units on their way to disk. Discards `parked` if that failed, and returns it if it is still there."""
        if size_of(parked) > self._host_bytes and not self._leave(parked):
            self.forget(parked)
        while (too_much := self.copies.host_used - self.writes.size > self._host_bytes) and self._in_host:
            oldest = next(self._in_host.longest_first())
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
            self._on_disk.add(parked, parked.expected)
        if units:
            self.writes.begin([sorted(units, key=group_of)], self._disk)
            self.take_written()
        return True

    def make_room(self, size: int, parked: Parked | None = None) -> bool:
        """Discards memory on disk until `size` more bytes, for `parked`, fit: what is used last, and of that
        first what takes the fewest tokens to compute; see `victims`. Pinned memory and memory on its way to disk stay.
        Returns False if there is not enough room."""
        budget = self._disk.budget if self._disk is not None else 0
        while (lacking := self.copies.disk_used + self.writes.size + size - budget) > 0:
            spare = (
                each
                for each in self._on_disk.longest_first()
                if each is not parked and not each.pinned and not any(unit.leaving for unit in each)
            )
            chosen = victims(spare, lacking) if size <= budget else []
            if not chosen:
                return False
            for victim in chosen:
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
                    self.copies.arrived(units, file)
            else:
                self._not_written(list(chain(*batches)), write.failure, alone=2 if write.saves else 0)
            self.copies.release(chain(*batches))

    def _not_written(self, units: Sequence[StoredUnit], cause: str, alone: int) -> None:
        """Discards the parked memory that these units belong to; those with `alone` references belong to none. If the
        file system is full although the budget is not, also discards the least recently used memory on disk, so that
        the next write finds room."""
        self.failures[cause] += 1
        lost = {unit for unit in units if unit.references > alone}
        for parked in [each for each in self._on_disk if not lost.isdisjoint(each)] if lost else ():
            self.forget(parked)
        if cause == "full" and self._disk is not None:
            self.make_room(max(0, self._disk.budget - self.copies.disk_used - self.writes.size) + size_of(units))

    # -- restoring

    def lacking(self, parked: Parked, units: Sequence[int]) -> list[int]:
        """Returns the number of units of each group to acquire to restore the first `units` of each."""
        return [self.on_device(parked, group, n).count(None) for group, n in enumerate(units)]

    def on_device(self, parked: Parked, group: int, count: int) -> list[int | None]:
        """Returns, for each of the first `count` units of a group, the unit on the device that has the same contents or
        will have them, or `None`."""
        return [self.copies.on_device(unit) for unit in parked.units[group][:count]]

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
                if self.copies.on_device(stored) is None:
                    moving.append(stored)
                    targets.append(Target(unit, stored.copy(content)))
                elif stored.move is not None:
                    moves[stored.move] = None
        if targets:
            move = self.moves.begin(targets)
            moves[move] = None
            self._moving[move] = moving
            for stored, target in zip(moving, targets, strict=True):
                stored.move = move
                self.copies.coming(stored, target.unit)
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
                        self.copies.not_there(stored)
                self.copies.release([stored])

    def lend(self, parked: Parked, names: Contents) -> LentUnits:
        """Lends the units of `parked` to another thread, which may read them until `take_back`. `names`: see
        `bring_back`."""
        shared = self.share(parked, parked.position, names, parked.lineage)
        shared.pinned = True
        return LentUnits.of(shared, names, self._disk)

    def take_back(self, lent: LentUnits) -> None:
        """Ends a loan, after the other thread has read the units."""
        if lent.failure:
            self.failures[lent.failure] += 1
        self.forget(lent.parked)

    # -- references

    def use(self, parked: Parked, expected: float | None = None) -> None:
        """Marks `parked` as used now, and as `expected` to be used again."""
        parked.expected = expected
        for kept in (self._in_host, self._on_disk):
            if parked in kept:
                kept.add(parked, expected)

    def share(self, parked: Parked, position: int, names: Contents, lineage: Lineage) -> Parked:
        """Returns a second `Parked` for the first `position` tokens, with the first units of each group. `names`: see
        `bring_back`; they were derived with `lineage`."""
        parked.check(names)
        units = [stored[: len(held)] for stored, held in zip(parked.units, names, strict=True)]
        shared = Parked(position, units, cut(lineage, position))
        for unit in shared:
            unit.references += 1
        if parked in self._in_host:
            self._to_host(shared)
        else:
            self._on_disk.add(shared)
        return shared

    def forget(self, parked: Parked) -> None:
        """Discards `parked`, which is no longer needed."""
        if parked not in self:
            return
        if parked in self._in_host:
            self._out_of_host(parked)
        self._on_disk.discard(parked)
        self.copies.release(parked)
        self.forget_files(parked)
        parked.units = [[] for _ in parked.units]
        if parked.key is not None:
            self.unlisted.append(parked)

    def __contains__(self, parked: Parked | None) -> bool:
        return parked in self._in_host or parked in self._on_disk

    def audit(self, others: Iterable[StoredUnit] = ()) -> None:
        """Recounts references and bytes; `others`: units with references from elsewhere, once for each. Raises
        `InvariantError`."""
        found: Counter[StoredUnit] = Counter(chain.from_iterable((*self._in_host, *self._on_disk)))
        found.update(chain(*self._moving.values(), self.writes.units(), others))
        counted = self.copies.host_used, self.copies.disk_used
        if (bytes_found := recounted(found, self._on_disk)) != counted:
            raise InvariantError(f"host memory and files have {bytes_found} bytes, counted as {counted}")
        hosts = Counter(chain.from_iterable(self._in_host))
        if any(unit.hosts != hosts[unit] for unit in found):
            raise InvariantError("a stored unit counts a wrong number of records in host memory")
        if self._disk is not None and self.copies.disk_used + self.writes.size > self._disk.budget:
            raise InvariantError(f"files have {self.copies.disk_used} bytes, and {self.writes.size} bytes are leaving")

    # -- from one process to the next

    def files(self) -> set[UnitFile]:
        """Returns all files to which records refer."""
        return set(self.copies.rows(())) | {file for record in self._on_disk for file in record.unread}

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

    def worth_saving(self, counts: Sequence[int], tokens: int) -> bool:
        """Whether bringing back `counts` units of each group from disk takes less time than computing `tokens`, or has
        to be measured again."""
        return self.rates.worth("disk", self.copies.bytes_of(counts), tokens) or self.rates.retry("disk")

    @property
    def meaning(self) -> str:
        """The identity of units with their layout, for an index."""
        sizes = [self.copies.unit_bytes(group) for group in range(len(self._pools))]
        return f"{self.identity}, pages of {self._page_size}, units of {sizes}"

    def take_over(self, records: Iterable[Parked]) -> None:
        """Takes over unread `records` of memory that an earlier process has left on disk, in the order of their last
        use. Removes everything else from the disk."""
        if self._disk is None:
            return
        for record in records:
            self._on_disk.add(record)
        files = dict.fromkeys(file for record in self._on_disk for file in record.unread)
        self.copies.disk_used = sum(file.size for file in files)
        self._disk.take_over(files)
        self.make_room(0)  # the budget may be smaller than it was

    def forget_files(self, record: Parked) -> None:
        """Ends the uses of files that `record` has as an unread one."""
        files, record.unread = record.unread, ()
        for file in files:
            self.copies.unwanted(file)

    def add(self, record: Parked) -> None:
        """Adds a record without units, to be filled by `Saves`."""
        self._on_disk.add(record)

    def close(self, *, keep: bool = False) -> None:
        """Ends parking and restoring: cancels jobs under way, waits for them, and closes the disk; see `Disk.close`."""
        self.moves.cancel()
        self.writes.cancel()
        self._carrier.close()
        if self._disk is not None:
            self._disk.close(keep=keep)
