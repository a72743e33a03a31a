"""Guesses from what was said before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, cast

import pytest

from tenuto.base.options import Policy, TurnParams
from tenuto.sched.guesses import NextStep, StepTimes
from tenuto.sched.suffix_proposer import MOST_AT_ONCE, MOST_SAID, MOST_TENANTS, SuffixProposer
from tenuto.session.session import Session
from tenuto.session.turn import Turn
from tests.engine.stage import Stage, continuation, count_from, every_overlap

TEXT = [*range(11, 21)]
STEP = NextStep(StepTimes(), 1, 1, 1)


def turn_of(history: Sequence[int], given: Sequence[int], tenant: str = "", session: Session | None = None) -> Turn:
    """Returns a turn on a session with this history."""
    if session is None:
        session = Session("s", Policy(tenant=tenant), cast("Any", None), 10**6, 0.0)
        session.history.extend(history)
    turn = Turn(1, session, len(session.history), TurnParams(), 0.0)
    turn.input.extend(given)
    return turn


def guesses(proposer: SuffixProposer, turn: Turn, limit: int = 4) -> list[int]:
    return list(proposer.propose([turn], [limit], STEP)[0].tokens)


def test_what_followed_the_same_tokens_is_guessed_and_followed() -> None:
    proposer, turn = SuffixProposer(), turn_of(TEXT, [1, 5, 11, 12, 13])
    assert guesses(proposer, turn) == [14, 15, 16, 17]
    turn.output.extend([14, 15])
    assert guesses(proposer, turn, 3) == [16, 17, 18]
    turn.output.extend([16, 99])  # it departs from the text
    assert guesses(proposer, turn) == []
    turn.output.extend([15, 16, 17])  # and comes back
    assert guesses(proposer, turn, 2) == [18, 19]


def test_a_repeated_phrase_is_guessed_beyond_its_end() -> None:
    proposer, turn = SuffixProposer(), turn_of([], [1, 2, 3, 4, 1, 2, 3])
    assert guesses(proposer, turn, 7) == [4, 1, 2, 3, 4, 1, 2]


def test_the_place_with_the_most_equal_tokens_before_it_is_taken() -> None:
    proposer, turn = SuffixProposer(), turn_of([*TEXT, 77, 77, 18, 19, 20, 55], [12, 13, 14, 15, 16, 17, 18, 19, 20])
    assert guesses(proposer, turn, 2) == [77, 77]


def test_chances_grow_with_hits_and_shrink_with_misses() -> None:
    proposer, turn = SuffixProposer(), turn_of(TEXT * 20, [11, 12, 13])
    first = proposer.propose([turn], [4], STEP)[0].chances
    turn.output.extend((TEXT * 10)[3:83])
    later = proposer.propose([turn], [4], STEP)[0].chances
    assert later[0] > first[0]
    wrong = SuffixProposer()
    for number in range(30):  # after 11, 12, 13 always comes another token
        other = turn_of(TEXT, [11, 12, 13, 100 + number, 11, 12, 13])
        wrong.propose([other], [4], STEP)
        other.output.append(200 + number)
        wrong.propose([other], [4], STEP)
    assert wrong.propose([turn_of(TEXT, [1, 11, 12, 13])], [4], STEP)[0].chances[0] < first[0] / 2


def test_a_rewound_session_guesses_from_what_it_has_now() -> None:
    proposer = SuffixProposer()
    stage = Stage(lookahead=3, proposer=proposer)
    session = stage.committed("s", 30, 6)
    stage.say("s", [1, 2, 3], 2)
    stage.play()
    stage.engine.sessions.rewind("s", position=5)
    assert session.suffixes is not None
    assert session.suffixes.length <= 5


def test_what_a_turn_said_before_it_was_rolled_back_does_not_hide_the_next_one() -> None:
    proposer, turn = SuffixProposer(), turn_of(TEXT, [11, 12, 13])
    turn.output.extend(range(100, 140))
    guesses(proposer, turn)  # and then it is rolled back
    turn = turn_of([], [50, 51, 52, 53, 54, 50, 51, 52], session=turn.session)
    assert guesses(proposer, turn, 2) == [53, 54]


def test_a_turn_that_wants_no_guesses_gets_none() -> None:
    said = continuation(count_from(1, 20), 10)
    stage = Stage(lookahead=3, guess=lambda turn, limit: said[len(turn.output) :][:limit])
    for name, speculate in (("some", True), ("none", False)):
        stage.open(name)
        turn = stage.say(name, count_from(1, 20), 10, speculate=speculate)
        stage.play()
        assert (turn.guessed > 0) == speculate


def test_a_long_history_is_indexed_a_part_at_a_time() -> None:
    history = [i % 30_000 + 5 for i in range(2 * MOST_AT_ONCE)]
    proposer, turn = SuffixProposer(), turn_of(history, [5, 6, 7])
    session = turn.session
    proposer.propose([turn], [4], STEP)
    assert session.suffixes is not None
    assert session.suffixes.length == MOST_AT_ONCE
    for token in (7, 8, 7):
        turn.output.append(token)
        proposer.propose([turn], [4], STEP)
    assert session.suffixes.length == turn.length - 1


def test_indexes_used_longest_ago_are_cleared_for_others_and_made_again() -> None:
    proposer = SuffixProposer(most_bytes=40_000)
    turns = [turn_of([*range(10, 1500), *TEXT], [11, 12, 13]) for _ in range(5)]
    for turn in turns:
        assert guesses(proposer, turn)
    assert proposer.bytes <= 40_000
    assert turns[0].session.suffixes is not None
    assert turns[0].session.suffixes.suffixes.clearings == 1
    turns[0].output.append(300)
    turns[0].output.extend([11, 12, 13])
    assert guesses(proposer, turns[0])
    for turn in turns:
        turn.trail = None  # as at its end
    del turns[1:], turn  # the indexes of sessions that are gone are not counted
    assert proposer.bytes <= 20_000


def test_a_prediction_is_followed_from_the_first_token_and_found_again_after_a_change() -> None:
    proposer, turn = SuffixProposer(), turn_of([], [1, 2, 3, 4])
    turn.prediction = array("i", TEXT)
    assert guesses(proposer, turn, 3) == TEXT[:3]
    turn.output.extend([11, 12, 99, 14, 15, 16])
    assert guesses(proposer, turn, 10) == TEXT[6:]


@every_overlap
def test_a_turn_with_a_right_prediction_takes_a_fraction_of_the_steps(overlap: int) -> None:
    prompt = count_from(1, 20)
    stage = Stage(overlap=overlap, lookahead=7, proposer=SuffixProposer())
    stage.open()
    prediction = array("i", continuation(prompt, 40))
    turn = stage.engine.turns.submit("s", prompt, TurnParams(max_new_tokens=40), prediction=prediction)
    stage.play()
    assert turn.output == prediction
    assert turn.accepted > 30
    assert len(stage.executor.plans) < 16


@every_overlap
@pytest.mark.parametrize("tenant", ["one", "other"])
def test_what_a_session_said_is_guessed_for_others_of_its_tenant_alone(overlap: int, tenant: str) -> None:
    stage = Stage(overlap=overlap, lookahead=7, proposer=SuffixProposer())
    prompt = count_from(1, 20)
    said, steps = [], []
    for name, owner in (("first", "one"), ("second", tenant)):
        stage.open(name, tenant=owner)
        before = len(stage.executor.plans)
        turn = stage.say(name, prompt, 24, tenant=owner)
        stage.play()
        said.append(turn.output.tolist())
        steps.append(len(stage.executor.plans) - before)
        assert turn.result is not None
        assert turn.result.usage.accepted + turn.result.usage.rejected == turn.guessed
    assert said[0] == said[1]
    assert (steps[1] < steps[0] - 12) == (tenant == "one")


def test_a_tenant_is_forgotten_after_many_others_and_only_its_latest_outputs_are_kept() -> None:
    proposer, stage = SuffixProposer(), Stage(eos=())
    stage.open("s")
    turn = stage.say("s", count_from(1, 20), 4)
    stage.play()
    for number in range(MOST_TENANTS + 1):
        turn.session.policy = Policy(tenant=str(number))
        proposer.committed(turn)
    assert len(proposer._said) == MOST_TENANTS
    for _ in range(3 * MOST_SAID // 10):
        proposer.committed(turn)
    newer, older = proposer._said[str(MOST_TENANTS)].parts
    assert 0 < len(newer) <= len(older) <= MOST_SAID
