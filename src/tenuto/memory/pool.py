"""The pool of units of one memory group, and leases, the only way to hold units."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from tenuto.base.errors import InvariantError

HolderKind = Literal["session", "prefix", "turn", "checkpoint", "cached", "admission", "copy", "draft model", "erasure"]
BULK = 24
"""The least number of units whose counts are changed by one NumPy call instead of a loop."""


class Holder(Protocol):
    """An owner of leases: a session, a turn, a checkpoint, a reservation."""

    @property
    def holder_kind(self) -> HolderKind:
        """The kind under which the audit counts its units."""

    @property
    def holder_name(self) -> str:
        """Its name in audit reports."""

    def leases(self) -> Iterable[Lease]:
        """Returns every lease it holds."""


class Pool:
    """Units 0 .. `capacity` - 1 of one group, counted by the leases on them.

    Invariant: every unit is in exactly one of three places: on the free list (count 0), in limbo (count 0), or leased
    (count = number of leases that list it). A unit in limbo was released while a step in flight may still touch it, or
    a copy may still write it.

    A unit has `slots` token slots and a *floor*. Invariant: while the unit is leased, no slot below its floor is ever
    written, and every sequence that reads the unit, except the one that may write it, reads only slots below the floor.
    So a second lease on units, and a second reference to a checkpoint, raise floors in `add_reader`. A sequence that
    resumes writing in a unit calls `write_on`, which rejects slots below the floor. A floor falls only when a single
    lease is left.
    """

    def __init__(self, name: str, capacity: int, slots: int = 1) -> None:
        self.name = name
        self.capacity = capacity
        self.slots = slots
        # One buffer, two views: scalar access is fastest through `array`, bulk access through NumPy.
        self.counts = array("i", bytes(4 * capacity))
        self._counts = np.frombuffer(self.counts, dtype=np.int32)
        # The generation of each unit, raised when it is acquired or when used slots of it may be overwritten:
        self.generation = array("q", bytes(8 * capacity))
        self.floors = array("i", bytes(4 * capacity))  # the floor of each unit
        self._floors = np.frombuffer(self.floors, dtype=np.int32)
        self.tails: dict[int, object] = {}  # units with a tail, and the table that has it
        self.used = bytearray(capacity)  # 1 for units that were leased since they were last overwritten
        self._free = list(range(capacity - 1, -1, -1))
        self._limbo: deque[list[int]] = deque()  # for each step in flight, the units released since it began
        self._written: set[int] = set()  # units that copies under way write
        self._stranded: list[int] = []  # units in `_written` that no lease lists any more; part of limbo
        self.leased = 0  # number of units with at least one lease
        self.touched = 0  # total number of changes to unit counts: a measure of work
        self.cycle = 0  # number of audit cycles begun; written by `begin_cycle`
        self._count: Callable[[Lease], None] | None = None  # counts a lease for the cycle in progress

    @property
    def free(self) -> int:
        """The number of units that can be acquired now."""
        return len(self._free)

    @property
    def limbo(self) -> int:
        """The number of units that become free when the steps in flight settle and the copies under way end."""
        return sum(map(len, self._limbo)) + len(self._stranded)

    def leased_units(self) -> npt.NDArray[np.int32]:
        """Returns the units with at least one lease, in ascending order."""
        return np.flatnonzero(self._counts).astype(np.int32)

    def acquire(self, count: int, holder: Holder) -> Lease | None:
        """Returns a lease on `count` fresh units, or `None` if fewer are free now."""
        lease = Lease(self, array("i"), holder)
        return lease if lease.grow(count) else None

    def grow(self, growing: Sequence[tuple[Lease, int]]) -> bool:
        """Acquires units at the end of several leases in one call; `growing` pairs each lease with a number of units.
        Returns False, changing nothing, if fewer are free now."""
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
        """Returns a lease on `units`, int32, that other leases list. `reads`: the number of slots of the last unit that
        the holder reads (`None`: all); it reads every slot of the other units."""
        self._add(units)
        self.add_reader(units, reads)
        return Lease(self, units, holder)

    # -- floors

    def reads(self, position: int) -> int:
        """Returns the number of slots of the last unit that are read when a sequence resumes at `position`."""
        return (position - 1) % self.slots + 1

    def add_reader(self, units: array[int], reads: int | None = None) -> None:
        """Records that another sequence reads `units`: every slot of all but the last, and the first `reads` slots
        (`None`: all) of the last. From now on these slots may not be written."""
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
        """Lets the sequence that may write the leased `unit` overwrite its slots from `slot` on. Raises
        `InvariantError` if another sequence reads any of them."""
        if slot < self.floors[unit]:
            raise InvariantError(
                f"{self.name} unit {unit} would be written from slot {slot} on; "
                f"others read its first {self.floors[unit]} slots"
            )
        self.generation[unit] += 1

    def take_alone(self, unit: int, slot: int) -> None:
        """Lets the only sequence that still reads `unit` write it from `slot` on. Raises `InvariantError` if more than
        one lease lists the unit."""
        if self.counts[unit] != 1:
            raise InvariantError(f"{self.name} unit {unit} is taken by one of its {self.counts[unit]} holders")
        self.floors[unit] = min(slot, self.floors[unit])

    def unprotected(self, units: array[int], reads: int) -> list[int]:
        """Returns those of `units` (int32) whose floor is too low for a sequence that reads every slot of all but the
        last, and the first `reads` slots of the last."""
        if not units:
            return []
        index = np.frombuffer(units, dtype=np.int32)
        wrong = self._floors[index] < self.slots
        wrong[-1] = self.floors[units[-1]] < reads
        found: list[int] = index[wrong].tolist()
        return found

    def step_submitted(self) -> None:
        """Records that one more step is in flight, which may touch units released from now on."""
        self._limbo.append([])

    def step_settled(self) -> None:
        """Records that the oldest step in flight has settled, and frees the units released before the next began."""
        self._free.extend(self._limbo.popleft())

    def copy_begins(self, units: Iterable[int]) -> None:
        """Records that a copy writes these leased units: if they are released, they stay in limbo until it ends."""
        self._written.update(units)

    def copy_ended(self, units: Iterable[int]) -> None:
        """Records that the copy to these units has ended. Units that were released meanwhile may be in the page tables
        of steps in flight, and wait until these steps settle."""
        ended = set(units)
        self._written -= ended
        left = [unit for unit in self._stranded if unit in ended]
        if left:
            self._stranded = [unit for unit in self._stranded if unit not in ended]
            (self._limbo[-1] if self._limbo else self._free).extend(left)

    def take_used(self, holder: Holder, most: int | None = None) -> Lease:
        """Returns a lease on all free units that are `used`, or `most` of them."""
        used = [unit for unit in self._free if self.used[unit]][:most]
        taken = set(used)
        self._free = [unit for unit in self._free if unit not in taken] + used
        return Lease(self, array("i", self._take(len(used)) or ()), holder)

    def overwritten(self, lease: Lease, count: int) -> None:
        """Releases a lease of `take_used`, no step having touched its units. The first `count` are no longer `used`:
        they hold nothing."""
        for unit in lease.units[:count]:
            self.used[unit] = 0
        lease.release(unused=True)

    @contextmanager
    def reserve(self, count: int, holder: Holder) -> Iterator[Lease]:
        """Yields a lease on up to `count` units, as many as are free. Units that the block has not taken out go back at
        its end, also if it raises."""
        lease = Lease(self, array("i"), holder)
        lease.grow(min(count, self.free))
        try:
            yield lease
        finally:
            lease.release(unused=True)

    def check_totals(self) -> None:
        """Checks that the free, limbo and leased units add up to the capacity: the cheap audit of every step."""
        if len(self._free) + self.limbo + self.leased != self.capacity:
            places = f"{len(self._free)} free + {self.limbo} in limbo + {self.leased} leased"
            raise InvariantError(f"{self.name}: {places} of {self.capacity} units")

    def in_limbo(self) -> list[int]:
        """Returns the units in limbo."""
        return [*(unit for released in self._limbo for unit in released), *self._stranded]

    def unused(self) -> tuple[list[int], list[int]]:
        """Returns copies of the free list and of limbo, for the audit."""
        return list(self._free), self.in_limbo()

    def begin_cycle(self, count: Callable[[Lease], None]) -> None:
        """Begins an audit: from now on, before a lease changes for the first time, `count` is called with it. Leases
        made after this are not counted."""
        self.cycle += 1
        self._count = count

    def end_cycle(self) -> None:
        """Ends the audit, which has counted every lease that existed when it began."""
        self._count = None

    def count_lease(self, lease: Lease) -> None:
        """Makes the audit in progress count the lease, which it has not yet done, as it is now."""
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
            self.used[unit] = 1
            self.generation[unit] += 1
        self.touched += count
        self.leased += count
        return units

    def _add(self, units: array[int]) -> None:
        self.touched += len(units)
        if len(units) < BULK:
            for unit in units:
                if self.counts[unit] < 1:
                    raise InvariantError(f"{self.name} unit {unit} is shared, but nobody holds it")
                self.counts[unit] += 1
            return
        index = np.frombuffer(units, dtype=np.int32)
        if (self._counts[index] < 1).any():
            raise InvariantError(f"{self.name}: units that nobody holds are shared")
        self._counts[index] += 1  # a lease lists a unit once

    def _give_back(self, units: array[int], *, unused: bool = False) -> None:
        self.touched += len(units)
        gone = self._limbo[-1] if self._limbo and not unused else self._free
        if len(units) < BULK:
            for unit in units:
                left = self.counts[unit] - 1
                if left < 0:
                    raise InvariantError(f"{self.name} unit {unit} is released, but nobody holds it")
                self.counts[unit] = left
                if not left:
                    (self._stranded if unit in self._written else gone).append(unit)
                    self.leased -= 1
            return
        index = np.frombuffer(units, dtype=np.int32)
        left_over = self._counts[index] - 1
        if (left_over < 0).any():
            raise InvariantError(f"{self.name}: units that nobody holds are released")
        self._counts[index] = left_over
        ended = index[left_over == 0].tolist()
        self.leased -= len(ended)
        if self._written:
            self._stranded += [unit for unit in ended if unit in self._written]
            ended = [unit for unit in ended if unit not in self._written]
        gone.extend(ended)


class Lease:
    """The right to some units of a pool, in order, with one named holder.

    A lease moves and is never copied: `transfer` and `absorb` empty their source, and using an emptied lease raises
    `InvariantError`. `share` takes a second lease on the same units.

    An audit that takes several steps counts leases as they were when it began, so every method that changes the units
    has them counted first. `counted_in`, written by the pool and the audit, is the audit cycle that last counted the
    lease, or in which it was made.
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
        """Makes an audit in progress count the lease before its units or the references to them change."""
        if self.counted_in != self.pool.cycle:
            self.pool.count_lease(self)

    def grow(self, count: int) -> bool:
        """Acquires `count` more units at the end; returns False, changing nothing, if fewer are free now."""
        return self.pool.grow([(self, count)])

    def share(self, start: int, stop: int, holder: Holder, reads: int | None = None) -> Lease:
        """Returns a second lease on units [start, stop), for `holder`, which reads the first `reads` slots of the last
        one; see `Pool.share`."""
        lease = self.share_within(start, stop, holder)
        self.pool.add_reader(lease.units, reads)
        return lease

    def share_within(self, start: int, stop: int, holder: Holder) -> Lease:
        """Returns a second lease on units [start, stop), for a `holder` of the same sequence, which may still write
        them."""
        if not 0 <= start <= stop <= len(self):
            raise InvariantError(f"share [{start}, {stop}) of a lease on {len(self)} units of {self.pool.name}")
        units = self.units[start:stop]
        self.pool._add(units)
        return Lease(self.pool, units, holder)

    def transfer(self, holder: Holder) -> Lease:
        """Moves all units to a new lease for `holder`."""
        self.count_now()
        units, self._units = self.units, None
        return Lease(self.pool, units, holder)

    def take(self, start: int, stop: int, holder: Holder) -> Lease:
        """Moves units [start, stop) out to a new lease for `holder`."""
        if not 0 <= start <= stop <= len(self):
            raise InvariantError(f"take [{start}, {stop}) of a lease on {len(self)} units of {self.pool.name}")
        self.count_now()
        units = self.units[start:stop]
        del self.units[start:stop]
        return Lease(self.pool, units, holder)

    def absorb(self, other: Lease) -> None:
        """Moves all units of `other` to the end of this lease."""
        self.count_now()
        other.count_now()
        self.units.extend(other.units)
        other._units = None

    def truncate(self, keep: int) -> None:
        """Releases all but the first `keep` units."""
        if keep < len(self):
            self.take(keep, len(self), self.holder).release()

    def drop_front(self, count: int) -> None:
        """Releases the first `count` units."""
        if count > 0:
            self.take(0, count, self.holder).release()

    def release(self, *, unused: bool = False) -> None:
        """Gives all units back; `unused`: no step can have touched them, so they are free at once. A second release
        raises `InvariantError`."""
        self.count_now()
        units, self._units = self.units, None
        self.pool._give_back(units, unused=unused)
