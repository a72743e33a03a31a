"""Memory is released to the system for a while, weights are replaced, and sessions continue from their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tenuto.base.errors import IllegalTransition, InvalidRequest, MemoryReleased
from tenuto.base.plan import PARTS
from tenuto.base.turns import EndReason, TurnState
from tenuto.exec.witness_hashes import WitnessWeights, advance, history_hash, next_token
from tests.engine.stage import VOCABULARY, Stage, continuation, count_from, every_mix, every_overlap


def said_with(weights: WitnessWeights, history: Sequence[int], tokens: int) -> list[int]:
    """Returns the witness's output after `history` with other weights."""
    state, said = history_hash(history, weights.mark), list[int]()
    for _ in range(tokens):
        said.append(next_token(state, VOCABULARY))
        state = advance(state, said[-1], weights.mark)
    return said


def held(stage: Stage) -> int:
    """Returns the bytes of the witness's memory."""
    return sum(part.nbytes for group in stage.executor._slots for part in group)


@every_mix
@every_overlap
def test_memory_is_released_until_it_is_resumed_and_every_session_continues(mix, overlap: int) -> None:
    stage = Stage(mix, overlap=overlap, prefix_cache=True, max_running=2)
    idle, histories = stage.committed("idle"), {}
    stage.committed("closed")
    stage.engine.sessions.close("closed")
    for name in ("running", "drafting", "waiting"):
        stage.open(name)
    turn = stage.say("running", count_from(1, 20), 12)
    stage.engine.turns.draft("drafting", count_from(2, 20))
    stage.until(lambda: len(turn.output) >= 4)
    waiting = stage.say("waiting", count_from(3, 20), 5)
    stage.engine.occupation.pause()
    stage.engine.occupation.release(PARTS)
    assert held(stage) == 0
    stage.engine.occupation.release(["kv_cache"])  # releasing again changes nothing
    stage.engine.occupation.resume()
    for _ in range(3):
        assert not stage.step().worked
    stage.engine.audit()
    assert (turn.state, waiting.state) == (TurnState.PREEMPTED, TurnState.QUEUED)
    for refused in (lambda: stage.say("idle", [1]), lambda: stage.engine.turns.draft("idle", [1])):
        with pytest.raises(MemoryReleased, match="resumed"):
            refused()
    stage.engine.sessions.fork("idle", child="fork")
    stage.engine.sessions.rewind("fork", position=9)
    histories = {name: list(stage.engine.registry.get(name).history) for name in ("idle", "fork")}
    weights = stage.executor.load(None)
    with pytest.raises(IllegalTransition):
        stage.engine.occupation.restore(["weights"])
    stage.engine.occupation.restore(["weights"], weights)
    assert not stage.step().worked
    stage.engine.occupation.restore(["kv_cache"])
    stage.play()
    assert list(turn.output) == continuation(count_from(1, 20), 12)
    assert list(waiting.output) == continuation(count_from(3, 20), 5)
    for name, history in histories.items():
        again = stage.say(name, [7], 4)
        stage.play()
        assert list(again.output) == continuation([*history, 7], 4)
    assert list(idle.history[: len(histories["idle"])]) == histories["idle"]


def test_memory_is_released_only_while_nothing_runs() -> None:
    stage = Stage()
    stage.open()
    turn = stage.say("s", count_from(1, 20), 12)
    stage.until(lambda: len(turn.output) >= 2)
    with pytest.raises(IllegalTransition, match="paused"):
        stage.engine.occupation.release(["kv_cache"])
    with pytest.raises(InvalidRequest, match="allowed: kv_cache and weights"):
        stage.engine.occupation.restore(["cuda_graph"])  # type: ignore[list-item]
    stage.play()
    stage.engine.occupation.release(["kv_cache"])
    assert held(stage) == 0
    stage.engine.occupation.restore(["kv_cache", "weights"])
    assert held(stage) > 0


@every_mix
@every_overlap
@pytest.mark.parametrize("tiers", [{}, {"host_tier": 2**20}], ids=["alone", "with a tier"])
def test_state_computed_with_other_weights_is_never_reused(mix, overlap: int, tiers: dict[str, Any]) -> None:
    stage = Stage(mix, overlap=overlap, prefix_cache=True, **tiers)
    history = list(stage.committed("idle").history)
    stage.committed("parked")
    stage.engine.pressure.drop(stage.engine.registry.get("parked"))
    stage.committed("closed")
    stage.engine.sessions.close("closed")
    stage.open("running")
    turn = stage.say("running", count_from(1, 20), 12)
    stage.until(lambda: len(turn.output) >= 4)
    weights = stage.executor.load("other")
    stage.engine.occupation.update(weights)
    before = list(turn.output)
    stage.play()
    assert list(turn.output) == before + said_with(weights, [*count_from(1, 20), *before], 12 - len(before))
    alike = stage.open("alike")
    for name, tokens in (("idle", history), ("parked", list(stage.engine.registry.get("parked").history))):
        again = stage.say(name, [7], 4)
        stage.play()
        assert list(again.output) == said_with(weights, [*tokens, 7], 4)
    fresh = stage.say(alike.id, [*count_from(6, 30), 7], 4)  # the prompt of the closed session
    stage.play()
    assert list(fresh.output) == said_with(weights, [*count_from(6, 30), 7], 4)


def test_turns_may_finish_before_weights_are_replaced() -> None:
    stage = Stage()
    history = list(stage.committed().history)
    turn = stage.say("s", [1, 2], 12)
    stage.until(lambda: len(turn.output) >= 4)
    stage.engine.turns.draft(stage.open("d").id, [1, 2])
    stage.engine.occupation.update(stage.executor.load("other"), abort=True)
    assert turn.result is not None
    assert turn.result.reason is EndReason.ABORT
    assert list(stage.engine.registry.get("s").history) == history
    stage.play()
    stage.engine.audit()


def test_parked_memory_is_restored_after_a_release() -> None:
    stage = Stage(host_tier=2**20)
    history = list(stage.committed().history)
    stage.engine.occupation.release(["kv_cache"])
    stage.engine.occupation.restore(["kv_cache"])
    assert stage.cost(lambda: stage.say("s", [7], 1)) == 2
    assert list(stage.engine.registry.get("s").history[-1:]) == continuation([*history, 7], 1)


def test_between_rollouts_memory_is_released_weights_are_replaced_and_turns_wait() -> None:
    stage = Stage()
    history = list(stage.committed().history)
    turn = stage.say("s", [7], 9)
    stage.until(lambda: len(turn.output) >= 3)
    stage.engine.occupation.pause()
    stage.engine.occupation.release(PARTS)
    stage.engine.occupation.restore(["weights"], stage.executor.load(None))
    weights = stage.executor.load("trained")
    stage.engine.occupation.update(weights)
    before = list(turn.output)
    stage.engine.occupation.restore(["kv_cache"])
    assert not stage.step().worked
    stage.engine.occupation.resume()
    stage.play()
    assert list(turn.output) == before + said_with(weights, [*history, 7, *before], 9 - len(before))


def test_parked_memory_is_not_used_if_other_weights_are_resumed() -> None:
    stage = Stage(host_tier=2**20)
    history = list(stage.committed().history)
    stage.engine.occupation.release(PARTS)
    weights = stage.executor.load("written in their place")
    stage.engine.occupation.restore(PARTS, weights, "another")
    turn = stage.say("s", [7], 4)
    stage.play()
    assert turn.result is not None
    assert turn.result.usage.cached == 0
    assert list(turn.output) == said_with(weights, [*history, 7], 4)


def test_weights_cannot_be_replaced_while_released() -> None:
    stage = Stage()
    stage.engine.occupation.release(["weights"])
    with pytest.raises(IllegalTransition, match="resume"):
        stage.engine.occupation.update(stage.executor.load("other"))
