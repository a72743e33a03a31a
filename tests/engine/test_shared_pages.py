"""A page that sequences share has free slots that at most one of them may fill, whatever is cut back onto it."""

from __future__ import annotations

import pytest

from tenuto.base.options import TurnParams
from tenuto.session.session import Turn
from tests.engine.stage import FULL, SLIDING, STATE, Stage, continuation, count_from

sliding_mixes = pytest.mark.parametrize(
    "mix",
    [(SLIDING,), (FULL, SLIDING), (SLIDING, STATE), (FULL, SLIDING, STATE)],
    ids=lambda mix: "+".join(k.value for k in mix),
)


def say_right(stage: Stage, session_id: str, tokens: list[int], output: int) -> None:
    """A turn that says what follows from its session's history."""
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
    stage.engine.fork("parent", child="child")
    stage.append("child", [7])  # copies the page: the copy's tail is the child's
    stage.play()
    stage.engine.rewind("child", position=position)
    say_right(stage, "child", [100, 101], 2)
    say_right(stage, "parent", [5], 4)
    say_right(stage, "child", [3], 2)


@sliding_mixes
def test_a_sample_that_is_regenerated_and_stopped_at_once_does_not_write_the_prompts_page(mix) -> None:
    stage = Stage(mix, page_size=16)
    stage.open("prompt")
    stage.append("prompt", count_from(1, 10))
    stage.play()
    stage.engine.fork("prompt", child="sample")
    say_right(stage, "sample", [], 4)
    stage.engine.regenerate("sample", TurnParams(max_new_tokens=4))
    stage.step()
    stage.engine.abort("sample", 0)
    stage.play()
    say_right(stage, "sample", [3], 2)
    say_right(stage, "prompt", [5], 2)
    say_right(stage, "sample", [6], 2)
    say_right(stage, "prompt", [6], 2)
