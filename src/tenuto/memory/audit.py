"""The auditor: recounts every unit from its holders, and names them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from tenuto.base.errors import InvariantError
from tenuto.memory.memory import Memory
from tenuto.memory.pool import Holder, Lease, Pool


@dataclass(frozen=True, slots=True)
class PoolReport:
    """Units of one pool: `capacity` = `free` + `limbo` + `leased`; `by_holder` counts leased units by the first word of
    their holder's name (a unit with several holders counts once, under "shared")."""

    name: str
    capacity: int
    free: int
    limbo: int
    leased: int
    by_holder: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class AuditReport:
    """A clean audit."""

    pools: tuple[PoolReport, ...]
    holders: int
    leases: int

    def __str__(self) -> str:
        """One line: every unit accounted for, by holder."""
        parts = []
        for pool in self.pools:
            held = ", ".join(f"{name} {count}" for name, count in sorted(pool.by_holder.items()))
            rest = f", in flight {pool.limbo}" if pool.limbo else ""
            parts.append(f"{pool.name}: {pool.capacity} units = free {pool.free}{rest}{', ' if held else ''}{held}")
        return f"every unit accounted for ({self.holders} holders, {self.leases} leases) | " + " | ".join(parts)


@dataclass(slots=True)
class _Found:
    """What holders list in one pool: all units in one array, and whose each stretch of it is."""

    units: array[int] = field(default_factory=lambda: array("i"))
    holders: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def add(self, lease: Lease, name: str) -> None:
        self.units.extend(lease.units)
        self.holders.append(name)
        self.lengths.append(len(lease))


def recount(
    memory: Memory, holders: Iterable[Holder], in_flight: Iterable[tuple[int, Iterable[int]]] = ()
) -> AuditReport:
    """Recount every unit of every pool from `holders`. Raises `InvariantError` naming units and holders if a count, the
    free list or a lease's holder is wrong, or if the step in flight touches (`in_flight`: pool index and units) a unit
    that could be given to someone else."""
    found = {pool: _Found() for pool in memory.pools}
    seen: dict[int, str] = {}
    total_holders = 0
    for holder in holders:
        total_holders += 1
        for lease in holder.leases():
            _check_lease(lease, holder, seen)
            found[lease.pool].add(lease, holder.holder_name)
    reports = tuple(_check_pool(pool, found[pool]) for pool in memory.pools)
    for index, units in in_flight:
        reusable = set(memory.pools[index].unused()[0]).intersection(units)
        if reusable:
            raise InvariantError(
                f"{memory.pools[index].name}: the step in flight touches free units {sorted(reusable)}"
            )
    return AuditReport(reports, total_holders, len(seen))


def _check_lease(lease: Lease, holder: Holder, seen: dict[int, str]) -> None:
    if lease.holder is not holder:
        raise InvariantError(f"{holder.holder_name} lists a lease held by {lease.holder.holder_name}")
    if id(lease) in seen:
        raise InvariantError(f"{holder.holder_name} and {seen[id(lease)]} list the same lease on {lease.pool.name}")
    if len(set(lease.units)) != len(lease):
        raise InvariantError(f"{holder.holder_name} lists a unit of {lease.pool.name} twice in one lease")
    seen[id(lease)] = holder.holder_name


def _check_pool(pool: Pool, found: _Found) -> PoolReport:
    counts = np.frombuffer(pool.counts, dtype=np.int32)
    units = np.frombuffer(found.units, dtype=np.int32)
    expected = np.bincount(units, minlength=pool.capacity)
    owners = np.repeat(np.arange(len(found.holders)), found.lengths)
    wrong = np.flatnonzero(expected != counts)
    if len(wrong):
        unit = int(wrong[0])
        names = [found.holders[i] for i in owners[units == unit]]
        raise InvariantError(
            f"{pool.name}: {len(wrong)} units have a wrong count; unit {unit} is counted {counts[unit]} times, "
            f"held by {names or 'nobody'}"
        )
    free, limbo = pool.unused()
    places = np.bincount(np.array(free + limbo, np.int64), minlength=pool.capacity) + (expected > 0)
    bad = np.flatnonzero(places != 1)
    if len(bad):
        unit = int(bad[0])
        raise InvariantError(f"{pool.name}: unit {unit} is in {int(places[unit])} of the free list, limbo and leases")
    by_holder: Counter[str] = Counter()
    for owner, count in enumerate(np.bincount(owners[expected[units] == 1], minlength=len(found.holders)).tolist()):
        by_holder[found.holders[owner].split(" ", 1)[0]] += count
    by_holder["shared"] = int((expected > 1).sum())
    held = {name: count for name, count in by_holder.items() if count}
    return PoolReport(pool.name, pool.capacity, len(free), len(limbo), pool.leased, held)
