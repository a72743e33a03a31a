"""The units of one memory group, and leases: the only way to hold any of them."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol

import numpy as np

from tenuto.base.errors import InvariantError

HolderKind = Literal["session", "prefix", "turn", "checkpoint", "cached", "admission", "copy"]
BULK = 24
"""From this many units on, one NumPy call changes the counts instead of a loop."""


class Holder(Protocol):
    """Whatever holds leases: a session, a turn, a checkpoint, a reservation."""

    @property
    def holder_kind(self) -> HolderKind:
        """As what the audit counts its units."""
        ...

    @property
    def holder_name(self) -> str:
        """What the audit calls it."""
        ...

    def leases(self) -> Iterable[Lease]:
        """Every lease it holds."""
        ...


class Pool:
    """Units 0 .. `capacity` - 1 of one group, counted by the leases on them.

    Invariant: every unit is in exactly one of three places: on the free list (count 0), in limbo (count 0, released
    while steps are in flight that may still touch it, or a copy that may still write it), or leased (count = number of
    leases that list it).

    A unit has `slots` token slots and a *floor*. Invariant: while the unit is leased, no slot below its floor is ever
    written, and every sequence that reads the unit, except the one that may write it, reads only slots below the floor.
    So a second lease on units, and a second reference to a checkpoint, raise floors in `add_reader`. A sequence that
    resumes writing in a unit calls `write_on`, which refuses slots below the floor. A floor falls only when a single
    lease is left.
    """

    def __init__(self, name: str, capacity: int, slots: int = 1) -> None:
        self.name = name
        self.capacity = capacity
        self.slots = slots
        # One buffer, two views: scalar access is fastest through `array`, bulk access through NumPy.
        self.counts = array("i", bytes(4 * capacity))
        self._counts = np.frombuffer(self.counts, dtype=np.int32)
        # Of each unit, raised when it is acquired, or slots of it may be written that held something else:
        self.generation = array("q", bytes(8 * capacity))
        self.floors = array("i", bytes(4 * capacity))  # of each unit; see above
        self._floors = np.frombuffer(self.floors, dtype=np.int32)
        self.tails: dict[int, object] = {}  # units with a tail, and the table that has it
        self._free = list(range(capacity - 1, -1, -1))
        self._limbo: deque[list[int]] = deque()  # a list for each step in flight, of what was released since it began
        self._written: set[int] = set()  # units that copies under way write
        self._stranded: list[int] = []  # of those, the ones that nobody holds any more: a part of limbo
        self.leased = 0  # units with at least one lease, kept as leases come and go
        self.touched = 0  # unit counts ever changed: a measure of work
        self.cycle = 0  # audit cycles begun; written by `begin_cycle`
        self._count: Callable[[Lease], None] | None = None  # counts a lease for the cycle in progress

    @property
    def free(self) -> int:
        """Units that can be acquired now."""
        return len(self._free)

    @property
    def limbo(self) -> int:
        """Units that become free when the steps in flight settle, and the copies under way end."""
        return sum(map(len, self._limbo)) + len(self._stranded)

    def acquire(self, count: int, holder: Holder) -> Lease | None:
        """A lease on `count` fresh units, or `None` if fewer are free now."""
        lease = Lease(self, array("i"), holder)
        return lease if lease.grow(count) else None

    def grow(self, growing: Sequence[tuple[Lease, int]]) -> bool:
        """Acquire units at the end of several leases in one go, of each as many as are given; False, changing nothing,
        if fewer are free now."""
        held = [lease.units for lease, _ in growing]
        units = self._take(sum(count for _, count in growing))
        if units is None:
            return False
        first = 0
        for mine, (lease, count) in zip(held, growing, strict=True):
            lease.count_now()
            mine.extend(units[first : first + count])
            first += count
        return True

    def share(self, units: array[int], holder: Holder, reads: int | None = None) -> Lease:
        """A lease on units, int32, that others hold. `reads`: how many slots of the last one the holder reads (`None`:
        all of them); it reads every slot of the others."""
        self._add(units)
        self.add_reader(units, reads)
        return Lease(self, units, holder)

    # -- floors

    def reads(self, position: int) -> int:
        """How many slots of its last unit resuming at `position` reads."""
        return (position - 1) % self.slots + 1

    def add_reader(self, units: array[int], reads: int | None = None) -> None:
        """Another sequence reads `units`: every slot of all but the last, and the first `reads` slots (`None`: all) of
        the last. From now on none of these slots may be written."""
        if not units:
            return
        last = self.slots if reads is None else reads
        floor = max(self.floors[units[-1]], last)
        if len(units) < BULK:
            for unit in units:
                self.floors[unit] = self.slots
        else:
            self._floors[np.frombuffer(units, dtype=np.int32)] = self.slots
        self.floors[units[-1]] = floor

    def write_on(self, unit: int, slot: int) -> None:
        """The sequence that may write the leased `unit` resumes at `slot` and overwrites what follows. Raises
        `InvariantError` if another sequence reads that."""
        if slot < self.floors[unit]:
            raise InvariantError(
                f"{self.name} unit {unit} would be written from slot {slot} on; "
                f"others read its first {self.floors[unit]} slots"
            )
        self.generation[unit] += 1

    def take_alone(self, unit: int, slot: int) -> None:
        """The only sequence that still reads `unit` may write it from `slot` on. Raises `InvariantError` if more than
        one lease lists it."""
        if self.counts[unit] != 1:
            raise InvariantError(f"{self.name} unit {unit} is taken by one of {self.counts[unit]} that hold it")
        self.floors[unit] = min(slot, self.floors[unit])

    def unprotected(self, units: array[int], reads: int) -> list[int]:
        """The units, of `units` (int32), whose floor is too low for a sequence that reads every slot of all but the
        last, and the first `reads` slots of the last."""
        if not units:
            return []
        index = np.frombuffer(units, dtype=np.int32)
        wrong = self._floors[index] < self.slots
        wrong[-1] = self.floors[units[-1]] < reads
        found: list[int] = index[wrong].tolist()
        return found

    def step_submitted(self) -> None:
        """One more step is in flight, which may touch what is released from now on."""
        self._limbo.append([])

    def step_settled(self) -> None:
        """The oldest step in flight has ended: what was released before the next one began can be used again."""
        self._free.extend(self._limbo.popleft())

    def copy_begins(self, units: Iterable[int]) -> None:
        """A copy writes these leased units from now on: whoever releases them, nobody else gets them until it ends."""
        self._written.update(units)

    def copy_ended(self, units: Iterable[int]) -> None:
        """The copy that writes these units has ended. Those that were released meanwhile may be in the page tables of
        steps in flight, and wait for these."""
        ended = set(units)
        self._written -= ended
        left = [unit for unit in self._stranded if unit in ended]
        if left:
            self._stranded = [unit for unit in self._stranded if unit not in ended]
            (self._limbo[-1] if self._limbo else self._free).extend(left)

    @contextmanager
    def reserve(self, count: int, holder: Holder) -> Iterator[Lease]:
        """A lease on up to `count` units, as many as are free. What the block has not taken out goes back at
        its end, also if it raises."""
        lease = Lease(self, array("i"), holder)
        lease.grow(min(count, self.free))
        try:
            yield lease
        finally:
            lease.release(unused=True)

    def check_totals(self) -> None:
        """The cheap audit of every step: the three places add up."""
        if len(self._free) + self.limbo + self.leased != self.capacity:
            places = f"{len(self._free)} free + {self.limbo} in limbo + {self.leased} leased"
            raise InvariantError(f"{self.name}: {places} of {self.capacity} units")

    def unused(self) -> tuple[list[int], list[int]]:
        """Copies of the free list and of limbo, for the audit."""
        return list(self._free), [*(unit for released in self._limbo for unit in released), *self._stranded]

    def begin_cycle(self, count: Callable[[Lease], None]) -> None:
        """An audit begins: before a lease changes for the first time since, `count` is called with it, unless the lease
        was made since."""
        self.cycle += 1
        self._count = count

    def end_cycle(self) -> None:
        """The audit has counted every lease there was when it began."""
        self._count = None

    def count_lease(self, lease: Lease) -> None:
        """Have the audit in progress count the lease as it is; it has not yet done so."""
        lease.counted_in = self.cycle
        if self._count is not None:
            self._count(lease)

    def _take(self, count: int) -> list[int] | None:
        if count > len(self._free):
            return None
        if count == 0:
            return []
        units = self._free[-count:]
        del self._free[-count:]
        for unit in units:
            if self.counts[unit]:
                raise InvariantError(f"{self.name} unit {unit} is on the free list with count {self.counts[unit]}")
            self.counts[unit] = 1
            self.floors[unit] = 0
            self.generation[unit] += 1
        self.touched += count
        self.leased += count
        return units

    def _add(self, units: array[int]) -> None:
        self.touched += len(units)
        if len(units) < BULK:
            for unit in units:
                if self.counts[unit] < 1:
                    raise InvariantError(f"{self.name} unit {unit} is shared but nobody holds it")
                self.counts[unit] += 1
            return
        index = np.frombuffer(units, dtype=np.int32)
        if (self._counts[index] < 1).any():
            raise InvariantError(f"{self.name}: units are shared that nobody holds")
        self._counts[index] += 1  # a lease lists a unit once

    def _give_back(self, units: array[int], *, unused: bool = False) -> None:
        self.touched += len(units)
        gone = self._limbo[-1] if self._limbo and not unused else self._free
        if len(units) < BULK:
            for unit in units:
                left = self.counts[unit] - 1
                if left < 0:
                    raise InvariantError(f"{self.name} unit {unit} is released but nobody holds it")
                self.counts[unit] = left
                if not left:
                    (self._stranded if unit in self._written else gone).append(unit)
                    self.leased -= 1
            return
        index = np.frombuffer(units, dtype=np.int32)
        left_over = self._counts[index] - 1
        if (left_over < 0).any():
            raise InvariantError(f"{self.name}: units are released that nobody holds")
        self._counts[index] = left_over
        ended = index[left_over == 0].tolist()
        self.leased -= len(ended)
        if self._written:
            self._stranded += [unit for unit in ended if unit in self._written]
            ended = [unit for unit in ended if unit not in self._written]
        gone.extend(ended)


class Lease:
    """The right to some units of a pool, in order, with one named holder.

    It moves and is never copied: `transfer` and `absorb` empty their source, and using an emptied lease raises
    `InvariantError`. `share` takes a second lease on the same units.

    An audit that takes several steps counts leases as they were when it began, so every method that changes the units
    has them counted first. `counted_in` is the audit cycle that last counted the lease, or in which it was made;
    written by the pool and the audit.
    """

    __slots__ = ("_units", "counted_in", "holder", "pool")

    def __init__(self, pool: Pool, units: array[int], holder: Holder) -> None:
        self.pool = pool
        self.holder = holder
        self.counted_in = pool.cycle
        self._units: array[int] | None = units

    def __len__(self) -> int:
        return len(self.units)

    @property
    def units(self) -> array[int]:
        """The units, int32, in order. Read only."""
        if self._units is None:
            raise InvariantError(
                f"a lease on {self.pool.name} held by {self.holder.holder_name} was used after its end"
            )
        return self._units

    def count_now(self) -> None:
        """Have an audit in progress count the units before they, or who refers to them, change."""
        if self.counted_in != self.pool.cycle:
            self.pool.count_lease(self)

    def grow(self, count: int) -> bool:
        """Acquire `count` more units at the end; False, changing nothing, if fewer are free now."""
        return self.pool.grow([(self, count)])

    def share(self, start: int, stop: int, holder: Holder, reads: int | None = None) -> Lease:
        """A second lease on units [start, stop), for `holder`, which reads the first `reads` slots of the last one; see
        `Pool.share`."""
        lease = self.share_within(start, stop, holder)
        self.pool.add_reader(lease.units, reads)
        return lease

    def share_within(self, start: int, stop: int, holder: Holder) -> Lease:
        """A second lease on units [start, stop), for a `holder` of the same sequence. The sequence may still write
        them."""
        if not 0 <= start <= stop <= len(self):
            raise InvariantError(f"share [{start}, {stop}) of a lease on {len(self)} units of {self.pool.name}")
        units = self.units[start:stop]
        self.pool._add(units)
        return Lease(self.pool, units, holder)

    def transfer(self, holder: Holder) -> Lease:
        """Move everything to `holder`."""
        self.count_now()
        units, self._units = self.units, None
        return Lease(self.pool, units, holder)

    def take(self, start: int, stop: int, holder: Holder) -> Lease:
        """Move units [start, stop) out, to `holder`."""
        if not 0 <= start <= stop <= len(self):
            raise InvariantError(f"take [{start}, {stop}) of a lease on {len(self)} units of {self.pool.name}")
        self.count_now()
        units = self.units[start:stop]
        del self.units[start:stop]
        return Lease(self.pool, units, holder)

    def absorb(self, other: Lease) -> None:
        """Move everything `other` holds to the end of this lease."""
        self.count_now()
        other.count_now()
        self.units.extend(other.units)
        other._units = None

    def truncate(self, keep: int) -> None:
        """Release all but the first `keep` units."""
        if keep < len(self):
            self.take(keep, len(self), self.holder).release()

    def drop_front(self, count: int) -> None:
        """Release the first `count` units."""
        if count > 0:
            self.take(0, count, self.holder).release()

    def release(self, *, unused: bool = False) -> None:
        """Give everything back; `unused`: no step can have touched it, so it is free at once. A second release
        raises."""
        self.count_now()
        units, self._units = self.units, None
        self.pool._give_back(units, unused=unused)
