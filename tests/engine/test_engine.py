"""Turns from submission to commit: their cost, their limits, their ends, and their order."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tenuto.base.errors import (
    ConfigError,
    ContextExceeded,
    EngineStopped,
    InvalidRequest,
    InvariantError,
    NotFound,
    Overloaded,
    SessionBusy,
)
from tenuto.base.options import TurnParams
from tenuto.base.turns import EndReason, TurnState
from tenuto.base.views import Transition
from tenuto.memory.pool import Pool
from tests.engine.stage import (
    FULL,
    PAGE,
    SLIDING,
    VOCABULARY,
    Stage,
    continuation,
    count_from,
    every_mix,
    every_overlap,
    full_table,
)
from tests.present import present


@every_mix
@every_overlap
def test_every_turn_continues_the_whole_history(mix, overlap: int) -> None:
    stage = Stage(mix, overlap=overlap)
    session = stage.open()
    said: list[int] = []
    for i in range(5):
        said += count_from(i, 7)
        expected = continuation(said, 6)
        turn = stage.say("s", count_from(i, 7), 6)
        stage.play()
        assert list(turn.output) == expected
        said += expected
        assert list(session.history) == said
    assert session.version == len(session.records) == 5


@every_mix
@every_overlap
def test_a_turn_costs_only_its_new_tokens_however_long_the_history(mix, overlap: int) -> None:
    for tokens in (10, 150):
        stage = Stage(mix, overlap=overlap)
        stage.committed(tokens=tokens, output=1)
        assert stage.cost(partial(stage.say, "s", [1, 2, 3], 1)) == 4  # the last of the history, and three new ones


def test_a_step_acquires_the_pages_of_all_its_turns_in_one_call_for_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage((FULL, SLIDING), token_budget=64)
    for name in ("a", "b", "c"):
        stage.open(name)
        stage.say(name, count_from(ord(name), 3 * PAGE), 20)
    taken: list[int] = []
    take = Pool._take

    def counted(pool: Pool, count: int) -> list[int] | None:
        taken.extend([count] if count else [])
        return take(pool, count)

    monkeypatch.setattr(Pool, "_take", counted)
    for _ in range(20):
        taken.clear()
        stage.step()
        assert len(taken) <= 2
        assert stage.engine.steps > 1 or sum(taken) == 2 * 9
    stage.play()


@every_overlap
def test_an_empty_input_continues_the_history(overlap: int) -> None:
    """Known fault: zero-token turns."""
    stage = Stage(overlap=overlap)
    session = stage.committed()
    expected = continuation(session.history, 7)
    turn = stage.say("s", [], 7)
    assert stage.cost(lambda: None) <= 7 + overlap
    assert list(turn.output) == expected


def test_an_empty_session_has_nothing_to_continue() -> None:
    stage = Stage()
    stage.open()
    with pytest.raises(InvalidRequest, match="nothing to continue"):
        stage.say("s", [])
    assert stage.engine.idle


# -- limits


@every_mix
def test_a_turn_that_requests_more_than_fits_gets_a_reduced_maximum(mix) -> None:
    stage = Stage(mix)
    session = stage.committed()
    turn = stage.say("s", [1] * 100, 5000)
    assert turn.max_new_tokens == 200 - 136
    stage.play()
    result = present(turn.result)
    assert (result.reason, result.max_new_tokens, result.context_left) == (
        EndReason.LENGTH,
        64,
        0,
    )
    assert len(session.history) == 200


@every_mix
def test_without_a_limit_a_turn_may_fill_the_context(mix) -> None:
    stage = Stage(mix)
    stage.committed()
    turn = stage.say("s", [1], None)
    stage.play()
    result = present(turn.result)
    assert (result.max_new_tokens, result.reason) == (163, EndReason.LENGTH)


def test_a_turn_longer_than_the_context_is_refused_before_it_queues_and_names_the_maximum() -> None:
    """Known fault: a turn longer than the context window."""
    stage = Stage()
    session = stage.committed()
    before = (list(session.history), session.version, session.memory.computed, stage.engine.memory.touched)
    with pytest.raises(ContextExceeded, match="history and input have 200 tokens; allowed: 199 of a context of 200"):
        stage.say("s", [1] * 164)
    with pytest.raises(ContextExceeded, match="have 201 tokens; allowed: 200 of"):
        stage.append("s", [1] * 165)
    assert (list(session.history), session.version, session.memory.computed, stage.engine.memory.touched) == before
    assert (session.turn, stage.engine.idle) == (None, True)
    stage.say("s", [1] * 163)
    stage.play()
    assert len(session.history) == 200


def test_a_full_session_accepts_no_more_tokens_and_can_be_rewound() -> None:
    stage = Stage()
    session = stage.committed(tokens=190, output=10)
    for operation in (stage.say, stage.append, stage.engine.turns.draft):
        with pytest.raises(ContextExceeded):
            operation("s", [1])
    stage.append("s", [])  # nothing always fits
    stage.play()
    stage.engine.sessions.rewind("s", position=100)
    stage.say("s", [1], 5)
    stage.play()
    assert len(session.history) == 106


def test_a_turn_that_cannot_fit_the_empty_pool_is_refused() -> None:
    stage = Stage(units=10)
    stage.open()
    with pytest.raises(ContextExceeded, match="allowed: 40 of a context of 41"):
        stage.say("s", [1] * 41)
    turn = stage.say("s", [1] * 40, 5)
    stage.play()
    assert (present(turn.result).max_new_tokens, len(turn.session.history)) == (1, 41)


def test_the_token_limit_of_a_session_applies() -> None:
    stage = Stage()
    stage.open(max_tokens=20)
    with pytest.raises(ContextExceeded, match="of a context of 20"):
        stage.say("s", [1] * 20)
    turn = stage.say("s", [1] * 15)
    stage.play()
    result = present(turn.result)
    assert (result.max_new_tokens, result.context_left) == (5, 0)


def test_invalid_tokens_are_refused_and_change_nothing() -> None:
    stage = Stage()
    session = stage.open()
    for operation in (stage.say, stage.append, stage.engine.turns.draft):
        unknown: tuple[Any, ...] = ([VOCABULARY], [-1], ["a"])
        for wrong in unknown:
            with pytest.raises(InvalidRequest):
                operation("s", wrong)
    with pytest.raises(InvalidRequest, match="stop strings need a tokenizer"):
        stage.say("s", [1], stop=("x",))
    assert (session.turn, stage.engine.idle) == (None, True)


def test_a_full_queue_refuses_and_changes_nothing() -> None:
    stage = Stage(max_queued=2)
    for i in range(3):
        stage.open(f"s{i}")
    stage.say("s0", [1])
    stage.say("s1", [1])
    with pytest.raises(Overloaded, match="2 turns are waiting, the most allowed"):
        stage.say("s2", [1])
    assert stage.engine.registry.get("s2").turn is None
    stage.play()
    stage.say("s2", [1])


def test_a_session_that_was_never_opened_is_not_found() -> None:
    stage = Stage()
    for operation in (stage.say, stage.append, stage.engine.turns.draft):
        with pytest.raises(NotFound, match="no session 'nobody'"):
            operation("nobody", [1])


# -- ends


def test_a_stop_id_ends_the_turn_and_joins_the_history() -> None:
    stage = Stage()
    session = stage.committed()
    said = continuation([*session.history, 1], 9)
    turn = stage.say("s", [1], 50, stop_ids=(said[4], said[7]))
    stage.play()
    assert (present(turn.result).reason, list(turn.output)) == (EndReason.STOP, said[: said.index(said[4]) + 1])
    assert list(session.history[37:]) == list(turn.output)


@every_overlap
def test_the_models_end_token_ends_a_turn_unless_ignored(overlap: int) -> None:
    said = continuation([1, 2, 3], 10)
    stage = Stage(eos=(said[3],), overlap=overlap)
    for name in ("a", "b"):
        stage.open(name)
    stops, goes_on = stage.say("a", [1, 2, 3], 10), stage.say("b", [1, 2, 3], 10, ignore_eos=True)
    stage.play()
    assert (list(stops.output), present(stops.result).reason) == (said[:4], EndReason.STOP)
    assert (list(goes_on.output), present(goes_on.result).reason) == (said, EndReason.LENGTH)


def test_usage_counts_exactly() -> None:
    stage = Stage()
    stage.committed()
    turn = stage.say("s", [1, 2, 3], 5)
    stage.play()
    usage = present(turn.result).usage
    assert (usage.prompt, usage.cached, usage.generated, usage.computed) == (39, 35, 5, 8)


# -- order


def test_a_higher_priority_starts_first_then_the_earlier_turn() -> None:
    stage = Stage(max_running=1)
    order = []
    for name, priority in (("a", 0), ("b", 0), ("c", 2), ("d", 1)):
        stage.open(name, priority=priority)
        stage.say(name, [1], 2)
    while not stage.engine.idle:
        order += [turn.session.id for turn in stage.step().ended]
    assert order == ["c", "d", "a", "b"]


def test_waiting_raises_priority() -> None:
    stage = Stage(max_running=1, aging_seconds=10.0)
    for name in ("long", "old", "new"):
        stage.open(name)
    stage.say("long", [1], 50, priority=9)
    stage.step()
    stage.say("old", [1], 2)
    stage.clock.advance(25.0)
    stage.say("new", [1], 2, priority=2)  # two more, but twenty-five seconds later
    order = []
    while not stage.engine.idle:
        order += [turn.session.id for turn in stage.step().ended]
    assert order == ["long", "old", "new"]


def test_a_waiting_turn_of_higher_priority_makes_the_last_running_one_yield() -> None:
    stage = Stage(max_running=1)
    stage.open("low")
    stage.open("high", priority=5)
    low = stage.say("low", [1, 2], 20)
    expected = continuation([1, 2], 20)
    stage.until(lambda: len(low.output) > 5)
    high = stage.say("high", [3], 4)
    stage.step()
    assert (low.state, high.state) == (TurnState.PREEMPTED, TurnState.RUNNING)
    stage.play()
    assert list(low.output) == expected


def test_a_turn_does_not_yield_to_one_of_equal_priority() -> None:
    stage = Stage(max_running=1)
    stage.open("a")
    stage.open("b")
    first = stage.say("a", [1], 20)
    stage.until(lambda: len(first.output) > 2)
    stage.say("b", [1], 2)
    stage.play()
    assert stage.engine.transitions[Transition("preempt")] == 0


# -- the engine itself


def test_a_broken_invariant_stops_the_engine_with_its_reason() -> None:
    stage = Stage()
    stage.committed()
    stage.engine.memory.pools[0].counts[0] += 1
    with pytest.raises(InvariantError):
        stage.engine.step()
    engine = stage.engine
    for operation in (
        engine.step,
        engine.sessions.open,
        lambda: engine.turns.submit("s", [1]),
        lambda: engine.turns.abort("s"),
    ):
        with pytest.raises(EngineStopped, match="have a wrong count"):
            operation()


@every_overlap
def test_an_idle_engine_does_nothing(overlap: int) -> None:
    stage = Stage(overlap=overlap)
    stage.committed()
    work = stage.engine.counted_work
    for _ in range(5):
        report = stage.engine.step()
        assert (report.worked, report.progressed, report.ended) == (False, [], [])
    assert stage.engine.counted_work == work


def test_every_end_is_reported_once_by_the_next_step() -> None:
    stage = Stage()
    for name in ("a", "b"):
        stage.open(name)
    turn = stage.say("a", [1], 3)
    aborted = stage.engine.turns.submit("b", [1], TurnParams(max_new_tokens=3))
    stage.engine.turns.abort("b")
    ended = []
    while not stage.engine.idle:
        ended += stage.step().ended
    assert ended == [aborted, turn]


def test_a_session_with_a_running_turn_cannot_be_dropped() -> None:
    stage = Stage()
    stage.committed("s")
    turn = stage.say("s", [1, 2, 3])
    stage.step()
    with pytest.raises(SessionBusy, match="its turn is running"):
        stage.engine.sessions.drop("s")
    assert turn.state is TurnState.RUNNING
    assert stage.engine.sessions.drop() == 0


def test_a_broken_invariant_found_in_any_operation_stops_the_engine() -> None:
    stage = Stage()
    session = stage.committed("s")
    unit = full_table(session).base.units[0]
    stage.engine.memory.pools[0].counts[unit] = 0
    with pytest.raises(InvariantError, match="nobody holds it"):
        stage.engine.sessions.rewind("s", turn=0)
    with pytest.raises(EngineStopped, match="nobody holds it"):
        stage.engine.sessions.open("another")
    with pytest.raises(EngineStopped, match="nobody holds it"):
        stage.engine.step()


def test_lookahead_without_a_proposer_is_refused() -> None:
    with pytest.raises(ConfigError, match="lookahead"):
        Stage(lookahead=3)
