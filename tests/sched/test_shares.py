"""Tenants share rows and tokens by weight; others use what one leaves, and pausing loses nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tenuto.base.turns import TurnState
from tenuto.base.views import Transition
from tenuto.session.turn import Turn
from tests.engine.stage import Stage, continuation, count_from, every_mix, every_overlap
from tests.present import present


def submit(stage: Stage, tenant: str, turns: int, tokens: int = 4, output: int = 60, **params: Any) -> list[Turn]:
    """Submits this many turns of a tenant, each on its own session."""
    said = []
    for _ in range(turns):
        name = f"{tenant}{len(stage.engine.registry)}"
        stage.open(name, tenant=tenant)
        said.append(stage.say(name, count_from(len(stage.engine.registry), tokens), output, tenant=tenant, **params))
    return said


def rows(stage: Stage) -> Counter[str]:
    return Counter(turn.session.policy.tenant for turn in stage.engine.batch.running())


def test_rows_are_divided_between_tenants_by_weight() -> None:
    stage = Stage(max_running=8, tenant_weights=(("b", 3.0),))
    submit(stage, "a", 10)
    submit(stage, "b", 10)
    stage.step()
    stage.step()
    assert rows(stage) == {"a": 2, "b": 6}


def test_a_later_tenant_gets_its_share_at_once_and_the_others_keep_theirs() -> None:
    stage = Stage(max_running=8)
    submit(stage, "greedy", 20)
    stage.step()
    assert rows(stage) == {"greedy": 8}
    submit(stage, "late", 10)
    stage.step()
    assert rows(stage) == {"greedy": 4, "late": 4}


@every_mix
@every_overlap
def test_the_first_turn_of_a_tenant_starts_at_once_beside_a_greedy_one(mix, overlap: int) -> None:
    stage = Stage(mix, overlap=overlap)
    greedy = submit(stage, "greedy", 30, priority=100)
    for _ in range(5):
        stage.step()
    (turn,) = submit(stage, "modest", 1, output=3)
    stage.step()
    assert turn.state is TurnState.RUNNING
    stage.until(lambda: turn.result, most=3 + overlap)
    assert not any(other.result for other in greedy)


@every_mix
@every_overlap
def test_a_turn_that_gave_its_row_to_another_tenant_recomputes_at_most_one_token(mix, overlap: int) -> None:
    stage = Stage(mix, overlap=overlap)
    greedy = submit(stage, "greedy", 4)
    stage.until(lambda: all(len(turn.output) > 3 for turn in greedy))
    submit(stage, "other", 6, output=5)
    stage.play()
    pauses = stage.engine.transitions[Transition("pause")]
    assert pauses > 0
    assert stage.engine.transitions[Transition("preempt")] == 0
    for turn in greedy:
        assert list(turn.output) == continuation(turn.tokens(0, turn.prompt_length), 60)
    needed = sum(turn.prompt_length + len(turn.output) - 1 for turn in greedy)
    assert sum(turn.computed_tokens for turn in greedy) <= needed + pauses
    assert stage.engine.counts.recomputed["paused"] <= pauses


def test_rows_left_by_one_tenant_go_to_the_others() -> None:
    stage = Stage(max_running=8, tenant_weights=(("idle", 100.0),))
    submit(stage, "busy", 20)
    submit(stage, "idle", 1, output=2)
    stage.step()
    assert rows(stage) == {"busy": 7, "idle": 1}
    for _ in range(4):
        stage.step()
    assert rows(stage) == {"busy": 8}


def test_prefill_tokens_are_divided_between_tenants_by_weight_without_a_rest() -> None:
    stage = Stage(max_running=8, token_budget=66, tenant_weights=(("b", 3.0),), units=800)
    submit(stage, "a", 5, tokens=190)
    (turn,) = submit(stage, "b", 1, tokens=190)
    stage.step()
    plan = stage.executor.plans[-1]
    counts = dict(zip(stage.engine.batch.turns[plan.rows].tolist(), plan.counts.tolist(), strict=True))
    assert sum(counts.values()) == 66
    assert counts[turn] == 1 + (66 - 6) * 3 // 4  # a token for each row, and three quarters of the rest


@pytest.mark.parametrize("tenants", [5, 9])
def test_with_more_tenants_than_rows_they_take_turns(tenants: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(max_running=3)
    turns = {f"t{i}": submit(stage, f"t{i}", 4, output=2) for i in range(tenants)}
    order: list[str] = []
    add = stage.engine.batch.add

    def adding(turn: Turn, slots) -> None:
        order.append(turn.session.policy.tenant)
        add(turn, slots)

    monkeypatch.setattr(stage.engine.batch, "add", adding)
    stage.play()
    assert len(order) == 4 * tenants
    assert all(present(turn.result).committed for some in turns.values() for turn in some)
    for end in range(1, len(order) + 1):
        starts = [Counter(order[:end])[tenant] for tenant in turns]
        assert max(starts) - min(starts) <= 1
