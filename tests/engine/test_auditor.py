"""The audit that is always on: each step checks a little, in every world, and a wrong count stops the engine."""

from __future__ import annotations

from typing import Any

import pytest

from tenuto.base.errors import EngineStopped, InvariantError
from tenuto.base.views import AuditReport
from tenuto.engine import auditor
from tests.engine.stage import FULL, SLIDING, STATE, Stage, every_mix, full_table
from tests.sim.actions import RandomWorld
from tests.sim.setting import small_world


def parked(sessions: int, **config: Any) -> Stage:
    stage = Stage((FULL,), units=2 * sessions + 100, recount=False, max_sessions=sessions + 10, **config)
    for number in range(sessions):
        stage.engine.sessions.open(f"parked {number}")
        stage.append(f"parked {number}", [1, 2, 3])
    stage.play()
    return stage


def test_an_audit_cycle_begins_after_every_interval_of_steps() -> None:
    stage = Stage((FULL,), audit_every=5)
    for step in range(1, 31):
        stage.step()
        assert stage.engine.auditor.cycles == step // 5


def test_without_an_interval_audits_run_only_on_demand() -> None:
    stage = Stage((FULL,), audit_every=0)
    for _ in range(10):
        stage.step()
    assert stage.engine.auditor.cycles == 0
    told: list[AuditReport] = []
    stage.engine.ask_audit(told.append)
    assert not told
    stage.step()
    assert told == [stage.engine.audit()]


def test_a_strict_engine_recounts_everything_after_every_step_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage((FULL, STATE), audit_every=0, strict=True)
    stage.engine.sessions.open("a")
    told: list[AuditReport] = []
    stage.engine.ask_audit(told.append)
    with caplog.at_level("INFO", "tenuto.audit"):
        stage.engine.step()
    assert [record.summary for record in caplog.records] == [str(told[0])]  # type: ignore[attr-defined]
    lease = stage.engine.memory.pools[0].acquire(1, stage.engine.registry.get("a").memory)
    assert lease is not None
    with pytest.raises(InvariantError, match="held by nobody"):
        stage.engine.step()


@pytest.mark.parametrize("sessions", [50, 800])
def test_the_visits_of_a_step_do_not_grow_with_the_parked_sessions(
    sessions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auditor, "VISITS_A_STEP", 40)
    stage = parked(sessions, audit_every=0)
    engine = stage.engine
    told: list[AuditReport] = []
    expected = engine.audit()
    engine.ask_audit(told.append)
    work, steps = [], 0
    while not told:
        before = engine.auditor.work
        stage.step()
        work.append(engine.auditor.work - before)
        steps += 1
    assert max(work) <= 40 + 2
    assert steps >= 2 * sessions // 42
    assert told == [expected]


def test_a_requested_audit_begins_only_after_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit in progress does not cover changes made since it began."""
    monkeypatch.setattr(auditor, "VISITS_A_STEP", 10)
    stage = parked(50, audit_every=1)
    stage.step()
    stage.engine.sessions.drop()
    told: list[AuditReport] = []
    stage.engine.ask_audit(told.append)
    stage.until(lambda: told)
    assert told[0].pools[0].leased == 0


def test_an_audit_requested_during_another_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auditor, "VISITS_A_STEP", 10)
    stage = parked(50, audit_every=0)
    first: list[AuditReport] = []
    second: list[AuditReport] = []
    stage.engine.ask_audit(first.append)
    stage.step()
    stage.engine.ask_audit(second.append)
    stage.engine.sessions.drop()
    stage.until(lambda: first)
    assert not second
    stage.until(lambda: second)
    assert (first[0].pools[0].leased, second[0].pools[0].leased) == (50, 0)
    assert not stage.engine.auditor.awaited


def test_a_wrong_count_found_by_an_audit_stops_the_engine() -> None:
    stage = parked(3, audit_every=5)
    pool = stage.engine.memory.pools[0]
    pool.counts[full_table(stage.engine.registry.get("parked 1")).base.units[0]] += 1
    with pytest.raises(InvariantError, match="1 units have a wrong count"):
        stage.until(lambda: False, most=6)
    with pytest.raises(EngineStopped):
        stage.step()


@every_mix
def test_turns_continue_while_a_cycle_takes_many_steps(mix, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auditor, "VISITS_A_STEP", 8)
    stage = Stage(mix, audit_every=1, overlap=1)
    stage.committed("s")
    for number in range(5):
        stage.engine.sessions.fork("s", child=f"child {number}")
        stage.say(f"child {number}", [number], 9)
        stage.step()
    stage.play()
    assert 2 <= stage.engine.auditor.cycles < stage.engine.steps


@pytest.mark.parametrize("visits", [1, 7])
def test_no_cycle_reports_a_false_miscount(visits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random worlds, audited all the time and very slowly."""
    monkeypatch.setattr(auditor, "VISITS_A_STEP", visits)
    cycles = 0
    for seed in range(24):
        world = RandomWorld(small_world(seed))
        world.engine.auditor._every = 1
        world.run(40)
        world.finish()
        cycles += world.engine.auditor.cycles
    assert cycles > 50


def test_a_cycle_counts_every_kind_of_memory() -> None:
    stage = Stage((FULL, SLIDING, STATE), audit_every=0)
    stage.committed("s")
    stage.reach("mid-decode", "s")
    told: list[AuditReport] = []
    stage.engine.ask_audit(told.append)
    stage.step()
    assert told == [stage.engine.audit()]
    assert [pool.leased > 0 for pool in told[0].pools] == [True] * 3
