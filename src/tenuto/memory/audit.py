"""The memory audit: recounts every unit from its holders, and names them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

import numpy as np

from tenuto.base.errors import InvariantError
from tenuto.base.views import SHARED, AuditReport, PoolReport
from tenuto.memory.checkpoints.checkpoint import Checkpoint
from tenuto.memory.committed import CommittedMemory
from tenuto.memory.memory import Memory
from tenuto.memory.pool import Holder, HolderKind, Lease, Pool
from tenuto.memory.session_memory import SessionMemory

UNITS_A_VISIT = 16
"""The number of units that take about as long to count as one lease or holder."""


class _Book:
    """The state of one pool when an audit began, and the leases on it that the audit has found."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._counts = np.frombuffer(pool.counts, dtype=np.int32).copy()
        self._free, self._limbo = pool.unused()
        self._leased = pool.leased
        self._units = array("i")  # the units of all leases found, one lease after the other
        self._holders: list[Holder] = []  # the holder of each of these leases
        self._numbers = array("i")  # the kind number of each holder when the lease was added
        self._lengths: list[int] = []  # the number of units of each lease
        self._tallied = 0  # the number of leases that `_found` and `_kinds` include
        self._tallied_units = 0
        self._found = np.zeros(pool.capacity, np.int32)  # the number of leases that list each unit
        self._kinds = np.zeros(pool.capacity, np.int32)  # the kind number of its last holder found
        self._kind_numbers: dict[HolderKind, int] = {}
        self._saving = np.zeros(pool.capacity, np.int32)  # those of the leases that cached checkpoints hold
        self._places = np.zeros(pool.capacity, np.int32)  # how often the free list and limbo list each unit
        self._placed = 0

    def add(self, lease: Lease) -> int:
        """Adds a lease, unchanged since the audit began. Returns its number of units."""
        units, holder = lease.units, lease.holder
        if len(set(units)) != len(units):
            raise InvariantError(f"{holder.holder_name} lists a unit of {self._pool.name} twice in one lease")
        self._units.extend(units)
        self._holders.append(holder)
        self._numbers.append(self._kind_numbers.setdefault(holder.holder_kind, len(self._kind_numbers)))
        self._lengths.append(len(units))
        return len(units)

    def tally(self) -> None:
        """Counts the units of the leases added since the last call."""
        units = np.frombuffer(self._units, dtype=np.int32)[self._tallied_units :]
        np.add.at(self._found, units, 1)
        cached = self._kind_numbers.setdefault("cached", len(self._kind_numbers))
        kinds = np.frombuffer(self._numbers, dtype=np.int32)[self._tallied :]
        of_units = np.repeat(kinds, self._lengths[self._tallied :])
        self._kinds[units] = of_units
        np.add.at(self._saving, units[of_units == cached], 1)
        self._tallied, self._tallied_units = len(self._holders), len(self._units)

    def place(self, most: int) -> int:
        """Counts up to `most` more units of the free list and of limbo. Returns their number: 0 if all are counted."""
        unused = self._free if self._placed < len(self._free) else self._limbo
        start = self._placed if unused is self._free else self._placed - len(self._free)
        part = unused[start : start + most]
        np.add.at(self._places, np.array(part, np.int64), 1)
        self._placed += len(part)
        return len(part)

    def check(self) -> PoolReport:
        """Compares the counts after all leases are tallied and all unused units placed. Raises `InvariantError` if they
        differ."""
        wrong = np.flatnonzero(self._found != self._counts)
        if len(wrong):
            unit = int(wrong[0])
            raise InvariantError(
                f"{self._pool.name}: {len(wrong)} units have a wrong count; unit {unit} is counted "
                f"{self._counts[unit]} times, held by {self._names(unit) or 'nobody'}"
            )
        places = self._places + (self._found > 0)
        bad = np.flatnonzero(places != 1)
        if len(bad):
            unit = int(bad[0])
            where = f"in {int(places[unit])} of the free list, limbo and leases"
            raise InvariantError(f"{self._pool.name}: unit {unit} is {where}")
        by_kind = np.bincount(self._kinds[self._found == 1], minlength=len(self._kind_numbers)).tolist()
        by_holder: dict[str, int] = {kind: by_kind[number] for kind, number in self._kind_numbers.items()}
        by_holder[SHARED] = int((self._found > 1).sum())
        held = {kind: count for kind, count in by_holder.items() if count}
        cached = int(((self._found > 0) & (self._found == self._saving)).sum())
        pool = self._pool
        return PoolReport(pool.name, pool.capacity, len(self._free), len(self._limbo), self._leased, held, cached)

    def _names(self, unit: int) -> list[str]:
        owners = np.repeat(np.arange(len(self._holders)), self._lengths)
        return sorted(self._holders[i].holder_name for i in owners[np.frombuffer(self._units, dtype=np.int32) == unit])

    def check_in_flight(self, units: Iterable[int]) -> None:
        """Raises `InvariantError` if one of `units`, which the step in flight touches, is free and could be leased
        again. Negative numbers are ignored."""
        free = sorted({unit for unit in units if unit >= 0 and not self._found[unit]}.difference(self._limbo))
        if free:
            raise InvariantError(f"{self._pool.name}: the step in flight touches free units {free}")


class _Audit:
    """The common part of audits: they read the counts of pools, then count the units of holders, and compare the
    two."""

    def __init__(self, memory: Memory, beside: Iterable[Pool], in_flight: Iterable[tuple[int, Iterable[int]]]) -> None:
        self.books = {pool: _Book(pool) for pool in (*memory.pools, *beside)}
        self._in_flight = [(memory.pools[index], list(units)) for index, units in in_flight]
        self._leases = 0
        self.holders = 0

    def count(self, lease: Lease) -> int:
        self._leases += 1
        return self.books[lease.pool].add(lease)

    def report(self) -> AuditReport:
        reports = tuple(book.check() for book in self.books.values())
        for pool, units in self._in_flight:
            self.books[pool].check_in_flight(units)
        return AuditReport(reports, self.holders, self._leases)


def recount(
    memory: Memory,
    holders: Iterable[Holder],
    in_flight: Iterable[tuple[int, Iterable[int]]] = (),
    beside: Iterable[Pool] = (),
) -> AuditReport:
    """Recounts every unit of every pool, also of those `beside` the memory's, from `holders`. Raises `InvariantError`
    with the units and their holders if a count, the free list or a lease's holder is wrong, or if the step in flight
    touches (`in_flight`: pool index and units) a unit that could be leased again."""
    audit = _Audit(memory, beside, in_flight)
    for holder in holders:
        leases = _leases_of(holder)
        _check(holder)
        audit.holders += bool(leases)
        for lease in leases:
            audit.count(lease)
    for pool, book in audit.books.items():
        book.tally()
        while book.place(pool.capacity):
            pass
    return audit.report()


class AuditCycle(_Audit):
    """A recount spread over many steps, with the result that `recount` would have had when it began.

    It starts with copies of all counts, free lists and limbos. A lease is counted just before its first change, or when
    its holder is visited, a few holders at a time; leases made after the beginning do not count. A session closed
    meanwhile is still visited, and a checkpoint is counted before a session drops its reference to it. So every lease
    that existed at the beginning is counted once, as it was then.
    """

    def __init__(
        self,
        memory: Memory,
        sessions: Iterable[SessionMemory],
        others: Iterable[Holder],
        in_flight: Iterable[tuple[int, Iterable[int]]] = (),
        beside: Iterable[Pool] = (),
    ) -> None:
        """Begins, and ends a cycle that may be in progress. `sessions` and `others`, which are read later, must yield
        the present ones even then. `beside`: see `recount`."""
        super().__init__(memory, beside, in_flight)
        self.work = 0  # holders and leases visited, plus units divided by `UNITS_A_VISIT`
        self._pools = tuple(self.books)
        self._pending = _expand(sessions, others)
        self._changed: set[Holder] = set()  # holders with leases that pools had counted
        self._unplaced = list(self.books.values())
        for pool in self._pools:
            pool.begin_cycle(self._count_changing)

    def advance(self, most: int) -> AuditReport | None:
        """Visits `most` holders and leases, or a few more. Returns the report once all are visited. Raises
        `InvariantError` as `recount` does."""
        end = self.work + most
        while self.work < end and (holder := next(self._pending, None)) is not None:
            self._visit(holder)
        for book in self.books.values():
            book.tally()
        while self.work < end and self._unplaced:
            placed = self._unplaced[-1].place((end - self.work) * UNITS_A_VISIT)
            self.work += -(-placed // UNITS_A_VISIT)
            if not placed:
                self._unplaced.pop()
        if self.work >= end:
            return None
        for pool in self._pools:
            pool.end_cycle()
        return self.report()

    def _visit(self, holder: Holder) -> None:
        leases = _leases_of(holder)
        unchanged = [lease for lease in leases if lease.counted_in != lease.pool.cycle]
        if unchanged or isinstance(holder, CommittedMemory):  # a shared checkpoint is checked once
            _check(holder)
        self.holders += bool(unchanged) and holder not in self._changed
        units = 0
        for lease in unchanged:
            lease.counted_in = lease.pool.cycle
            units += self.count(lease)
        self.work += 1 + len(leases) + units // UNITS_A_VISIT

    def _count_changing(self, lease: Lease) -> None:
        if lease.holder not in self._changed:
            self._changed.add(lease.holder)
            self.holders += 1
        self.count(lease)


def _expand(sessions: Iterable[SessionMemory], others: Iterable[Holder]) -> Iterator[Holder]:
    for session in sessions:
        yield from list(session.holders())  # listed at once, so that no lease that moves between them is missed
    yield from others


def _check(holder: Holder) -> None:
    """Raises `InvariantError` if another sequence may write slots that the holder reads, or it is unknown with which
    weights they were computed. Checks the present memory, even if the holder's leases have changed since the audit
    began."""
    if isinstance(holder, CommittedMemory | Checkpoint):
        holder.check_floors()
    if isinstance(holder, CommittedMemory):
        holder.check_lineage()


def _leases_of(holder: Holder) -> list[Lease]:
    leases = list(holder.leases())
    for lease in leases:
        if lease.holder is not holder:
            raise InvariantError(f"{holder.holder_name} lists a lease held by {lease.holder.holder_name}")
        len(lease)  # raises if it has ended
    if len(leases) > 1 and len({id(lease) for lease in leases}) < len(leases):
        twice = next(lease for lease in leases if leases.count(lease) > 1)
        raise InvariantError(f"{holder.holder_name} and {holder.holder_name} list the same lease on {twice.pool.name}")
    return leases
