"""The interface between clients and the transports that reach an engine."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from tenuto.base.errors import EngineStopped, IllegalTransition, NotFound, TenutoError
from tenuto.base.tools.answers import Reading
from tenuto.base.tools.tool_use import ToolUse
from tenuto.base.turns import Delta, Keep, TurnResult
from tenuto.base.views import Compacted
from tenuto.base.wire.messages import StartTurn
from tenuto.base.wire.request import Request
from tenuto.client.futures import Steps, chained

T = TypeVar("T")

Event = Delta | TenutoError
Deliver = Callable[[Event], None]
"""Passes an event from the transport's thread to the reader. An event is a delta, the last of which has the turn's
result, or the error that ends the turn. The function must not block. If it raises, the transport stops reading the
turn."""


Options = Mapping[str, object]
"""A turn's options by name, as given by the caller."""


class Transport(Protocol):
    """A way to reach an engine. Methods may be called from any thread, and from finalizers at any moment; only `close`
    blocks. Requests leave the tenant empty: the other side fills it in."""

    @property
    def options(self) -> frozenset[str]:
        """Names of a turn's supported options in addition to those of `TurnOptions`."""

    def call(self, request: Request[T]) -> Future[T]:
        """Sends a request. The future gets the engine's answer or error. Raises `EngineStopped` if the transport is
        closed."""

    def start(self, request: StartTurn, options: Options, use: ToolUse | None, deliver: Deliver) -> RunningTurn:
        """Starts a turn; with `use`, its answer is parsed for reasoning and tool calls. `request` has defaults for all
        options; a server applies its own to those missing in `options`. Raises `EngineStopped` if the transport is
        closed, and `InvalidRequest`."""

    def compact(self, session: str, first: int, last: int | None, options: Options) -> Future[Compacted]:
        """Replaces turns by a summary; see `Session.compact`. Raises `InvalidRequest`, and `EngineStopped` if the
        transport is closed."""

    def request_stop(self) -> None:
        """Stops without waiting."""

    def close(self) -> None:
        """Stops and waits for the end. Calls and turns in progress end with `EngineStopped`."""


class RunningTurn(ABC):
    """A turn in progress. The transport that started it calls `accept`, `take` and `fail`, one at a time, to report
    progress."""

    def __init__(self, deliver: Deliver) -> None:
        self.turn_id: str | None = None  # its id on a server
        self.reading: Reading | None = None  # how its answer is parsed, if at all; set before any text comes
        self.started = _pending(Future[None]())  # done when the engine accepts or refuses it
        self.ended = _pending(Future[TurnResult]())
        self.time_to_first_token: float | None = None  # seconds
        self._deliver = deliver
        self._asked = time.perf_counter()

    def accept(self) -> None:
        """Records that the engine has accepted the turn."""
        if not self.started.done():
            self.started.set_result(None)

    def take(self, delta: Delta) -> None:
        """Delivers a delta; one with a result ends the turn."""
        if self.time_to_first_token is None and delta.tokens:
            self.time_to_first_token = time.perf_counter() - self._asked
        if delta.result is not None:
            self.ended.set_result(delta.result)
        self._tell(delta)

    def fail(self, error: TenutoError) -> None:
        """Records that the turn was refused or has ended with an error."""
        if not self.started.done():
            self.started.set_exception(error)
        self.ended.set_exception(error)
        self._tell(error)

    def called(self, version: int, names: Sequence[str]) -> None:  # noqa: B027 - a server knows without being told
        """Records that the turn, which committed as `version` of its session, has called tools of these names."""

    def _tell(self, event: Event) -> None:
        try:
            self._deliver(event)
        except Exception:  # noqa: BLE001 - any failure means the reader is gone
            self.disconnect()

    def abort(self, keep: Keep) -> Future[TurnResult]:
        """Ends the turn unless it has ended. The future gets the turn's result, or the error that ended it."""

        def steps() -> Steps[TurnResult]:
            yield self.started
            with suppress(IllegalTransition, NotFound, EngineStopped):  # the turn has ended already
                yield self._end(keep)
            result: TurnResult = yield self.ended
            return result

        return chained(steps())

    @abstractmethod
    def _end(self, keep: Keep) -> Future[Any]:
        """Requests the end of the turn, which has started. May raise the errors that `abort` suppresses."""

    @abstractmethod
    def disconnect(self) -> None:
        """Stops reading. An open turn is rolled back, unless it may continue without a reader. Does not wait."""


def _pending(future: Future[T]) -> Future[T]:
    """Marks a future as running, so that waiting callers cannot cancel it."""
    future.set_running_or_notify_cancel()
    return future
