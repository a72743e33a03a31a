"""A running turn's computation is not repeated by turns with the same beginning: they wait for it in their rows."""

from __future__ import annotations

from typing import Any

import pytest

from tenuto.base.groups import Kind
from tenuto.base.turns import EndReason
from tenuto.engine.sharing import Sharing
from tenuto.session import prefixes
from tenuto.session.turn import Turn
from tests.engine.stage import (
    FULL,
    PAGE,
    PREFILL,
    SLIDING,
    STATE,
    Stage,
    continuation,
    count_from,
    every_mix,
    every_overlap,
)
from tests.present import present

COMMON = count_from(1, 120)
HYBRID = (FULL, SLIDING, STATE)


def make(mix: tuple[Kind, ...] = (FULL,), **options: Any) -> Stage:
    given = {"units": 200, "token_budget": 24, "checkpoint_interval": 64, "prefix_cache": True, **options}
    return Stage(mix, **given)


def ask(stage: Stage, number: int, *more: int, output: int = 4, **params: Any) -> Turn:
    """Submits a one-shot request that begins with `COMMON`."""
    stage.open(f"s{number}", ephemeral=True)
    return stage.say(f"s{number}", [*COMMON, *more], output, **params)


def right(turn: Turn, *more: int) -> bool:
    return list(turn.output) == continuation([*COMMON, *more], len(turn.output))


def outcomes(stage: Stage) -> dict[str, int]:
    return dict(stage.engine.counts.prefix_lookups)


@every_mix
@every_overlap
def test_two_simultaneous_requests_compute_their_common_prompt_once(mix, overlap: int) -> None:
    stage = make(mix, overlap=overlap)
    first, second = ask(stage, 1, 5), ask(stage, 2, 6, 7)
    stage.play()
    assert right(first, 5)
    assert right(second, 6, 7)
    assert present(first.result).usage.computed == 121 + 3  # the last token of the output is never computed
    assert present(second.result).usage.computed <= 2 + PAGE + 3
    assert present(second.result).usage.cached >= 120 - PAGE
    assert outcomes(stage) == {"nothing alike": 1, "running": 1}


@every_mix
def test_samples_of_one_prompt_compute_it_once(mix) -> None:
    stage = make(mix, max_running=4)
    turns = [ask(stage, number, 5) for number in range(6)]
    stage.play()
    assert sum(present(turn.result).usage.computed for turn in turns) <= 121 + 5 * PAGE + 6 * 4


def test_a_later_request_starts_where_the_two_differ() -> None:
    stage = make(HYBRID)
    stage.open("other", ephemeral=True)
    first = ask(stage, 1, 5)
    second = stage.say("other", [*COMMON[:70], 500, 501], 3)
    stage.play()
    assert right(first, 5)
    assert list(second.output) == continuation([*COMMON[:70], 500, 501], 3)
    assert present(second.result).usage.cached == 68  # the first has made a checkpoint there for it


@every_mix
@every_overlap
@pytest.mark.parametrize("how", ["abort", "preempt", "pause", "close"])
def test_a_waiting_turn_continues_when_the_other_leaves_its_row(mix, overlap: int, how: str) -> None:
    stage = make(mix, overlap=overlap)
    first, second = ask(stage, 1, 5), ask(stage, 2, 6)
    for _ in range(3):
        stage.step()
    assert stage.engine.sharing.waits(second)
    if how == "abort":
        stage.engine.turns.abort("s1")
    elif how == "close":
        stage.engine.sessions.close("s1")
    elif how == "preempt":
        stage.engine.pressure.preempt(first)
    else:
        stage.engine.pressure.pause(first)
    stage.play()
    assert right(second, 6)
    assert len(second.output) == 4
    if first.result is not None and first.result.committed:
        assert right(first, 5)


@every_mix
def test_a_waiting_request_can_be_aborted(mix) -> None:
    stage = make(mix)
    first, second, third = ask(stage, 1, 5), ask(stage, 2, 6), ask(stage, 3, 7)
    stage.step()
    stage.step()
    stage.engine.turns.abort("s2")
    stage.play()
    assert second.result is not None
    assert right(first, 5)
    assert right(third, 7)
    assert present(third.result).usage.cached >= 120 - PAGE


def test_failing_steps_do_not_harm_waiting_turns() -> None:
    stage = make(HYBRID, failing=(1, 2, 4, 9), overlap=1)
    first, second = ask(stage, 1, 5), ask(stage, 2, 6)
    stage.play()
    assert right(first, 5)
    assert right(second, 6)


@every_mix
@pytest.mark.parametrize("added", [COMMON, COMMON[:2]], ids=["pages", "within-the-page"])
def test_an_aborted_turn_gives_up_free_slots_that_others_read(mix, added: list[int]) -> None:
    """The turn fills its session's last page in place, another turn starts with that page, and the first is aborted.
    Its session then writes elsewhere, so that the other can still return to its starting point."""
    stage = make(mix)
    session = stage.committed("s", 30, 4)  # its memory ends within a page
    assert session.memory.computed % PAGE
    stage.say("s", added, 30)
    stage.until(lambda: session.turn is not None and session.turn.output)
    stage.open("t")
    whole = [*session.history, *added]
    alike = stage.say("t", [*whole, 9], 20)
    stage.until(lambda: alike.output)
    stage.engine.turns.abort("s")
    again = stage.say("s", [7, 7, 7, 7, 7], 10)
    before = list(session.history)
    stage.play()
    assert list(alike.output) == continuation([*whole, 9], 20)
    assert list(again.output) == continuation([*before, 7, 7, 7, 7, 7], 10)
    stage.engine.sessions.rewind("t", position=len(whole))
    later = stage.say("t", [8], 5)
    stage.play()
    assert list(later.output) == continuation([*whole, 8], 5)


def test_a_turn_that_starts_from_a_running_one_can_rewind_as_far_as_it() -> None:
    stage = make((STATE,), checkpoint_interval=8)
    session = stage.committed("s", 60, 4)
    stage.say("s", COMMON, 30)
    stage.until(lambda: session.turn is not None and session.turn.output)
    other = stage.open("t")
    stage.say("t", [*session.history, *COMMON, 9], 3)
    stage.play()
    for position in (64 + 60, 40):  # in the running turn's part and in its session's
        stage.engine.sessions.rewind("t", position=position)
        assert position - 16 < other.memory.computed < position


def test_a_turn_with_scored_input_waits_for_no_other() -> None:
    stage = make()
    ask(stage, 1, 5)
    second = ask(stage, 2, 5, input_logprobs=0)
    for _ in range(3):
        stage.step()
    assert not stage.engine.sharing.waits(second)
    stage.play()
    assert right(second, 5)


def test_a_turn_of_higher_priority_waits_for_no_other() -> None:
    stage = make()
    first, second = ask(stage, 1, 5), ask(stage, 2, 6, priority=3)
    stage.step()
    stage.step()
    assert not stage.engine.sharing.waits(second)
    stage.play()
    assert right(first, 5)
    assert right(second, 6)


def test_others_run_while_one_waits() -> None:
    stage = make(token_budget=8)
    ask(stage, 1, 5)
    ask(stage, 2, 6)
    stage.open("short")
    short = stage.say("short", [900, 901], 2)
    stage.until(lambda: short.result is not None, most=8)


def test_an_append_that_another_turn_computes_computes_nothing() -> None:
    stage = make()
    ask(stage, 1, 5)
    session = stage.open("s")
    turn = stage.engine.turns.submit("s", COMMON[:50], PREFILL)
    stage.play()
    assert present(turn.result).reason is EndReason.APPENDED
    assert present(turn.result).usage.computed == 0
    assert session.memory.computed == 49


def test_a_client_that_resends_a_history_still_being_generated_computes_only_new_tokens() -> None:
    stage = make()
    ask(stage, 1, 5, output=40)
    stage.step()
    again = ask(stage, 2, 5, output=40)
    stage.play()
    assert present(again.result).usage.cached == 120
    assert right(again, 5)


def test_failed_lookups_are_counted_by_cause() -> None:
    stage = make((STATE,), checkpoint_interval=8)
    ask(stage, 1, 5)
    stage.play()
    assert outcomes(stage) == {"nothing alike": 1}
    ask(stage, 2, 5, input_logprobs=0)
    stage.play()
    assert outcomes(stage)["scored"] == 1
    stage.committed("kept", 20)
    stage.say("kept", count_from(700, 20), 2)
    stage.play()
    assert outcomes(stage)["own checkpoint"] == 1
    ask(stage, 3, 8)
    stage.play()
    assert outcomes(stage)["closed"] == 1


def test_each_sequence_hashes_every_page_at_most_once() -> None:
    stage = make()
    turns = [ask(stage, number, 5 + number, output=9) for number in range(3)]
    stage.play()
    hashed = stage.engine.prefixes.hashed
    assert hashed <= sum((turn.length - 1) // PAGE for turn in turns)


def test_nothing_remains_of_prompts_that_ran() -> None:
    stage = make()
    for number in range(5):
        ask(stage, number, number)
    stage.step()
    stage.engine.turns.abort("s0")
    stage.play()
    stage.engine.sessions.drop()
    sharing = stage.engine.sharing
    assert isinstance(sharing, Sharing)
    assert (len(sharing._running), sharing._running._turns, sharing._waits) == (0, {}, {})
    assert stage.engine.batch.held == set()


def test_the_prompt_of_a_waiting_turn_is_not_read_again_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = make(max_running=1)
    running = ask(stage, 1, output=40)
    stage.until(lambda: len(running.output) > 2)
    stage.open("other")
    waiting = stage.say("other", count_from(7, 150), 1)
    stage.step()
    read: list[int] = []
    tokens = Turn.tokens

    def noted(turn: Turn, start: int, end: int) -> Any:
        if turn is waiting:
            read.append(end - start)
        return tokens(turn, start, end)

    monkeypatch.setattr(Turn, "tokens", noted)
    for _ in range(10):
        stage.step()
    assert not waiting.running
    assert max(read, default=0) <= PAGE
    stage.play()


@pytest.mark.parametrize("alike", [2, 30])
def test_a_lookup_compares_a_bounded_number_of_tokens(monkeypatch: pytest.MonkeyPatch, alike: int) -> None:
    monkeypatch.setattr(prefixes, "MAX_COMMON", 4 * len(COMMON))
    stage = make(max_running=32, token_budget=40)
    for number in range(alike):
        ask(stage, number, number)
    stage.step()
    running = stage.engine.sharing._running
    turn, before = ask(stage, alike, 99), running.common
    assert [common for _, common in running.alike(turn, turn.tokens(0, 120))] == [120] * min(alike, 4)
    assert running.common == before + 120 * min(alike, 4)
    stage.play()
    assert right(turn, 99)
