"""The auditor finds every kind of damage, and names the place and the holders."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import pytest

from tenuto.base.errors import InvariantError
from tenuto.memory.audit import recount
from tenuto.memory.memory import Memory
from tenuto.memory.pool import Holder, Lease
from tests.memory.scribe import FULL, SLIDING, STATE, Scribe, Someone, make_shape, make_spec


class Damage:
    """A healthy pool of ten pages, with two holders of two each and one they share, to be damaged."""

    def __init__(self) -> None:
        self.memory = Memory(make_spec([FULL]), [10], make_shape())
        self.pool = self.memory.pools[0]
        self.anna, self.ben = Someone("session anna"), Someone("session ben")
        self.lease = self.acquire(3, self.anna)
        self.anna.held = [self.lease]
        self.ben.held = [self.acquire(2, self.ben), self.lease.share(2, 3, self.ben)]

    def acquire(self, count: int, holder: Someone) -> Lease:
        lease = self.pool.acquire(count, holder)
        assert lease is not None
        return lease

    def found(self, *in_flight: tuple[int, list[int]]) -> str:
        with pytest.raises(InvariantError) as error:
            recount(self.memory, (self.anna, self.ben), in_flight)
        return str(error.value)


def test_a_healthy_pool_is_accounted_for_to_the_last_unit() -> None:
    damage = Damage()
    report = recount(damage.memory, (damage.anna, damage.ben))
    (pool,) = report.pools
    assert (pool.capacity, pool.free, pool.in_flight, pool.leased) == (10, 5, 0, 5)
    assert pool.by_holder == {"session": 4, "shared": 1}
    assert str(report) == (
        "every unit accounted for (2 holders, 3 leases) | full0: 10 units = free 5, session 4, shared 1"
    )


def test_borrowed_memory_is_not_counted_twice() -> None:
    """Known fault: a healthy server reports a leak because a shared unit was counted by each of its holders."""
    damage = Damage()
    (pool,) = recount(damage.memory, (damage.anna, damage.ben)).pools
    assert pool.free + pool.in_flight + sum(pool.by_holder.values()) == pool.capacity


def test_a_unit_that_no_holder_lists_is_a_leak() -> None:
    damage = Damage()
    unit = damage.anna.held.pop().units[0]
    wrong = f"3 units have a wrong count; unit {unit - 2} is counted 2 times"
    assert damage.found() == f"full0: {wrong}, held by ['session ben']"
    damage.ben.held.pop()
    assert "held by nobody" in damage.found()


def test_two_owners_of_one_page_are_found_though_the_totals_balance() -> None:
    """Known fault: a page with two owners, hidden because another page is unowned."""
    damage = Damage()
    mine, its = damage.lease.units, damage.ben.held[0].units
    its[0] = mine[0]
    damage.pool.check_totals()
    message = damage.found()
    assert f"unit {mine[0]} is counted 1 times, held by ['session anna', 'session ben']" in message


def test_a_wrong_count_is_found_with_its_holders() -> None:
    for change in (-1, 1):
        damage = Damage()
        unit = damage.lease.units[0]
        damage.pool.counts[unit] += change
        assert damage.found() == (
            f"full0: 1 units have a wrong count; unit {unit} is counted {1 + change} times, held by ['session anna']"
        )


def test_a_lease_under_the_wrong_name_is_found() -> None:
    damage = Damage()
    damage.ben.held.append(damage.anna.held.pop())
    assert damage.found() == "session ben lists a lease held by session anna"


def test_a_lease_listed_twice_is_found() -> None:
    damage = Damage()
    damage.anna.held.append(damage.lease)
    assert damage.found() == "session anna and session anna list the same lease on full0"


def test_an_ended_lease_is_found_with_its_holder() -> None:
    damage = Damage()
    damage.lease.release()
    assert damage.found() == "a lease on full0 held by session anna was used after its end"


def test_a_unit_twice_in_one_lease_is_found() -> None:
    damage = Damage()
    damage.lease.units[0] = damage.lease.units[1]
    assert damage.found() == "session anna lists a unit of full0 twice in one lease"


def test_a_held_unit_on_the_free_list_is_found() -> None:
    damage = Damage()
    unit = damage.lease.units[0]
    damage.pool._free.append(unit)
    assert damage.found() == f"full0: unit {unit} is in 2 of the free list, limbo and leases"


def test_a_unit_twice_on_the_free_list_is_found() -> None:
    damage = Damage()
    unit = damage.pool._free[0]
    damage.pool._free.append(unit)
    assert damage.found() == f"full0: unit {unit} is in 2 of the free list, limbo and leases"


def test_a_unit_in_no_place_is_found() -> None:
    damage = Damage()
    unit = damage.pool._free.pop()
    assert damage.found() == f"full0: unit {unit} is in 0 of the free list, limbo and leases"


def test_a_unit_both_free_and_in_limbo_is_found() -> None:
    damage = Damage()
    damage.pool._limbo.append([damage.pool._free[0]])
    assert "in 2 of the free list, limbo and leases" in damage.found()


def test_a_step_in_flight_that_touches_a_free_unit_is_found() -> None:
    damage = Damage()
    free = damage.pool._free[0]
    assert damage.found((0, [damage.lease.units[0], free])) == f"full0: the step in flight touches free units [{free}]"


def test_a_step_in_flight_may_touch_units_held_or_in_limbo() -> None:
    damage = Damage()
    damage.memory.step_submitted()
    units = list(damage.ben.held[0].units)
    damage.ben.held.pop(0).release()
    report = recount(damage.memory, (damage.anna, damage.ben), [(0, [*units, *damage.lease.units])])
    assert report.pools[0].in_flight == 2
    assert "in flight 2" in str(report)


def test_surplus_unused_units_show_in_the_totals_of_every_step() -> None:
    damage = Damage()
    damage.pool._free.extend(range(6))
    with pytest.raises(InvariantError, match="full0: 11 free"):
        damage.memory.check_totals()


@pytest.mark.parametrize("group", [0, 1, 2])
def test_the_audit_skips_no_group(group: int) -> None:
    scribe = Scribe([FULL, SLIDING, STATE])
    scribe.compute(scribe.open(scribe.committed(9)), 3)
    scribe.audit()
    pool = scribe.memory.pools[group]
    held = next(unit for unit in range(pool.capacity) if pool.counts[unit])
    pool.counts[held] += 1
    with pytest.raises(InvariantError, match=f"{pool.name}: 1 units have a wrong count; unit {held} "):
        scribe.audit()


def test_every_kind_of_holder_is_named() -> None:
    scribe = Scribe([FULL, STATE])
    script = scribe.committed(9)
    writing = scribe.open(script)
    scribe.compute(writing, 3)
    scribe.mark(writing)
    holders: Iterator[Holder] = scribe.holders()
    assert [holder.holder_name for holder in holders] == [
        "session 0",
        "checkpoint 8 of turn",  # which made it; the session and its new turn refer to it
        "turn",
        "checkpoint 11 of turn",
    ]
    assert scribe.audit().pools[1].by_holder == {"checkpoint": 2, "turn": 2}


def test_a_lease_made_by_hand_is_found() -> None:
    damage = Damage()
    damage.anna.held.append(Lease(damage.pool, array("i", damage.lease.units[:1]), damage.anna))
    assert "is counted 1 times, held by ['session anna', 'session anna']" in damage.found()
