"""A draft is prefilled while the user still types, is sent whole every time, and costs only the tokens that change."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.base.errors import ContextExceeded
from tenuto.base.options import TurnParams
from tenuto.base.turns import EndReason, TurnState
from tenuto.base.views import Transition
from tenuto.memory.kinds.paged import PagedTable, pages_for
from tests.engine.stage import (
    FULL,
    PAGE,
    SLIDING,
    STATE,
    Stage,
    continuation,
    count_from,
    every_mix,
    every_overlap,
)
from tests.present import present


@every_mix
@every_overlap
def test_a_draft_computes_all_but_its_last_token(mix, overlap: int) -> None:
    stage = Stage(mix, overlap=overlap)
    session = stage.committed()
    assert (
        stage.cost(lambda: stage.engine.turns.draft("s", count_from(600, 20))) == 20
    )  # one of the history, nineteen new
    assert (len(session.history), session.version) == (36, 1)
    assert present(session.turn).state is TurnState.DRAFTING


@every_mix
@every_overlap
def test_a_draft_that_is_submitted_unchanged_starts_with_its_first_output(mix, overlap: int) -> None:
    stage = Stage(mix, overlap=overlap)
    session = stage.committed()
    draft = stage.engine.turns.draft("s", count_from(600, 20))
    stage.play()
    expected = continuation([*session.history, *count_from(600, 20)], 5)
    before = len(stage.executor.plans)
    turn = stage.say("s", count_from(600, 20), 5)
    assert turn is draft
    stage.play()
    assert list(turn.output) == expected
    assert int(stage.executor.plans[before].counts.sum()) == 1  # the token that was held back
    assert stage.computed_since(before) <= 5 + overlap
    assert present(turn.result).usage.cached == 36 + 20 - 1


def test_only_newly_typed_tokens_are_computed() -> None:
    stage = Stage()
    stage.committed()
    text = count_from(600, 40)
    stage.engine.turns.draft("s", text[:20])
    stage.play()
    for typed in range(21, 41):
        assert stage.cost(partial(stage.engine.turns.draft, "s", text[:typed])) == 1
    assert stage.cost(lambda: stage.engine.turns.draft("s", text)) == 0


def test_a_correction_recomputes_from_the_first_difference() -> None:
    stage = Stage()
    stage.committed()
    text = count_from(600, 40)
    stage.engine.turns.draft("s", text)
    stage.play()
    corrected = [*text[:30], 900, *text[31:]]
    assert stage.cost(lambda: stage.engine.turns.draft("s", corrected)) == 9
    shorter = corrected[:10]
    assert stage.cost(lambda: stage.engine.turns.draft("s", shorter)) == 0


def test_a_draft_cut_to_a_checkpoint_and_then_before_it_writes_to_its_own_pages() -> None:
    stage = Stage((SLIDING,), checkpoint_interval=8, checkpoint_share=1.0)
    session = stage.open()
    text = count_from(600, 60)
    for shorter in (60, 12, 4):  # the window of 11 is gone, but not the checkpoint at 8; 3 lies before that
        stage.engine.turns.draft("s", [*text[: shorter - 1], 900])
        stage.play()
        stage.engine.audit()
        memory = session.memory
        assert present(memory.turn).computed == shorter - 1
        (table,) = memory.tables
        assert isinstance(table, PagedTable)
        assert table.entries == pages_for(shorter - 1, PAGE)


edits = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12), st.integers(0, 4)), min_size=1, max_size=8)


@settings(max_examples=25)
@given(edits=edits, overlap=st.integers(0, 1))
@pytest.mark.parametrize("mix", [(FULL,), (FULL, STATE)], ids=["full", "full+state"])
def test_the_output_depends_only_on_the_last_text_of_an_edited_draft(mix, edits, overlap: int) -> None:
    stage = Stage(mix, overlap=overlap, recount=False)
    session = stage.committed()
    text: list[int] = []
    for number, (at, typed, steps) in enumerate(edits):
        text = text[:at] + [100 + 20 * number + i for i in range(typed)]
        stage.engine.turns.draft("s", text)
        for _ in range(steps):
            stage.step()
        stage.engine.audit()
    expected = continuation([*session.history, *text], 4)
    turn = stage.say("s", text, 4)
    stage.play()
    stage.engine.audit()
    assert list(turn.output) == expected
    assert list(session.history[36:]) == text + expected


@every_mix
@every_overlap
def test_a_turn_may_be_submitted_with_other_text_than_its_draft(mix, overlap: int) -> None:
    stage = Stage(mix, overlap=overlap)
    session = stage.committed()
    stage.reach("drafting")
    expected = continuation([*session.history, 7, 8], 5)
    turn = stage.say("s", [7, 8], 5)
    stage.play()
    assert list(turn.output) == expected
    assert list(session.history[36:]) == [7, 8, *expected]


@every_mix
@every_overlap
def test_an_aborted_draft_leaves_no_trace(mix, overlap: int) -> None:
    stage = Stage(mix, overlap=overlap)
    session = stage.committed()
    while stage.engine.memory.cache.evict():
        pass
    free = stage.engine.memory.free().tolist()
    stage.engine.turns.draft("s", count_from(600, 50))
    stage.step()
    stage.engine.turns.draft("s", count_from(600, 30))
    stage.step()
    stage.engine.turns.abort("s")
    stage.play()
    while stage.engine.memory.cache.evict():
        pass
    assert (stage.engine.memory.free().tolist(), len(session.history)) == (free, 36)


def test_a_draft_can_become_a_prefill_only_turn() -> None:
    stage = Stage()
    session = stage.committed()
    draft = stage.engine.turns.draft("s", [1, 2, 3])
    stage.play()
    assert stage.cost(lambda: stage.append("s", [1, 2, 3])) == 0
    assert (present(draft.result).reason, list(session.history[36:])) == (EndReason.APPENDED, [1, 2, 3])


def test_a_draft_that_would_not_fit_is_refused_and_the_previous_one_stays() -> None:
    stage = Stage()
    stage.committed()
    draft = stage.engine.turns.draft("s", [1, 2, 3])
    stage.play()
    for operation in (stage.engine.turns.draft, stage.say):
        with pytest.raises(ContextExceeded, match="of a context of 200"):
            operation("s", [1] * 165)
    assert (list(draft.input), draft.state) == ([1, 2, 3], TurnState.DRAFTING)
    stage.engine.audit()


def test_an_unchanged_draft_times_out_and_leaves_the_session_as_it_was() -> None:
    stage = Stage(draft_timeout=10.0)
    session = stage.committed()
    draft = stage.engine.turns.draft("s", [1, 2])
    stage.clock.advance(9.0)
    stage.step()
    stage.engine.turns.draft("s", [1, 2, 3])
    stage.clock.advance(9.0)
    stage.step()
    assert draft.drafting
    stage.clock.advance(1.5)
    report = stage.step()
    assert report.ended == [draft]
    result = present(draft.result)
    assert (result.reason, result.committed) == (EndReason.DEADLINE, False)
    assert session.turn is None
    assert len(session.history) == 36


def test_a_submitted_draft_no_longer_times_out_as_a_draft() -> None:
    stage = Stage(draft_timeout=10.0)
    stage.committed()
    stage.engine.turns.draft("s", [1, 2])
    turn = stage.say("s", [1, 2], 20)
    stage.clock.advance(11.0)
    stage.play()
    assert present(turn.result).committed


def test_drafts_never_delay_a_submitted_turn() -> None:
    stage = Stage(max_running=1, token_budget=4)
    for name in ("a", "b"):
        stage.open(name)
    stage.engine.turns.draft("a", count_from(1, 100))
    stage.step()
    turn = stage.say("b", [1, 2], 3)
    stage.until(lambda: turn.result is not None, most=6)


def test_timeouts_of_a_submitted_draft_count_from_its_submission() -> None:
    stage = Stage()
    session = stage.committed()
    stage.engine.turns.draft("s", count_from(600, 20))
    stage.play()
    stage.clock.advance(30.0)
    turn = stage.engine.turns.submit(
        "s", count_from(600, 20), TurnParams(max_new_tokens=9, queue_timeout=5.0, timeout=50.0)
    )
    stage.clock.advance(4.0)
    stage.play()
    assert present(turn.result).committed
    assert len(session.history) == 36 + 20 + 9


@every_mix
@every_overlap
def test_a_draft_extended_at_every_step_makes_progress_and_computes_each_token_once(mix, overlap: int) -> None:
    """Known fault: with overlap, every change dropped the result of the step in flight, so that nothing was ever
    kept."""
    stage = Stage(mix, overlap=overlap, context_length=2000, units=2000)
    session = stage.committed()
    text, before, progress = count_from(5, 200), len(stage.executor.plans), [35]
    for typed in range(60):
        stage.engine.turns.draft("s", text + count_from(9, typed))
        stage.step()
        progress.append(present(session.memory.turn).computed)
    caught_up = progress.index(max(p for p in progress if p < 36 + 200))
    assert progress[1 + overlap : caught_up] == list(range(35 + 16, 36 + 200, 16))[: caught_up - 1 - overlap]
    assert all(
        later > earlier for earlier, later in zip(progress[1 + overlap :], progress[2 + overlap :], strict=False)
    )
    stage.play()
    assert stage.computed_since(before) == 1 + 200 + 59 - 1  # the last of the history, and all but the last one typed
    whole = text + count_from(9, 59)
    turn = stage.say("s", whole, 4)
    expected = continuation([*session.history, *whole], 4)
    stage.play()
    assert list(turn.output) == expected


@every_mix
@every_overlap
@pytest.mark.parametrize("interval", [64, 10**6])
def test_submitting_a_draft_recomputes_nothing(mix, overlap: int, interval: int) -> None:
    """Known fault: with overlap it lost the step in flight and, in a model with state, everything."""
    config: dict[str, Any] = {
        "token_budget": 32,
        "context_length": 1000,
        "units": 1000,
        "checkpoint_interval": interval,
    }
    stage = Stage(mix, overlap=overlap, **config)
    stage.open()
    text = count_from(3, 500)
    stage.engine.turns.draft("s", text)
    for _ in range(10):
        stage.step()
    given = stage.computed_since(0)
    turn = stage.say("s", text, 1)
    stage.play()
    assert (given, stage.computed_since(0), turn.cached) == (320, 500, 320)


@every_mix
def test_a_failed_step_that_a_draft_relies_on_is_computed_again(mix) -> None:
    stage = Stage(mix, overlap=1, failing=(3,))
    stage.open()
    text = count_from(3, 100)
    stage.engine.turns.draft("s", text)
    for _ in range(4):
        stage.step()
    turn = stage.say("s", text, 5)  # continues from the step in flight, which fails
    assert present(turn.session.memory.turn).unsettled is not None
    assert present(turn.session.memory.turn).scheduled == 64
    stage.play()
    assert stage.engine.transitions[Transition("step failed")] == 1
    assert list(turn.output) == continuation(text, 5)


@every_overlap
@pytest.mark.parametrize("aging_seconds", [10.0, 1e9])
def test_no_priority_puts_a_draft_before_a_submitted_turn(overlap: int, aging_seconds: float) -> None:
    """Known fault: an important draft without room, to which nothing yields, blocked all others."""
    stage = Stage(units=60, aging_seconds=aging_seconds, overlap=overlap)
    for i in range(3):
        stage.committed(f"idle{i}", 60, 1)
    stage.open("d", priority=1000)
    stage.engine.turns.draft("d", count_from(1, 100))
    stage.step()
    stage.open("x", priority=-1000)
    turn = stage.say("x", count_from(2, 100), 3)
    stage.until(lambda: turn.result, most=16)
    assert list(turn.output) == continuation(count_from(2, 100), 3)


@pytest.mark.parametrize("units", range(85, 101, 3))
@pytest.mark.parametrize("idle", [0, 5])
def test_a_draft_without_room_takes_nothing_from_others(units: int, idle: int) -> None:
    """Known fault: its units were taken from idle sessions and from turns before it."""
    stage = Stage(units=units + idle * 5, max_running=8, token_budget=32)
    for i in range(idle):
        stage.committed(f"idle{i}", 16, 3)
    turns = []
    for i in range(3):
        stage.open(f"d{i}")
        turns.append(stage.say(f"d{i}", count_from(i, 8), 90))
        stage.step()
    session = stage.open("b")
    draft = stage.engine.turns.draft("b", count_from(4, 160))
    while not all(turn.result for turn in turns):
        held = present(draft.session.memory.turn).own_units()[0] if session.memory.turn else 0
        dropped = stage.engine.transitions[Transition("drop", "idle")]
        stage.step()
        assert stage.engine.transitions[Transition("preempt")] == 0
        if held >= len(turns):  # enough for a page for each of the turns
            assert stage.engine.transitions[Transition("drop", "idle")] == dropped
