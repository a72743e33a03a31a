"""A paused engine takes no steps, and continues as if the pause had not happened."""

from __future__ import annotations

import pytest

from tenuto.base.turns import TurnState
from tests.engine.stage import Stage, continuation, count_from, every_mix, every_overlap


@every_mix
@every_overlap
@pytest.mark.parametrize("release", [False, True], ids=["in place", "released"])
def test_turns_wait_while_the_engine_is_paused_and_generate_the_same_output(mix, overlap: int, release: bool) -> None:
    stage = Stage(mix, overlap=overlap)
    stage.open()
    stage.open("later")
    turn = stage.say("s", count_from(1, 20), 12)
    stage.until(lambda: len(turn.output) >= 4)
    stage.engine.occupation.pause(release=release)
    later = stage.say("later", count_from(2, 20), 5)
    stage.step()  # the step that was in flight
    plans, said = len(stage.executor.plans), len(turn.output)
    for _ in range(5):
        assert not stage.step().worked
    assert (len(stage.executor.plans), len(turn.output), later.state) == (plans, said, TurnState.QUEUED)
    assert turn.state is (TurnState.PREEMPTED if release else TurnState.RUNNING)
    stage.engine.occupation.resume()
    stage.play()
    assert list(turn.output) == continuation(count_from(1, 20), 12)
    assert list(later.output) == continuation(count_from(2, 20), 5)


def test_sessions_can_be_changed_and_turns_aborted_during_a_pause() -> None:
    stage = Stage()
    session = stage.committed()
    history = list(session.history)
    turn = stage.say("s", [1, 2], 9)
    stage.until(lambda: turn.state is TurnState.RUNNING)
    stage.engine.occupation.pause()
    stage.engine.turns.abort("s")
    stage.engine.sessions.rewind("s", position=5)
    stage.engine.sessions.fork("s", child="f")
    assert list(session.history) == history[:5]
    stage.engine.occupation.resume()
    stage.play()
    assert stage.engine.idle
