"""What one turn has said so far, as its one reader has seen it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from tenuto.base.errors import EngineStopped, TenutoError
from tenuto.base.turns import Delta, Keep, Transcript, TurnResult, done
from tenuto.engine.engine import Engine
from tenuto.engine.loop import EngineLoop
from tenuto.session.session import Turn

Event = Delta | TenutoError
Deliver = Callable[[Event], None]
"""Brings an event from the engine's thread to the reader's."""


class TurnReader(Transcript):
    """Starts a turn and adds up its events. How events travel and how to wait for them is its user's business."""

    def __init__(self, loop: EngineLoop, work: Callable[[Engine], Turn], deliver: Deliver) -> None:
        super().__init__()
        self.time_to_first_token: float | None = None  # seconds; written by the engine's thread
        self._loop = loop
        started = time.perf_counter()

        def stamped(event: Event) -> None:
            if self.time_to_first_token is None and isinstance(event, Delta) and event.tokens:
                self.time_to_first_token = time.perf_counter() - started
            deliver(event)

        self.started = loop.start(work, stamped)

    def abort(self, keep: Keep) -> Future[TurnResult]:
        """End the turn, keeping what `keep` says. Raises `InvalidRequest`, or `EngineStopped` if it can end no more."""
        kept = self.tokens_to_keep(keep)
        if self.result is not None:
            return done(self.result)
        self.begin_abort()
        try:
            return self._loop.abort(self.started, kept)
        except EngineStopped:  # and so its thread writes no more
            turn = self.started.result() if self.started.done() and self.started.exception() is None else None
            if turn is None or turn.result is None:
                raise
            return done(turn.result)

    def disconnect(self) -> None:
        """Nobody reads any more: if the turn has not ended, it is aborted."""
        never_began = self.started.done() and self.started.exception() is not None
        if self.result is None and self.failure is None and not never_began:
            with suppress(EngineStopped):
                self._loop.abort(self.started)
