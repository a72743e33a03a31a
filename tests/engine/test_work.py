"""Work per step grows with running turns and new tokens, not with what is parked nor with how long histories are."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.stage import FULL, SLIDING, STATE, Stage, count_from, every_overlap

Work = tuple[int, int, int]
MIXES = pytest.mark.parametrize("mix", [(FULL,), (FULL, SLIDING), (FULL, STATE)], ids=["full", "sliding", "state"])


def work_of_a_decode(stage: Stage) -> list[Work]:
    """Counted work of each of sixteen decode steps of four running turns."""
    turns = [stage.say(f"r{i}", [1], 60) for i in range(4)]
    stage.until(lambda: all(len(turn.output) > 6 for turn in turns))
    done = []
    for _ in range(16):
        before = stage.engine.counted_work
        stage.engine.step()
        (a, b, c), (d, e, f) = before, stage.engine.counted_work
        done.append((d - a, e - b, f - c))
    return done


def stage_with(mix, parked: int, history: int, overlap: int) -> Stage:
    config: dict[str, Any] = {"context_length": 2000, "token_budget": 1024, "checkpoint_interval": 4096}
    stage = Stage(mix, units=8000, recount=False, overlap=overlap, **config)
    for i in range(parked):
        stage.open(f"p{i}")
        stage.say(f"p{i}", count_from(i, 5), 1)
    stage.play()
    for i in range(4):
        stage.told(f"r{i}", tokens=history, output=1)
    return stage


@MIXES
@every_overlap
def test_a_step_does_the_same_beside_ten_and_beside_a_thousand_parked_sessions(mix, overlap: int) -> None:
    few, many = (work_of_a_decode(stage_with(mix, parked, 41, overlap)) for parked in (10, 1000))
    assert few == many


@MIXES
@every_overlap
def test_a_step_does_the_same_after_a_short_and_after_a_long_history(mix, overlap: int) -> None:
    short, long = (work_of_a_decode(stage_with(mix, 3, history, overlap)) for history in (41, 1641))
    assert short == long


def test_a_decode_touches_only_the_pages_it_fills() -> None:
    touched = sum(units for units, _, _ in work_of_a_decode(stage_with((FULL,), 3, 41, overlap=0)))
    assert touched == 4 * 16 // 4  # four turns, sixteen tokens each, four tokens a page


@every_overlap
def test_parked_sessions_cost_an_idle_engine_nothing(overlap: int) -> None:
    stage = stage_with((FULL,), 100, 41, overlap)
    before = stage.engine.counted_work
    for _ in range(10):
        stage.engine.step()
    assert stage.engine.counted_work == before


@pytest.mark.parametrize("history", [41, 1641])
def test_a_turn_that_ends_counts_its_own_pages_not_its_history(history: int) -> None:
    stage = stage_with((FULL,), 3, history, overlap=0)
    before = stage.engine.memory.touched
    stage.say("r0", count_from(1, 8), 1)
    stage.play()
    assert stage.engine.memory.touched - before == 2
