"""Turns whose output follows a grammar: under any interruption, every token is one the grammar allows."""

from __future__ import annotations

import gc
import weakref
from random import Random

import pytest

from tenuto.base.errors import InvalidRequest
from tenuto.base.options import TurnParams
from tenuto.base.turns import EndReason, TurnState
from tenuto.session.turn import Turn
from tenuto.text.constraint import Constraint
from tenuto.text.masks import MaskThreads
from tests.engine.ladder import ANY, WORDS, Ladder, climb, climbed
from tests.engine.stage import (
    STATES,
    VOCABULARY,
    Stage,
    continuation,
    count_from,
    every_mix,
    every_overlap,
)
from tests.present import present


@every_mix
@every_overlap
def test_a_turn_generates_only_allowed_tokens_and_ends_when_its_grammar_is_complete(mix, overlap: int) -> None:
    stage = Stage(mix, overlap=overlap)
    session = stage.open()
    given, expected = count_from(1, 40), climbed(count_from(1, 40), Ladder(5, 2, 9), 12)
    turn = climb(stage, given, Ladder(5, 2, 9))
    stage.play()
    assert (list(turn.output), present(turn.result).reason) == (expected, EndReason.STOP)
    assert [token % 5 for token in turn.output] == [(rung + 2) % 5 for rung in range(9)]
    following = stage.say("s", [7], 4)  # a turn without a grammar is unconstrained again
    wanted = continuation([*session.history, 7], 4)
    stage.play()
    assert list(following.output) == wanted


@pytest.mark.parametrize("end", ["commit", "abort"])
@every_overlap
def test_ended_turns_keep_nothing_of_their_grammars_although_no_step_follows(overlap: int, end: str) -> None:
    stage = Stage(overlap=overlap)
    ladders: list[weakref.ref[Ladder]] = []
    kept: list[Turn] = []
    for number in range(3):
        stage.open(f"s{number}")
        ladder = Ladder(5, 2, 9)
        ladders.append(weakref.ref(ladder))
        kept.append(climb(stage, count_from(number, 40), ladder, session=f"s{number}"))
        del ladder
    if end == "commit":
        stage.play()
    else:
        stage.until(lambda: all(turn.output for turn in kept))
        for number in range(3):
            stage.engine.turns.abort(f"s{number}")
        stage.play()
    assert all(turn.state.ended for turn in kept)
    gc.collect()
    assert [ladder() for ladder in ladders] == [None] * 3


@every_overlap
def test_a_text_longer_than_the_turn_allows_is_cut_at_its_length(overlap: int) -> None:
    stage = Stage(overlap=overlap)
    stage.open()
    turn = climb(stage, count_from(1, 10), Ladder(3, 0, 100), output=6)
    stage.play()
    assert list(turn.output) == climbed(count_from(1, 10), Ladder(3, 0, 100), 6)
    assert present(turn.result).reason is EndReason.LENGTH


@every_mix
@every_overlap
@pytest.mark.parametrize("right", [0, 2, 5])
def test_guesses_are_checked_against_the_allowed_tokens(mix, overlap: int, right: int) -> None:
    ladder, given = Ladder(7, 3, 20), count_from(1, 10)
    said = climbed(given, ladder, 20)

    def guess(turn: Turn, limit: int) -> list[int]:
        """Guesses the next tokens, of which the first `right` are right; the others are not even allowed."""
        start = len(turn.output)
        return [token if n < right else token + 1 for n, token in enumerate(said[start : start + limit])]

    stage = Stage(mix, overlap=overlap, guess=guess, lookahead=5)
    stage.open()
    turn = climb(stage, given, ladder, output=20)
    stage.play()
    assert list(turn.output) == said
    if right and overlap == 0:
        assert len(stage.executor.plans) < 20  # the guesses helped


@every_mix
@every_overlap
@pytest.mark.parametrize("at", [0, 5, 11])
def test_a_preempted_turn_continues_in_its_grammar(mix, overlap: int, at: int) -> None:
    stage = Stage(mix, overlap=overlap)
    stage.open()
    turn = climb(stage, count_from(1, 30), Ladder(4, 1, 12))
    stage.until(lambda: turn.state is TurnState.RUNNING and len(turn.output) >= at)
    stage.engine.pressure.preempt(turn)
    stage.play()
    assert list(turn.output) == climbed(count_from(1, 30), Ladder(4, 1, 12), 12)


@every_mix
@every_overlap
def test_a_turn_continues_in_its_grammar_after_failed_steps(mix, overlap: int) -> None:
    stage = Stage(mix, overlap=overlap, failing=(1, 4, 5, 9))
    for name in "ab":
        stage.open(name)
    turns = [climb(stage, count_from(n, 20), Ladder(4, n, 12), session=name) for n, name in enumerate("ab")]
    stage.play()
    for n, turn in enumerate(turns):
        assert list(turn.output) == climbed(count_from(n, 20), Ladder(4, n, 12), 12)


@every_overlap
@pytest.mark.parametrize("state", STATES)
def test_an_aborted_turn_leaves_no_grammar_behind(overlap: int, state: str) -> None:
    stage = Stage(overlap=overlap)
    session = stage.committed()
    history = list(session.history)
    if state == "drafting":
        stage.engine.turns.draft("s", count_from(3, 20))
    else:
        turn = climb(stage, count_from(3, 20), Ladder(5, 0, 30), output=30)
        if state != "queued":
            stage.until(lambda: turn.started and (state == "mid-prefill" or len(turn.output) >= 4))
        if state == "preempted":
            stage.engine.pressure.preempt(turn)
    stage.engine.turns.abort("s")
    assert list(session.history) == history
    following = stage.say("s", [9], 5)
    wanted = continuation([*history, 9], 5)
    stage.play()
    assert list(following.output) == wanted


@every_overlap
def test_an_interrupted_turn_keeps_its_output_and_the_next_grammar_starts_over(overlap: int) -> None:
    stage = Stage(overlap=overlap)
    session = stage.open()
    given = count_from(1, 12)
    turn = climb(stage, given, Ladder(5, 0, 30), output=30)
    stage.until(lambda: len(turn.output) >= 8)
    stage.engine.turns.abort("s", keep=5)
    kept = climbed(given, Ladder(5, 0, 30), 5)
    assert list(session.history) == given + kept
    following = climb(stage, [3], Ladder(6, 2, 7))
    stage.play()
    assert list(following.output) == climbed([*given, *kept, 3], Ladder(6, 2, 7), 12)


@every_overlap
def test_a_regenerated_turn_has_a_grammar_of_its_own(overlap: int) -> None:
    stage = Stage(overlap=overlap)
    stage.open()
    first = climb(stage, count_from(1, 12), Ladder(5, 0, 6))
    stage.play()
    params = TurnParams(max_new_tokens=12, grammar=ANY)
    second = stage.engine.turns.regenerate("s", params, Constraint(Ladder(3, 1, 9), WORDS))
    stage.play()
    assert list(first.output) == climbed(count_from(1, 12), Ladder(5, 0, 6), 12)
    assert list(second.output) == climbed(count_from(1, 12), Ladder(3, 1, 9), 12)


@every_overlap
def test_forks_of_one_prompt_follow_their_own_grammars(overlap: int) -> None:
    stage = Stage(overlap=overlap)
    session = stage.committed()
    history, ladders = list(session.history), [Ladder(4, n, 5 + n) for n in range(3)]
    turns = []
    for n, ladder in enumerate(ladders):
        stage.engine.sessions.fork("s", child=f"f{n}")
        turns.append(climb(stage, [5], Ladder(ladder.base, ladder.offset, ladder.rungs), session=f"f{n}"))
    stage.play()
    assert [list(turn.output) for turn in turns] == [climbed([*history, 5], ladder, 12) for ladder in ladders]


@every_overlap
def test_a_draft_becomes_a_turn_with_a_grammar(overlap: int) -> None:
    stage = Stage(overlap=overlap)
    stage.open()
    stage.engine.turns.draft("s", count_from(1, 10))
    for _ in range(3):
        stage.step()
    turn = climb(stage, count_from(1, 14), Ladder(5, 0, 6))
    stage.play()
    assert list(turn.output) == climbed(count_from(1, 14), Ladder(5, 0, 6), 12)


@every_overlap
def test_a_turn_whose_grammar_fails_is_rolled_back_alone(overlap: int) -> None:
    stage = Stage(overlap=overlap)
    session = stage.committed()
    stage.open("other")
    history = list(session.history)
    turn = climb(stage, [1, 2, 3], Ladder(5, 0, 12, broken=4))
    other = climb(stage, count_from(1, 20), Ladder(5, 0, 12), session="other")
    stage.play()
    assert (present(turn.result).reason, list(session.history)) == (EndReason.GRAMMAR, history)
    assert list(other.output) == climbed(count_from(1, 20), Ladder(5, 0, 12), 12)


@every_overlap
@pytest.mark.parametrize("guesses", [0, 3])
def test_a_token_sampled_where_none_is_allowed_is_not_committed_even_if_it_is_a_stop_id(
    overlap: int, guesses: int
) -> None:
    ladder, given = Ladder(5, 0, 12, broken=4), count_from(2, 20)
    said = climbed(given, ladder, 4)
    stop = continuation([*given, *said], 1)[0]
    assert stop not in said
    assert not ladder.may(4, stop)
    stage = Stage(overlap=overlap, guess=lambda turn, limit: said[len(turn.output) :][:limit], lookahead=guesses)
    stage.open()
    params = TurnParams(max_new_tokens=12, grammar=ANY, stop_ids=(stop,))
    turn = stage.engine.turns.submit("s", given, params, None, Constraint(ladder, WORDS))
    stage.play()
    assert (list(turn.output), present(turn.result).reason) == ([*said, stop], EndReason.GRAMMAR)


def test_an_engine_without_a_tokenizer_refuses_a_grammar() -> None:
    stage = Stage()
    stage.open()
    with pytest.raises(InvalidRequest, match="tokenizer"):
        stage.say("s", [1], grammar=ANY)


@every_mix
@pytest.mark.parametrize("seed", range(4))
def test_every_turn_follows_its_grammar_under_random_operations(mix, seed: int) -> None:
    random, masks = Random(seed), MaskThreads()

    def guess(turn: Turn, limit: int) -> list[int]:
        return [random.randrange(VOCABULARY) if random.random() < 0.3 else 5 for _ in range(limit)]

    failing = [step for step in range(2000) if random.random() < 0.05]
    stage = Stage(mix, overlap=seed % 2, failing=failing, guess=guess, lookahead=3, units=60, masks=masks)
    turns: list[tuple[Turn, list[int]]] = []
    for n in range(60):
        name = f"s{n % 7}"
        session = stage.engine.registry.find(name, "") or stage.open(name)
        if session.turn is None and session.context_left > 60:
            given = count_from(n, random.randrange(1, 30))
            ladder = Ladder(random.randrange(2, 9), random.randrange(9), random.randrange(1, 20))
            free = random.random() < 0.3
            history = [*session.history, *given]
            said = continuation(history, 10) if free else climbed(history, ladder, 10)
            turn = stage.say(name, given, 10) if free else climb(stage, given, ladder, 10, name)
            turns.append((turn, said))
        elif session.turn is not None and random.random() < 0.3:
            stage.engine.turns.abort(name, random.choice([None, 0, 3, "all"]))
        for _ in range(random.randrange(4)):
            stage.step()
        running = [turn for turn, _ in turns if turn.state is TurnState.RUNNING]
        if running and random.random() < 0.3:
            stage.engine.pressure.preempt(random.choice(running))
    stage.play()
    masks.close()
    for turn, said in turns:
        assert list(turn.output) == said[: len(turn.output)]
        if present(turn.result).reason in (EndReason.STOP, EndReason.LENGTH):
            assert list(turn.output) == said
    assert sum(present(turn.result).committed for turn, _ in turns) > 5


def test_a_guess_that_breaks_a_grammar_at_the_end_of_a_turn_ends_it_once() -> None:
    ladder, given = Ladder(7, 3, 20, broken=4), count_from(2, 10)
    said = climbed(given, Ladder(7, 3, 20), 20)
    stage = Stage(guess=lambda turn, limit: said[len(turn.output) : len(turn.output) + limit], lookahead=5)
    stage.open()
    turn = climb(stage, given, ladder, output=5)
    stage.play()
    assert present(turn.result).reason is EndReason.GRAMMAR
