"""Answers of a replica about sessions that it has just claimed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tenuto.base.fleet_views import Place
from tenuto.base.wire.fleet_messages import Locate
from tenuto.base.wire.messages import StartTurn
from tests.eventually import eventually
from tests.sim.fleet_replicas import LEASE, asked_turn
from tests.sim.fleets import World

ASKED = Locate(tenant="", session="a")


def test_nobody_is_told_that_a_claimed_session_is_here_before_its_open_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated request would start the turn a second time."""
    world = World(0)
    world.calm = True
    owner, other, _ = world.replicas
    owner.engine.sessions.open("a")
    owner.start(asked_turn("a", 1, "key", resumable=True))
    owner.write()
    world.advance(2 * LEASE)
    other.tick()
    told: list[Place] = []
    require = other.member._lease.require

    def ask_again(deadline: float) -> None:
        """The session is in memory by now, and its claim is not answered yet."""
        require(deadline)
        if other.engine.registry.find("a") is not None and not told:
            monkeypatch.undo()
            other.member.take(ASKED, told.append, refuse)

    def refuse(error: BaseException) -> None:
        raise error

    monkeypatch.setattr(other.member._lease, "require", ask_again)
    other.member.take(ASKED, told.append, refuse)
    eventually(lambda: bool(other.readings.waiting))
    other.rest()  # which reads the session's state
    eventually(lambda: len(told) == 2)
    first: Any = told[0].begun
    assert msgspec.msgpack.decode(first, type=StartTurn).name == "1"
    other.member.take(ASKED, told.append, refuse)
    assert told[2] == Place(exists=True)
    world.close()
