"""Turns on an engine's loop, started and ended as a server does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from tenuto.base.errors import TenutoError
from tenuto.base.turns import Keep, TurnResult
from tenuto.engine.engine import Engine
from tenuto.engine.thread.loop import EngineLoop, Subscriber
from tenuto.session.turn import Turn


def start(loop: EngineLoop, work: Callable[[Engine], Turn], subscriber: Subscriber) -> Future[Turn]:
    """Calls `work` to open a turn; `subscriber` gets its events, or the error that kept it from starting."""

    def start_turn(engine: Engine) -> Turn:
        turn = work(engine)
        loop.subscribe(turn, subscriber)
        return turn

    def tell_error(done: Future[Turn]) -> None:
        if isinstance(error := done.exception(), TenutoError):
            subscriber(error)

    return loop.execute(start_turn, tell_error)


def abort(loop: EngineLoop, started: Future[Turn], keep: Keep = None) -> Future[TurnResult | None]:
    """Aborts a turn that has started; a turn that has ended keeps its result."""
    turn = started.result(60)

    def abort_turn(engine: Engine) -> TurnResult | None:
        if not turn.state.ended:
            engine.turns.abort(turn.session.id, keep)
        return turn.result

    return loop.execute(abort_turn, ends=True)
