"""What one turn has said so far, as its one reader has seen it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Literal

from tenuto.base.errors import EngineStopped, InvalidRequest, TenutoError
from tenuto.engine.engine import Engine
from tenuto.engine.loop import EngineLoop, TurnEvent
from tenuto.session.turn import Turn, TurnResult

Event = TurnEvent | TenutoError
Deliver = Callable[[Event], None]
"""Brings an event from the engine's thread to the reader's."""
Keep = int | Literal["delivered"] | None
"""What of an aborted turn is committed: nothing; its input and so many output tokens; its input and what was read."""


class TurnReader:
    """Starts a turn and adds up its events. How events travel and how to wait for them is its user's business."""

    def __init__(self, loop: EngineLoop, work: Callable[[Engine], Turn], deliver: Deliver) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.result: TurnResult | None = None
        self.time_to_first_token: float | None = None  # seconds; written by the engine's thread
        self._delivered = 0
        self._aborting = False
        self._failure: TenutoError | None = None
        self._loop = loop
        started = time.perf_counter()

        def stamped(event: Event) -> None:
            if self.time_to_first_token is None and isinstance(event, TurnEvent) and event.tokens:
                self.time_to_first_token = time.perf_counter() - started
            deliver(event)

        self.started = loop.start(work, stamped)

    @property
    def ended(self) -> bool:
        """Whether no event is to be waited for. Raises the error that ended it, if one did."""
        if self._failure is not None:
            raise self._failure
        return self.result is not None

    def take(self, event: Event) -> TurnEvent:
        """The reader has got `event`. Raises it if it is an error."""
        if isinstance(event, TenutoError):
            self._failure = event
            raise event
        if self._aborting:  # what was said after the abort is not part of anything
            event = TurnEvent((), "", self._delivered, event.result)
        self.token_ids.extend(event.tokens)
        self.text += event.text
        self._delivered = event.delivered
        self.result = event.result
        return event

    def abort(self, keep: Keep) -> Future[TurnResult]:
        """End the turn, keeping what `keep` says."""
        if isinstance(keep, str):
            if keep != "delivered":
                raise InvalidRequest(f"keep is {keep!r}; allowed: none, a number of output tokens, or 'delivered'")
            keep = self._delivered
        elif keep is not None and keep < 0:
            raise InvalidRequest(f"keep is {keep}; allowed: none, a number of output tokens, or 'delivered'")
        if self.result is not None:
            ended: Future[TurnResult] = Future()
            ended.set_result(self.result)
            return ended
        self._aborting = True
        return self._loop.abort(self.started, keep)

    def disconnect(self) -> None:
        """Nobody reads any more: if the turn has not ended, it is aborted."""
        never_began = self.started.done() and self.started.exception() is not None
        if self.result is None and self._failure is None and not never_began:
            with suppress(EngineStopped):
                self._loop.abort(self.started)
