"""Vectors of inputs: the output of the model's last norm after an input token, or the average over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from tenuto.base.errors import InvalidRequest
from tenuto.base.options import POOLINGS, Pooling, TurnParams
from tenuto.exec.witness_hashes import history_hash, vectors_of
from tenuto.session.turn import Turn
from tests.engine.stage import VOCABULARY, Stage, every_mix, every_overlap

COMMON = [7 * i % VOCABULARY for i in range(1, 80)]


def expected(history: Sequence[int], given: Sequence[int], pooling: Pooling) -> bytes:
    hashes = [history_hash([*history, *given[: i + 1]]) for i in range(len(given))]
    chosen = {"last": hashes[-1:], "first": hashes[:1], "mean": hashes}[pooling]
    return np.mean(vectors_of(np.array(chosen, np.uint64)), axis=0, dtype=np.float64).astype("<f4").tobytes()


def vector(turn: Turn) -> bytes:
    assert turn.pool is not None
    return turn.pool.vector()


def ask(stage: Stage, name: str, given: Sequence[int], pooling: Pooling, most: int = 1) -> Turn:
    return stage.engine.turns.submit(name, given, TurnParams(max_new_tokens=most, pooling=pooling))


@every_mix
@every_overlap
def test_vectors_follow_from_the_input_however_it_is_cut_and_what_shares_the_steps(mix, overlap: int) -> None:
    stage, rng = Stage(mix, overlap=overlap, token_budget=7, max_running=3), Random(1)
    asked = []
    for i in range(12):
        given = [rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 2, 5, 30)))]
        stage.open(f"s{i}")
        asked.append((ask(stage, f"s{i}", given, POOLINGS[i % 3], rng.choice((1, 4))), given, POOLINGS[i % 3]))
    stage.play()
    assert [vector(turn) for turn, _, _ in asked] == [expected((), given, how) for _, given, how in asked]


@every_overlap
@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_preempted_turn_averages_each_token_once(pooling: Pooling, overlap: int) -> None:
    stage = Stage(overlap=overlap, token_budget=8)
    session = stage.open("s")
    stage.say("s", [3, 1, 4], 2)
    stage.play()
    history = list(session.history)
    turn = ask(stage, "s", COMMON[:40], pooling, 4)
    for enough in (lambda: stage.engine.memory.rows.computed.max() > 20, lambda: len(turn.output) == 2):
        stage.until(enough)
        stage.engine.pressure.preempt(turn)
    stage.play()
    assert vector(turn) == expected(history, COMMON[:40], pooling)


def test_only_the_last_vector_may_begin_with_shared_memory() -> None:
    stage = Stage(prefix_cache=True)
    asked: list[tuple[Pooling, int]] = [("mean", 0), ("first", 0), ("last", 76)]
    for number, (pooling, cached) in enumerate(asked):
        stage.open(f"s{number}")
        turn = ask(stage, f"s{number}", COMMON, pooling)
        stage.play()
        assert vector(turn) == expected((), COMMON, pooling)
        assert turn.result is not None
        assert turn.result.usage.cached >= cached
        assert cached or not turn.result.usage.cached


def test_an_aborted_turn_has_no_vector_unless_its_input_was_computed() -> None:
    stage = Stage(token_budget=8)
    stage.open("s")
    turn = ask(stage, "s", COMMON[:40], "mean")
    stage.until(lambda: stage.engine.memory.rows.computed.max() > 8)
    stage.engine.turns.abort("s")
    stage.play()
    assert vector(turn) == b""


def test_new_weights_begin_an_average_anew() -> None:
    stage = Stage(token_budget=8)
    stage.open("s")
    turn = ask(stage, "s", COMMON[:40], "mean")
    stage.until(lambda: stage.engine.memory.rows.computed.max() > 8)
    stage.engine.occupation.update(stage.executor.load("other"))
    assert turn.pool is not None
    assert (turn.pool.next, turn.pool.complete) == (0, False)
    stage.play()
    assert len(vector(turn)) == 16
    assert vector(turn) != expected((), COMMON[:40], "mean")


def test_turns_without_input_of_their_own_have_no_vector() -> None:
    stage = Stage()
    stage.open("s")
    stage.say("s", [1, 2, 3], 2)
    stage.play()
    with pytest.raises(InvalidRequest, match="pooling is not available for regenerate"):
        stage.engine.turns.regenerate("s", TurnParams(pooling="last"))
    with pytest.raises(InvalidRequest, match="the input is empty"):
        ask(stage, "s", [], "last")
    stage.engine.turns.draft("s", [5])
    with pytest.raises(InvalidRequest, match="pooling is not available for a turn that was a draft"):
        ask(stage, "s", [5], "last")
    with pytest.raises(InvalidRequest, match="pooling with max_new_tokens 0"):
        TurnParams(max_new_tokens=0, pooling="last")
    with pytest.raises(InvalidRequest, match="pooling is 'cls'; allowed: last or mean or first"):
        TurnParams(pooling="cls")  # type: ignore[arg-type]
