"""What the client asks of a way to an engine, wherever that runs."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from tenuto.base.errors import EngineStopped, IllegalTransition, NotFound, TenutoError
from tenuto.base.messages import Request, StartTurn
from tenuto.base.turns import Delta, Keep, TurnResult
from tenuto.client.futures import Steps, chained

T = TypeVar("T")

Event = Delta | TenutoError
Deliver = Callable[[Event], None]
"""Brings an event from the transport's thread to the reader's: a delta, of which the last has the turn's result, or the
error that the turn ends with. It must not block. If it raises, nobody reads any more."""


Options = Mapping[str, object]
"""Options of a turn by name, as the caller gave them."""


class Transport(Protocol):
    """A way to an engine. Any thread may call its methods, and a finalizer in the middle of anything; none waits but
    `close`. Requests have no tenant: that is the transport's business."""

    @property
    def options(self) -> frozenset[str]:
        """Options of a turn that it takes besides those of `TurnOptions`."""
        ...

    def call(self, request: Request[T]) -> Future[T]:
        """Ask the engine. The future has its answer or what it refuses with. Raises `EngineStopped` if this is
        closed."""
        ...

    def start(self, request: StartTurn, options: Options, deliver: Deliver) -> RunningTurn:
        """Start a turn. Of `options`, what is not given is as a server has it. Raises `EngineStopped` if this is
        closed."""
        ...

    def request_stop(self) -> None:
        """Stop, and do not wait for that."""
        ...

    def close(self) -> None:
        """Stop and wait for that: what is under way ends with `EngineStopped`."""
        ...


class RunningTurn(ABC):
    """A turn that a transport was asked to start. The transport says how it goes by `accept`, `take` and `fail`, one
    at a time."""

    def __init__(self, deliver: Deliver) -> None:
        self.turn_id: str | None = None  # what a server calls it
        self.started = _pending(Future[None]())  # when the engine has accepted it; or its refusal
        self.ended = _pending(Future[TurnResult]())
        self.time_to_first_token: float | None = None  # seconds
        self._deliver = deliver
        self._asked = time.perf_counter()

    def accept(self) -> None:
        """The engine has it."""
        if not self.started.done():
            self.started.set_result(None)

    def take(self, delta: Delta) -> None:
        """It has gone on; with a result, it has ended."""
        if self.time_to_first_token is None and delta.tokens:
            self.time_to_first_token = time.perf_counter() - self._asked
        if delta.result is not None:
            self.ended.set_result(delta.result)
        self._tell(delta)

    def fail(self, error: TenutoError) -> None:
        """It was refused, or nothing more comes of it."""
        if not self.started.done():
            self.started.set_exception(error)
        self.ended.set_exception(error)
        self._tell(error)

    def _tell(self, event: Event) -> None:
        try:
            self._deliver(event)
        except Exception:  # noqa: BLE001 - however it fails, nobody reads any more
            self.disconnect()

    def abort(self, keep: Keep) -> Future[TurnResult]:
        """End it, if it has not ended. The future has its result, or the error that it ended with."""

        def steps() -> Steps[TurnResult]:
            yield self.started
            with suppress(IllegalTransition, NotFound, EngineStopped):  # then it has ended, and how is known
                yield self._end(keep)
            result: TurnResult = yield self.ended
            return result

        return chained(steps())

    @abstractmethod
    def _end(self, keep: Keep) -> Future[Any]:
        """Ask that the turn, which has started, be ended. May raise what `suppress` above names."""

    @abstractmethod
    def disconnect(self) -> None:
        """Nobody reads any more: unless it has ended, or is to continue without, it is rolled back. Does not wait."""


def _pending(future: Future[T]) -> Future[T]:
    """One that those who wait for it cannot cancel."""
    future.set_running_or_notify_cancel()
    return future
