"""What one turn has said so far, as its one reader has seen it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Literal

from tenuto.base.checks import whole
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
        self.result: TurnResult | None = None
        self.time_to_first_token: float | None = None  # seconds; written by the engine's thread
        self._pieces: list[str] = []  # of text
        self._held: list[TurnEvent] = []  # read after the abort; the result says what of them is kept
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
    def text(self) -> str:
        return "".join(self._pieces)

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
        if self._aborting:
            self._held.append(event)
            event = self._kept(event.result)
        self.token_ids.extend(event.tokens)
        if event.text:
            self._pieces.append(event.text)
        self._delivered = event.delivered
        self.result = event.result
        return event

    def _kept(self, result: TurnResult | None) -> TurnEvent:
        """What an aborted turn has said since the abort, as far as it is kept: nothing until its end."""
        tokens: list[int] = []
        pieces: list[str] = []
        delivered = self._delivered
        if result is None or not result.committed or result.kept < len(self.token_ids):
            return TurnEvent((), "", delivered, result)
        room = result.kept - len(self.token_ids)
        for event in self._held:
            tokens += event.tokens[: max(0, room - len(tokens))]
            if event.delivered <= result.kept:  # else it is partly the text of tokens that are not kept
                pieces.append(event.text)
                delivered = event.delivered
        return TurnEvent(tuple(tokens), "".join(pieces), delivered, result)

    def abort(self, keep: Keep) -> Future[TurnResult]:
        """End the turn, keeping what `keep` says. Raises `InvalidRequest`, or `EngineStopped` if it can end no more."""
        if isinstance(keep, str):
            if keep != "delivered":
                raise InvalidRequest(f"keep is {keep!r}; allowed: none, a number of output tokens, or 'delivered'")
            keep = self._delivered
        elif keep is not None:
            keep = whole("keep", keep, 0, 2**40)
        if self.result is not None:
            return _done(self.result)
        self._aborting = True
        try:
            return self._loop.abort(self.started, keep)
        except EngineStopped:  # and so its thread writes no more
            turn = self.started.result() if self.started.done() and self.started.exception() is None else None
            if turn is None or turn.result is None:
                raise
            return _done(turn.result)

    def disconnect(self) -> None:
        """Nobody reads any more: if the turn has not ended, it is aborted."""
        never_began = self.started.done() and self.started.exception() is not None
        if self.result is None and self._failure is None and not never_began:
            with suppress(EngineStopped):
                self._loop.abort(self.started)


def _done(result: TurnResult) -> Future[TurnResult]:
    future: Future[TurnResult] = Future()
    future.set_result(result)
    return future
