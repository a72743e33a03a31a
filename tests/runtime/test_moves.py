"""The messages to the edge, in their order, while a session leaves for another replica."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, cast

import pytest

from tenuto.base.options import Policy, TurnParams
from tenuto.base.turns import Delta
from tenuto.base.wire.fleet_messages import EraseTraces
from tenuto.engine import erasure
from tenuto.engine.engine import Engine
from tenuto.engine.thread.loop import EngineLoop
from tenuto.runtime.moves import Moves
from tenuto.session.changes import Change
from tenuto.session.session import Session
from tenuto.session.turn import Turn
from tests.engine.thread import loops
from tests.engine.thread.test_loop import make_engine
from tests.eventually import eventually


class Journal:
    """Acknowledges nothing until `safe`."""

    def __init__(self) -> None:
        self.changes = 0
        self.safe = False

    def acknowledge(self, changes: Sequence[Change]) -> int:
        self.changes += len(changes)
        return self.changes if self.safe else 0

    def take_lost(self) -> Sequence[Session]:
        return ()


class Sending:
    """Sends output after each round, and gives an answer every chance to overtake it."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.answered = threading.Event()
        self._told: list[int] = []

    def tell(self, news: object) -> None:
        assert isinstance(news, Delta)
        self._told += news.tokens

    def flush(self) -> None:
        if self._told:
            self.answered.wait(0.5)
            self.sent += self._told
            self._told = []


def test_a_session_is_held_once_all_output_of_its_turn_was_sent() -> None:
    """Also if the turn may report nothing at first, since its session is not in the journal yet."""
    journal, sending, turns = Journal(), Sending(), list[Turn]()
    loop = EngineLoop(make_engine(), after_round=sending.flush, acknowledger=journal)
    moves = Moves(cast("Any", None), loop, lambda: "identity", lambda _: None, cast("Any", None))
    params = TurnParams(max_new_tokens=4000)

    def submit(engine: Engine) -> Turn:
        turns.append(engine.turns.submit("s", [1, 2, 3], params))
        return turns[0]

    loop.execute(lambda engine: engine.sessions.open("s", Policy()))
    loops.start(loop, submit, sending.tell)
    eventually(lambda: bool(turns) and loop.call(lambda _: len(turns[0].output)).result() > 3)
    loop.call(lambda engine: engine.departures.begin("move", "s")).result()
    output: list[int] = []
    sent: list[int] = []

    def hold() -> None:
        moves.hold("move")
        sent.extend(sending.sent)
        output.extend(turns[0].output)
        sending.answered.set()

    holding = threading.Thread(target=hold, daemon=True)
    holding.start()
    eventually(lambda: loop.call(lambda _: turns[0].session.held).result())
    journal.safe = True
    loop.wake()
    holding.join(60)
    loop.close()
    moves.close()
    assert output
    assert sent == output


def ignored(_: object) -> None:
    """Receives what nobody reads."""


def test_what_a_session_has_left_is_erased_in_parts_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(erasure, "SWEPT_BYTES", 1)
    engine, swept = make_engine(), list[int]()  # the steps before each part
    sweep = engine.erasure.sweep

    def noted(session_id: str, *, tenant: str) -> bool:
        swept.append(engine.steps)
        return sweep(session_id, tenant=tenant)

    monkeypatch.setattr(engine.erasure, "sweep", noted)
    loop = EngineLoop(engine)
    moves = Moves(cast("Any", None), loop, lambda: "identity", lambda _: None, cast("Any", None))
    loop.execute(lambda engine: engine.sessions.open("gone", Policy())).result()
    turn = loop.execute(lambda engine: engine.turns.submit("gone", range(1, 30), TurnParams(max_new_tokens=1))).result()
    eventually(lambda: turn.result is not None)
    loop.execute(lambda engine: engine.sessions.leave(engine.registry.get("gone"))).result()
    loop.execute(lambda engine: engine.sessions.open("s", Policy())).result()
    loops.start(loop, lambda engine: engine.turns.submit("s", [1, 2, 3], TurnParams(max_new_tokens=4000)), ignored)
    assert moves.erase_traces(EraseTraces(tenant="", session="gone")) == []
    assert len(set(swept)) == len(swept) > 1, swept  # running turns take some of its memory meanwhile
    loop.close()
    moves.close()
