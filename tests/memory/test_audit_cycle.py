"""An audit spread over steps finds what a recount would have found at its start, whatever happens meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.base.errors import InvariantError
from tenuto.base.views import AuditReport
from tenuto.memory.audit import AuditCycle, recount
from tenuto.memory.kinds.full import FullTable
from tenuto.memory.pool import Lease, Pool
from tests.memory.scribe import FULL, SLIDING, STATE, Scribe, Script, Someone
from tests.present import present

MIXES = [[FULL], [SLIDING], [STATE], [FULL, SLIDING, STATE]]


def begin(scribe: Scribe) -> AuditCycle:
    """Begins a cycle over the current sessions."""
    scripts = list(scribe.scripts)
    return AuditCycle(scribe.memory, (script.memory for script in scripts), ())


def finish(cycle: AuditCycle, most: int = 1000) -> AuditReport:
    for _ in range(10_000):
        report = cycle.advance(most)
        if report is not None:
            return report
    raise AssertionError("the cycle does not end")


def crowd(mix=(FULL, SLIDING, STATE), sessions: int = 3) -> Scribe:
    """Makes sessions with a history, forks of them, and an open turn."""
    scribe = Scribe(mix, units=400)
    for _ in range(sessions):
        script = scribe.committed(9)
        writing = scribe.open(script)
        scribe.compute(writing, 3)
        scribe.mark(writing)
        scribe.compute(writing, 9)
        scribe.commit(script, 22)
        scribe.fork(script)
    scribe.compute(scribe.open(scribe.scripts[0]), 5)
    return scribe


class Hands:
    """Operates on a scribe's sessions where possible; one method for each operation."""

    def __init__(self, scribe: Scribe) -> None:
        self.scribe = scribe

    def do(self, deed: str, which: int, number: int) -> None:
        script = self.scribe.scripts[which % len(self.scribe.scripts)]
        busy = script.writing is not None
        if busy == (deed in ("compute", "mark", "commit", "abort")) or deed in ("fork", "evict"):
            getattr(self, deed)(script, number)

    def open(self, script: Script, number: int) -> None:
        if self.scribe.memory.rows.free:
            self.scribe.open(script, base=number % (len(script.history) + 1))

    def compute(self, script: Script, number: int) -> None:
        writing = present(script.writing)
        if writing.computed < 50:
            self.scribe.compute(writing, 1 + number % 7)

    def mark(self, script: Script, number: int) -> None:
        writing = present(script.writing)
        if writing.memory.lacks_checkpoint(writing.computed):
            self.scribe.mark(writing)

    def commit(self, script: Script, number: int) -> None:
        writing = present(script.writing)
        self.scribe.commit(script, max(writing.base, writing.memory.start + 1, writing.computed + 1 - number % 3))

    def abort(self, script: Script, number: int) -> None:
        self.scribe.abort(script)

    def fork(self, script: Script, number: int) -> None:
        if len(self.scribe.scripts) < 12:
            self.scribe.fork(script, number % (len(script.history) + 1))

    def rewind(self, script: Script, number: int) -> None:
        self.scribe.rewind(script, number % (len(script.history) + 1))

    def drop(self, script: Script, number: int) -> None:
        script.memory.drop()

    def close(self, script: Script, number: int) -> None:
        if len(self.scribe.scripts) > 1:
            script.memory.drop()
            self.scribe.scripts.remove(script)

    def evict(self, script: Script, number: int) -> None:
        self.scribe.memory.cache.evict()


DEEDS = ("open", "compute", "mark", "commit", "abort", "fork", "rewind", "drop", "close", "evict")
deeds = st.lists(st.tuples(st.sampled_from(DEEDS), st.integers(0, 11), st.integers(0, 60)), max_size=40)


@given(mix=st.sampled_from(MIXES), before=deeds, during=deeds, data=st.data())
@settings(max_examples=150)
def test_a_cycle_reports_the_recount_of_its_start(mix, before, during, data) -> None:
    scribe = crowd(mix)
    hands = Hands(scribe)
    for deed in before:
        hands.do(*deed)
    expected = scribe.audit()
    cycle = begin(scribe)
    found = None
    for deed in during:
        hands.do(*deed)
        if found is None and data.draw(st.booleans()):
            found = cycle.advance(data.draw(st.integers(1, 6)))
    assert (found if found is not None else finish(cycle)) == expected
    assert finish(begin(scribe)) == scribe.audit()


def plant_count(pool: Pool, unit: int) -> None:
    pool.counts[unit] += 1


def plant_free(pool: Pool, unit: int) -> None:
    pool._free.append(unit)


def plant_limbo(pool: Pool, unit: int) -> None:
    pool.step_submitted()
    pool._limbo[-1].append(unit)


def plant_leak(pool: Pool, unit: int) -> None:
    pool.acquire(1, Someone("nobody listed"))


def plant_lost(pool: Pool, unit: int) -> None:
    pool._free.pop()


PLANTS = (plant_count, plant_free, plant_limbo, plant_leak, plant_lost)


@given(
    plant=st.sampled_from(PLANTS),
    group=st.integers(0, 2),
    chosen=st.integers(0, 10_000),
    during=deeds,
    data=st.data(),
)
@settings(max_examples=150)
def test_a_cycle_finds_the_damage_present_at_its_start(plant, group, chosen, during, data) -> None:
    """The miscount is planted before the cycle, and everything else continues where possible."""
    scribe = crowd()
    pool = scribe.memory.pools[group]
    held = [unit for unit in range(pool.capacity) if pool.counts[unit]]
    plant(pool, held[chosen % len(held)])
    with pytest.raises(InvariantError) as expected:
        recount(scribe.memory, scribe.holders())
    cycle, hands = begin(scribe), Hands(scribe)

    def go_on() -> None:
        for deed in during:
            try:
                hands.do(*deed)
            except (InvariantError, AssertionError):
                break  # the damage shows elsewhere first
            if data.draw(st.booleans()) and cycle.advance(3) is not None:
                return
        finish(cycle)

    with pytest.raises(InvariantError) as found:
        go_on()
    assert str(found.value) == str(expected.value)


def test_damage_done_during_a_cycle_is_found_by_the_next() -> None:
    scribe = crowd()
    expected = scribe.audit()
    cycle = begin(scribe)
    cycle.advance(2)
    table = scribe.scripts[2].memory.tables[0]
    assert isinstance(table, FullTable)
    scribe.memory.pools[0].counts[table.base.units[0]] += 1
    assert finish(cycle) == expected
    with pytest.raises(InvariantError, match="1 units have a wrong count"):
        finish(begin(scribe))


def test_a_lease_under_the_wrong_name_or_listed_twice_is_found() -> None:
    scribe = crowd([FULL])
    pool = scribe.memory.pools[0]
    anna, ben = Someone("session anna"), Someone("session ben")
    lease = pool.acquire(2, anna)
    assert lease is not None
    anna.held, ben.held = [lease, lease], [lease]
    for holder, said in (
        (ben, "session ben lists a lease held by session anna"),
        (anna, "list the same lease on full0"),
    ):
        with pytest.raises(InvariantError, match=said):
            finish(AuditCycle(scribe.memory, (s.memory for s in scribe.scripts), [holder]))


CHANGES: dict[str, Callable[[Lease, Someone], object]] = {
    "grow": lambda lease, other: lease.grow(2),
    "transfer": lambda lease, other: other.held.append(lease.transfer(other)),
    "take": lambda lease, other: other.held.append(lease.take(1, 2, other)),
    "absorb": lambda lease, other: lease.absorb(other.held.pop()),
    "be absorbed": lambda lease, other: other.held[0].absorb(lease),
    "truncate": lambda lease, other: lease.truncate(1),
    "drop_front": lambda lease, other: lease.drop_front(1),
    "release": lambda lease, other: lease.release(),
    "share": lambda lease, other: other.held.append(lease.share(0, 1, other)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_lease_is_counted_before_any_change_to_it(change: str) -> None:
    scribe = Scribe([FULL])
    pool = scribe.memory.pools[0]
    anna, ben = Someone("anna"), Someone("ben")
    anna.held, ben.held = [present(pool.acquire(3, anna))], [present(pool.acquire(2, ben))]
    expected = recount(scribe.memory, [anna, ben])
    cycle = AuditCycle(scribe.memory, (), [anna, ben])
    CHANGES[change](anna.held[0], ben)
    if anna.held[0]._units is None:
        anna.held.pop()
    assert finish(cycle, 1) == expected
    assert finish(AuditCycle(scribe.memory, (), [anna, ben])) == recount(scribe.memory, [anna, ben])


def test_a_checkpoint_is_counted_even_if_its_first_owner_closes_before_its_visit() -> None:
    """It lives on in a later fork, which the cycle does not visit."""
    scribe = crowd([FULL, STATE], sessions=1)
    parent = scribe.scripts[1]
    expected = scribe.audit()
    cycle = begin(scribe)
    scribe.fork(parent)
    parent.memory.drop()
    assert finish(cycle) == expected


def test_units_a_turn_held_are_counted_though_another_turn_has_taken_its_tables() -> None:
    scribe = crowd([FULL, SLIDING, STATE], sessions=1)
    script: Script = scribe.scripts[0]
    expected = scribe.audit()
    cycle = begin(scribe)
    cycle.advance(1)  # the first session's holders are known
    scribe.abort(script)
    scribe.compute(scribe.open(script), 4)
    assert finish(cycle, 1) == expected


def test_an_abandoned_cycle_leaves_nothing_to_the_next() -> None:
    scribe = crowd()
    begin(scribe).advance(3)
    scribe.scripts[1].memory.drop()
    assert finish(begin(scribe)) == scribe.audit()


def test_a_recount_in_the_middle_of_a_cycle_disturbs_neither() -> None:
    scribe = crowd()
    cycle = begin(scribe)
    cycle.advance(3)
    expected = scribe.audit()
    assert scribe.audit() == expected
    assert finish(cycle) == expected


def test_a_cycle_makes_no_more_visits_at_a_time_than_allowed() -> None:
    """Except for the last holder, which is visited whole."""
    scribe = crowd([FULL], sessions=20)
    cycle = begin(scribe)
    before = 0
    while cycle.advance(5) is None:
        assert cycle.work - before <= 5 + 1
        before = cycle.work


def test_a_lease_is_noted_once_a_cycle_however_often_it_changes() -> None:
    noted: list[Lease] = []
    pool = Pool("pages", 100)
    lease = pool.acquire(1, Someone("anna"))
    assert lease is not None
    pool.begin_cycle(noted.append)
    for _ in range(5):
        lease.grow(1)
    young = pool.acquire(3, Someone("ben"))
    assert young is not None
    young.truncate(1)
    assert noted == [lease]
