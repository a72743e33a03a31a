"""Turns that find everything they need in memory when they start."""

from __future__ import annotations

from tenuto.base.turns import EndReason
from tests.engine.stage import FULL, STATE, Stage
from tests.present import present
from tests.tiered import parking_in


def test_a_turn_whose_session_is_restored_without_a_copy_releases_its_units():
    stage = Stage((FULL, STATE), host_tier=10**6, units=60)
    session = stage.committed("s")
    stage.engine.sessions.fork("s", child="fork")
    stage.engine.pressure.drop(session)
    assert parking_in(stage.engine).position(session)
    turn = stage.append("s", [])
    stage.play()
    assert present(turn.result).reason is EndReason.APPENDED
    assert session.memory.computed == len(session.history) - 1
    stage.engine.sessions.close("s")
    stage.engine.sessions.close("fork")
    stage.step()
    assert [pool.free for pool in stage.engine.memory.pools] == [60, 60]
