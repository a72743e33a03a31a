"""The free slots of a shared page may be filled by at most one of its sequences, whatever is cut back onto it."""

from __future__ import annotations

import pytest

from tenuto.base.errors import InvariantError
from tenuto.base.options import TurnParams
from tenuto.session.turn import Turn
from tests.engine.stage import FULL, SLIDING, STATE, Stage, continuation, count_from

sliding_mixes = pytest.mark.parametrize(
    "mix",
    [(SLIDING,), (FULL, SLIDING), (SLIDING, STATE), (FULL, SLIDING, STATE)],
    ids=lambda mix: "+".join(k.value for k in mix),
)


def say_right(stage: Stage, session_id: str, tokens: list[int], output: int) -> None:
    """Runs a turn and checks that its output follows from its session's history."""
    turn = stage.say(session_id, tokens, output)
    stage.play()
    _is_right(turn)


def _is_right(turn: Turn) -> None:
    prompt = turn.session.history[: turn.prompt_length]
    assert list(turn.output) == continuation(prompt, len(turn.output))


@sliding_mixes
@pytest.mark.parametrize("position", [12, 15], ids=["inside the shared page", "where the fork was made"])
def test_a_fork_that_is_rewound_onto_the_page_of_its_parent_does_not_write_it(mix, position: int) -> None:
    stage = Stage(mix, page_size=16)
    stage.open("parent")
    say_right(stage, "parent", count_from(1, 10), 5)  # 15 tokens, all in one page
    stage.engine.sessions.fork("parent", child="child")
    stage.append("child", [7])  # copies the page: the copy's tail is the child's
    stage.play()
    stage.engine.sessions.rewind("child", position=position)
    say_right(stage, "child", [100, 101], 2)
    say_right(stage, "parent", [5], 4)
    say_right(stage, "child", [3], 2)


@sliding_mixes
def test_a_sample_that_is_regenerated_and_stopped_at_once_does_not_write_the_prompts_page(mix) -> None:
    stage = Stage(mix, page_size=16)
    stage.open("prompt")
    stage.append("prompt", count_from(1, 10))
    stage.play()
    stage.engine.sessions.fork("prompt", child="sample")
    say_right(stage, "sample", [], 4)
    stage.engine.turns.regenerate("sample", TurnParams(max_new_tokens=4))
    stage.step()
    stage.engine.turns.abort("sample", 0)
    stage.play()
    say_right(stage, "sample", [3], 2)
    say_right(stage, "prompt", [5], 2)
    say_right(stage, "sample", [6], 2)
    say_right(stage, "prompt", [6], 2)


paged_mixes = pytest.mark.parametrize(
    "mix",
    [(FULL,), (SLIDING,), (FULL, SLIDING), (FULL, SLIDING, STATE)],
    ids=lambda mix: "+".join(k.value for k in mix),
)


def begin_with_a_running_turn(stage: Stage, prompt: list[int], lost: bool) -> tuple[Turn, Turn]:
    """Submits a turn of session `first` with this prompt, and one of `second` that starts with the part the first has
    computed: within a page that the first owns. `lost`: the second session has the prompt as its history."""
    stage.open("second")
    if lost:
        stage.append("second", prompt)
        stage.play()
        stage.engine.sessions.drop()
    stage.open("first")
    first = stage.say("first", prompt, 2)
    stage.step()
    second = stage.say("second", [1] if lost else [*prompt[:-1], 7, 8, 9], 4)
    stage.step()
    assert second.looked == "running"
    assert second.session.memory.computed % stage.engine.memory.page_size
    return first, second


@paged_mixes
def test_rewinding_into_a_page_that_another_turn_started_with_does_not_write_it(mix) -> None:
    stage = Stage(mix, page_size=8, token_budget=24, prefix_cache=True)
    begin_with_a_running_turn(stage, count_from(1, 20), lost=True)
    stage.engine.turns.abort("second")  # before it has copied the page
    stage.play()
    stage.engine.sessions.rewind("first", position=18)
    say_right(stage, "first", [900, 901, 902, 903], 1)
    say_right(stage, "second", [1], 4)


@paged_mixes
def test_a_turn_that_lost_its_row_still_finds_its_source_after_the_other_rewinds(mix) -> None:
    stage = Stage(mix, page_size=8, token_budget=24, prefix_cache=True)
    first, second = begin_with_a_running_turn(stage, count_from(1, 20), lost=False)
    stage.engine.pressure.preempt(second)
    stage.engine.core.queue.remove(second)  # under pressure it waits until there is room again
    stage.until(lambda: first.state.ended)
    stage.engine.sessions.rewind("first", position=18)
    say_right(stage, "first", [900, 901, 902, 903], 1)
    stage.engine.core.queue.push(second)
    stage.play()
    _is_right(second)


@paged_mixes
def test_an_audit_reports_a_page_writable_below_another_readers_end(mix) -> None:
    stage = Stage(mix, page_size=8, token_budget=24, prefix_cache=True, recount=False)
    begin_with_a_running_turn(stage, count_from(1, 20), lost=True)
    stage.engine.turns.abort("second")
    stage.play()
    stage.engine.audit()
    pool = stage.engine.memory.pools[0]
    table = stage.engine.registry.get("first").memory.tables[0]
    pool.floors[table.tail] = 0  # type: ignore[attr-defined]
    with pytest.raises(InvariantError, match=r"may (still )?be written"):
        stage.engine.audit()


def test_a_session_rewound_below_the_part_its_fork_reads_copies_the_page() -> None:
    stage = Stage(units=60)
    session = stage.committed("s", 16, 4)
    stage.engine.sessions.fork("s", child="fork")
    stage.engine.sessions.rewind("s", position=19)  # in the last page, one slot below the fork's end
    history = list(session.history)
    turn = stage.say("s", [5, 6], 3)
    stage.play()
    assert list(turn.output) == continuation([*history, 5, 6], 3)
