"""Deadlines, time to live and closing: sessions end when they should, and never while a turn is open."""

from __future__ import annotations

import pytest

from tenuto.base.errors import NotFound, SessionClosed
from tenuto.base.turns import EndReason, TurnState
from tenuto.engine.timers import MAX_IDLE_TIMERS
from tests.engine.stage import STATES, Stage, continuation, every_mix
from tests.present import present


@every_mix
@pytest.mark.parametrize("state", STATES)
def test_a_turn_past_its_deadline_ends_and_its_session_is_at_the_last_commit(mix, state: str) -> None:
    stage = Stage(mix, draft_timeout=30.0)
    session = stage.committed()
    before, computed = list(session.history), session.memory.computed
    if state == "drafting":
        turn = stage.reach(state)
    else:
        turn = stage.say("s", [1] * 20, 40, timeout=30.0)
        steps = {"queued": 0, "mid-prefill": 1}.get(state)
        stage.until(lambda: len(turn.output) > 4) if steps is None else [stage.step() for _ in range(steps)]
        if state == "preempted":
            stage.engine.pressure.preempt(turn)
    stage.clock.advance(31.0)
    assert turn in stage.step().ended
    result = present(turn.result)
    assert (result.reason, result.committed) == (EndReason.DEADLINE, False)
    assert (list(session.history), session.memory.computed) == (before, computed)


def test_a_turn_that_waits_too_long_to_start_ends() -> None:
    stage = Stage(max_running=1)
    stage.committed("one", output=1)
    stage.committed("two", output=1)
    stage.say("one", [1], 100)
    stage.step()
    turn = stage.say("two", [1], 5, queue_timeout=3.0)
    stage.clock.advance(2.0)
    stage.step()
    assert turn.state is TurnState.QUEUED
    stage.clock.advance(2.0)
    stage.step()
    assert (present(turn.result).reason, len(turn.session.history)) == (EndReason.DEADLINE, 31)


def test_a_started_turn_ignores_its_queue_deadline_even_if_preempted() -> None:
    stage = Stage()
    stage.open()
    turn = stage.say("s", [1, 2], 40, queue_timeout=3.0)
    stage.step()
    stage.engine.pressure.preempt(turn)
    stage.clock.advance(10.0)
    stage.play()
    assert (present(turn.result).reason, len(turn.output)) == (EndReason.LENGTH, 40)


def test_the_deadline_of_a_turn_that_has_ended_does_nothing() -> None:
    stage = Stage()
    session = stage.open()
    stage.say("s", [1, 2], 4, timeout=30.0, queue_timeout=30.0)
    stage.play()
    later = stage.say("s", [3], 60)
    stage.step()
    stage.clock.advance(31.0)
    stage.play()
    assert present(later.result).reason is EndReason.LENGTH
    assert len(session.history) == 6 + 61


def test_one_jump_of_the_clock_ends_everything_that_is_due() -> None:
    stage = Stage(max_running=2)
    turns = []
    for i in range(6):
        stage.open(f"s{i}")
        turns.append(stage.say(f"s{i}", [1, 2], 100, timeout=5.0 if i % 2 else 50.0))
    stage.step()
    stage.clock.advance(1e6)
    assert set(stage.step().ended) == set(turns)
    assert stage.engine.idle


@pytest.mark.parametrize("state", STATES)
def test_a_session_does_not_expire_while_its_turn_is_open(state: str) -> None:
    """Known fault: an idle timeout closes a session whose turn is running."""
    stage = Stage(draft_timeout=1e9)
    stage.committed(ttl=10.0)
    stage.reach(state)
    stage.clock.advance(1000.0)
    stage.engine.step()
    assert stage.engine.registry.find("s") is not None
    stage.engine.turns.abort("s")
    stage.engine.step()
    assert stage.engine.registry.find("s") is not None
    stage.clock.advance(11.0)
    stage.step()
    assert stage.engine.registry.find("s") is None


@every_mix
def test_an_expired_session_releases_everything(mix) -> None:
    stage = Stage(mix)
    stage.committed(ttl=10.0)
    stage.clock.advance(11.0)
    stage.step()
    with pytest.raises(NotFound, match="has expired"):
        stage.engine.registry.get("s")
    assert [pool.leased for pool in stage.engine.memory.pools] == [0] * len(mix)


@every_mix
def test_an_ephemeral_session_closes_when_its_only_turn_ends(mix) -> None:
    stage = Stage(mix)
    stage.open(ephemeral=True)
    turn = stage.say("s", [1, 2, 3], 5)
    stage.play()
    assert list(turn.output) == continuation([1, 2, 3], 5)
    assert present(turn.result).committed
    assert stage.engine.registry.find("s") is None
    assert [pool.leased for pool in stage.engine.memory.pools] == [0] * len(mix)


@pytest.mark.parametrize("state", STATES)
def test_an_ephemeral_session_also_closes_when_its_turn_is_aborted(state: str) -> None:
    """Known fault: a disconnect that leaves a zombie turn."""
    stage = Stage()
    stage.open(ephemeral=True)
    stage.reach(state)
    stage.engine.turns.abort("s")
    stage.play()
    assert stage.engine.registry.find("s") is None
    assert stage.engine.memory.pools[0].leased == 0


@every_mix
@pytest.mark.parametrize("state", STATES)
def test_closing_aborts_the_open_turn(mix, state: str) -> None:
    stage = Stage(mix)
    stage.committed()
    turn = stage.reach(state)
    stage.engine.sessions.close("s")
    assert (turn.state, stage.engine.registry.find("s")) == (TurnState.ABORTED, None)
    stage.play()
    assert [pool.leased for pool in stage.engine.memory.pools] == [0] * len(mix)


@every_mix
@pytest.mark.parametrize("state", STATES)
def test_closing_with_finish_lets_a_submitted_turn_end_first_but_not_a_draft(mix, state: str) -> None:
    stage = Stage(mix)
    session = stage.committed()
    turn = stage.reach(state)
    stage.engine.sessions.close("s", finish=True)
    if state == "drafting":
        assert turn.state is TurnState.ABORTED
    else:
        with pytest.raises(SessionClosed, match="session s is closing"):
            stage.engine.sessions.fork("s")
        stage.play()
        assert (present(turn.result).reason, len(session.history)) == (EndReason.LENGTH, 36 + 40)
    assert stage.engine.registry.find("s") is None
    assert [pool.leased for pool in stage.engine.memory.pools] == [0] * len(mix)


def test_closing_without_finish_ends_a_session_that_is_closing_with_it() -> None:
    stage = Stage()
    stage.committed()
    turn = stage.reach("mid-decode")
    stage.engine.sessions.close("s", finish=True)
    stage.engine.sessions.close("s")
    assert (turn.state, stage.engine.registry.find("s")) == (TurnState.ABORTED, None)


def test_an_id_can_be_reused_after_its_session_was_closed_during_a_turn() -> None:
    stage = Stage(overlap=1)
    stage.committed()
    stage.reach("mid-decode")
    stage.engine.sessions.close("s")
    stage.open()
    turn = stage.say("s", [1, 2], 5)
    stage.play()
    assert list(turn.output) == continuation([1, 2], 5)


def test_timers_of_ended_turns_are_purged_and_a_drafts_timer_stays() -> None:
    stage = Stage(recount=False, draft_timeout=40.0)
    stage.open("draft")
    draft = stage.engine.turns.draft("draft", [1, 2])
    stage.open("s")
    for _ in range(1200):
        stage.say("s", [1], 1, timeout=1e6)
        stage.engine.turns.abort("s")
    assert len(stage.engine.timers) <= MAX_IDLE_TIMERS + 8 * 2 + 1
    stage.clock.advance(40.0)
    stage.step()
    assert present(draft.result).reason is EndReason.DEADLINE
