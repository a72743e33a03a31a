"""Leases move, are counted, and end once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from tenuto.base.errors import InvariantError
from tenuto.memory.pool import BULK, Lease, Pool
from tests.memory.scribe import Someone

ANNA, BEN = Someone("anna"), Someone("ben")
SIZES = (1, BULK - 1, BULK, 3 * BULK)


def held(pool: Pool, count: int, holder: Someone = ANNA) -> Lease:
    lease = pool.acquire(count, holder)
    assert lease is not None
    return lease


def test_acquiring_more_units_than_are_free_takes_nothing() -> None:
    pool = Pool("pages", 5)
    lease = held(pool, 3)
    assert pool.acquire(3, BEN) is None
    assert not lease.grow(3)
    assert (len(lease), pool.free, pool.leased) == (3, 2, 3)


def test_several_leases_grow_together_or_not_at_all() -> None:
    pool = Pool("pages", 9)
    leases = [held(pool, 2), held(pool, 1, BEN), held(pool, 0)]
    before = [list(lease.units) for lease in leases]
    assert not pool.grow([(leases[0], 1), (leases[1], 4), (leases[2], 2)])
    assert ([list(lease.units) for lease in leases], pool.free) == (before, 6)
    assert pool.grow([(leases[0], 1), (leases[1], 3), (leases[2], 2)])
    after = [list(lease.units) for lease in leases]
    assert [units[: len(had)] for units, had in zip(after, before, strict=True)] == before
    assert ([len(units) for units in after], pool.free) == ([3, 4, 2], 0)
    assert len({unit for units in after for unit in units}) == 9


def test_a_transferred_lease_keeps_its_units_and_its_source_is_unusable() -> None:
    pool = Pool("pages", 5)
    source = held(pool, 3)
    units = list(source.units)
    moved = source.transfer(BEN)
    assert (list(moved.units), moved.holder, pool.leased) == (units, BEN, 3)
    for use in (source.release, lambda: source.transfer(ANNA), lambda: source.share(0, 1, ANNA), lambda: len(source)):
        with pytest.raises(InvariantError, match="pages held by anna was used after its end"):
            use()
    assert (list(moved.units), pool.leased) == (units, 3)


@pytest.mark.parametrize("count", [2, BULK + 1])
def test_the_slots_a_second_lease_reads_can_no_longer_be_written(count: int) -> None:
    pool = Pool("pages", count, slots=4)
    units = held(pool, count).units
    second = pool.share(units, BEN, 3)
    for unit, slot in ((units[0], 3), (units[-1], 2)):
        with pytest.raises(InvariantError, match=f"unit {unit} would be written from slot {slot} on"):
            pool.write_on(unit, slot)
    pool.write_on(units[-1], 3)
    second.release()
    pool.take_alone(units[0], 1)
    pool.write_on(units[0], 1)


def test_absorbing_a_lease_empties_it() -> None:
    pool = Pool("pages", 6)
    first, second = held(pool, 2), held(pool, 3, BEN)
    units = [*first.units, *second.units]
    first.absorb(second)
    assert (list(first.units), pool.leased) == (units, 5)
    with pytest.raises(InvariantError):
        second.release()


@pytest.mark.parametrize("count", SIZES)
def test_a_second_release_raises_and_changes_nothing(count: int) -> None:
    pool = Pool("pages", 100)
    lease = held(pool, count)
    lease.release()
    with pytest.raises(InvariantError):
        lease.release()
    assert (pool.free, pool.leased) == (100, 0)


@pytest.mark.parametrize("count", SIZES)
def test_a_shared_unit_is_free_only_after_the_last_of_its_leases(count: int) -> None:
    pool = Pool("pages", 100)
    lease = held(pool, count)
    shares = [lease.share(0, count, BEN) for _ in range(2)]
    for last in (lease, *shares):
        assert pool.free == 100 - count
        last.release()
    assert pool.free == 100


@pytest.mark.parametrize("count", SIZES)
def test_units_released_while_a_step_is_in_flight_cannot_be_acquired_before_it_settles(count: int) -> None:
    pool = Pool("pages", count)
    lease = held(pool, count)
    pool.step_submitted()
    lease.release()
    assert (pool.free, pool.limbo, pool.leased) == (0, count, 0)
    assert pool.acquire(1, BEN) is None
    pool.step_settled()
    assert (pool.free, pool.limbo) == (count, 0)


def test_units_released_while_two_steps_are_in_flight_wait_for_the_second() -> None:
    pool = Pool("pages", 5)
    first, second, third = (held(pool, 1) for _ in range(3))
    pool.step_submitted()
    first.release()
    pool.step_submitted()
    second.release()
    assert (pool.free, pool.limbo) == (2, 2)
    pool.step_settled()
    assert (pool.free, pool.limbo) == (3, 1)
    pool.step_submitted()
    third.release()
    pool.step_settled()
    assert (pool.free, pool.limbo) == (4, 1)
    pool.step_settled()
    assert (pool.free, pool.limbo) == (5, 0)


def test_a_reservation_grants_what_is_free_and_returns_what_is_unused() -> None:
    pool = Pool("slots", 5)
    with pool.reserve(8, ANNA) as reserved:
        assert len(reserved) == 5
        mine = reserved.take(3, 5, BEN)
    assert (pool.free, len(mine), mine.holder) == (3, 2, BEN)


def test_a_reservation_returns_even_if_something_raises() -> None:
    pool = Pool("slots", 5)

    def break_off() -> None:
        with pool.reserve(4, ANNA) as reserved:
            reserved.take(0, 1, BEN)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        break_off()
    assert pool.free == 4


@pytest.mark.parametrize("bounds", [(-1, 1), (2, 1), (0, 4)])
def test_only_units_of_the_lease_can_be_shared_or_taken(bounds: tuple[int, int]) -> None:
    pool = Pool("pages", 5)
    lease = held(pool, 3)
    for operation in (lease.share, lease.take):
        with pytest.raises(InvariantError):
            operation(*bounds, BEN)
    assert (len(lease), [pool.counts[unit] for unit in lease.units]) == (3, [1, 1, 1])


@pytest.mark.parametrize("count", SIZES)
def test_counts_below_those_of_leases_are_an_error_and_not_clamped(count: int) -> None:
    pool = Pool("pages", 100)
    lease = held(pool, count)
    pool.counts[lease.units[-1]] = 0
    with pytest.raises(InvariantError, match="nobody holds"):
        lease.share(0, count, BEN)
    with pytest.raises(InvariantError, match="nobody holds"):
        lease.release()


def test_a_counted_unit_on_the_free_list_is_never_handed_out() -> None:
    pool = Pool("pages", 1)
    pool.counts[0] = 1
    with pytest.raises(InvariantError, match="free list with count 1"):
        pool.acquire(1, ANNA)


class PoolMachine(RuleBasedStateMachine):
    """Leases in any order, against naive counts: a list of units for every lease."""

    leases = Bundle("leases")
    CAPACITY = 60

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool("pages", self.CAPACITY)
        self.lists: dict[int, list[int]] = {}
        self.free = set(range(self.CAPACITY))
        self.limbo: list[set[int]] = []

    def _note(self, lease: Lease, units: list[int]) -> Lease:
        assert list(lease.units) == units
        self.lists[id(lease)] = units
        return lease

    def _acquired(self, units: list[int]) -> None:
        assert self.free.issuperset(units), "a unit was handed out that was not free"
        assert len(set(units)) == len(units)
        self.free.difference_update(units)

    def _returned(self, units: list[int]) -> None:
        gone = set(units) - {unit for units in self.lists.values() for unit in units}
        (self.limbo[-1] if self.limbo else self.free).update(gone)

    @rule(target=leases, count=st.integers(0, 40))
    def acquire(self, count: int):
        lease = self.pool.acquire(count, ANNA)
        assert (lease is None) == (count > len(self.free))
        if lease is None:
            return multiple()
        self._acquired(list(lease.units))
        return self._note(lease, list(lease.units))

    @rule(lease=leases, count=st.integers(0, 40))
    def grow(self, lease: Lease, count: int) -> None:
        had = self.lists[id(lease)]
        assert lease.grow(count) == (count <= len(self.free))
        self._acquired(list(lease.units)[len(had) :])
        self._note(lease, list(lease.units))

    @rule(target=leases, lease=leases, data=st.data())
    def share(self, lease: Lease, data: st.DataObject) -> Lease:
        start = data.draw(st.integers(0, len(lease)))
        stop = data.draw(st.integers(start, len(lease)))
        return self._note(lease.share(start, stop, BEN), self.lists[id(lease)][start:stop])

    @rule(target=leases, lease=leases, data=st.data())
    def take(self, lease: Lease, data: st.DataObject) -> Lease:
        start = data.draw(st.integers(0, len(lease)))
        stop = data.draw(st.integers(start, len(lease)))
        units = self.lists[id(lease)]
        taken = self._note(lease.take(start, stop, BEN), units[start:stop])
        self._note(lease, units[:start] + units[stop:])
        return taken

    @rule(target=leases, lease=consumes(leases))
    def transfer(self, lease: Lease) -> Lease:
        units = self.lists.pop(id(lease))
        return self._note(lease.transfer(BEN), units)

    @rule(lease=leases, other=consumes(leases))
    def absorb(self, lease: Lease, other: Lease) -> None:
        if lease is other or set(lease.units) & set(other.units):
            self._release(other)  # a lease lists a unit once
            return
        lease.absorb(other)
        units = self.lists.pop(id(other))
        self._note(lease, self.lists[id(lease)] + units)

    @rule(lease=leases, keep=st.integers(0, 20))
    def truncate(self, lease: Lease, keep: int) -> None:
        lease.truncate(keep)
        self._cut(lease, self.lists[id(lease)][:keep], self.lists[id(lease)][keep:])

    @rule(lease=leases, data=st.data())
    def drop_front(self, lease: Lease, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(lease)))
        lease.drop_front(count)
        self._cut(lease, self.lists[id(lease)][count:], self.lists[id(lease)][:count])

    def _cut(self, lease: Lease, kept: list[int], gone: list[int]) -> None:
        self._note(lease, kept)
        self._returned(gone)

    @rule(lease=consumes(leases))
    def release(self, lease: Lease) -> None:
        self._release(lease)

    def _release(self, lease: Lease) -> None:
        units = self.lists.pop(id(lease))
        lease.release()
        self._returned(units)
        with pytest.raises(InvariantError):
            lease.release()

    @precondition(lambda self: len(self.limbo) < 2)
    @rule()
    def submit_step(self) -> None:
        self.pool.step_submitted()
        self.limbo.append(set())

    @precondition(lambda self: self.limbo)
    @rule()
    def settle_step(self) -> None:
        self.pool.step_settled()
        self.free |= self.limbo.pop(0)

    @rule(count=st.integers(0, 80), used=st.integers(0, 80))
    def reserve(self, count: int, used: int) -> None:
        with self.pool.reserve(count, ANNA) as reserved:
            granted = list(reserved.units)
            assert len(granted) == min(count, len(self.free))
            mine = reserved.take(0, min(used, len(granted)), BEN)
        taken = list(mine.units)
        self.free.difference_update(taken)  # the rest was never in use: it is free at once
        mine.release()
        self._returned(taken)

    @invariant()
    def every_unit_is_counted_as_often_as_it_is_listed(self) -> None:
        listed = Counter(unit for units in self.lists.values() for unit in units)
        assert list(self.pool.counts) == [listed[unit] for unit in range(self.CAPACITY)]
        free, limbo = self.pool.unused()
        released = set().union(*self.limbo)
        assert (set(free), set(limbo)) == (self.free, released)
        assert (len(free), len(limbo)) == (len(self.free), len(released))
        assert (self.pool.free, self.pool.limbo, self.pool.leased) == (len(free), len(limbo), len(listed))
        self.pool.check_totals()


PoolMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30)
test_units_are_counted_whatever_happens_to_their_leases = PoolMachine.TestCase
