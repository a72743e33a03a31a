"""Calls of an engine in this or another process, and the edge's link to it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple, TypeVar

import msgspec

from tenuto.base.errors import TenutoError
from tenuto.base.turns import Delta
from tenuto.base.views import Ticket
from tenuto.base.wire.replies import Answer, AnyReply, Refusal, Stopped, Updates, error_of
from tenuto.base.wire.request import Request, answer_of

T = TypeVar("T")

TurnNews = Ticket | Delta | TenutoError
Deliver = Callable[[TurnNews], None]
"""Receives a turn's events in order: the ticket, then deltas; the last has a result, or an error comes instead."""


class Waiting(NamedTuple):
    """A caller that waits for an answer of type `answer`. `future`: an asyncio or `concurrent.futures` future."""

    answer: type[Any]
    future: Any


class Calls:
    """Matches replies to calls, in any process and thread.

    Invariant: code that removes a call from `_waiting` or `_streams` notifies its caller.
    """

    def __init__(self) -> None:
        self.stopped: Stopped | None = None  # why the engine has stopped
        self._numbers = count(1)
        self._waiting: dict[int, Waiting] = {}
        self._streams: dict[int, Deliver] = {}

    def take(self, reply: AnyReply) -> None:
        """Handles a reply of the engine."""
        match reply:
            case Updates():
                streams = self._streams
                for call, delta in reply.updates:
                    deliver = streams.get(call) if delta.result is None else streams.pop(call, None)
                    if deliver is not None:
                        deliver(delta)
            case Answer():
                if (deliver := self._streams.get(reply.call)) is not None:
                    deliver(msgspec.msgpack.decode(reply.value, type=Ticket))
                self._resolve(reply.call, reply.value)
            case Refusal():
                error = error_of(reply)
                if not self._resolve(reply.call, error):
                    self._fail(reply.call, error)
            case Stopped():
                self.stop(reply)

    def stop(self, stopped: Stopped) -> None:
        """Ends all waiting calls, since the engine has stopped. Only the first reason counts."""
        if self.stopped is not None:
            return
        self.stopped = stopped
        for number in list(self._waiting):
            self._resolve(number, stopped.interrupted())
        for number in list(self._streams):
            self._fail(number, stopped.interrupted())

    def _resolve(self, number: int, outcome: msgspec.Raw | TenutoError) -> bool:
        waiting = self._waiting.pop(number, None)
        if waiting is None or waiting.future.done():
            return False
        with suppress(InvalidStateError):  # it is being cancelled in another thread
            if isinstance(outcome, TenutoError):
                waiting.future.set_exception(outcome)
            else:
                waiting.future.set_result(msgspec.msgpack.decode(outcome, type=waiting.answer))
        return True

    def _fail(self, number: int, error: TenutoError) -> None:
        deliver = self._streams.pop(number, None)
        if deliver is not None:
            deliver(error)


class Link(Calls, ABC):
    """The edge's connection to an engine. Belongs to one event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._ended = asyncio.Event()

    @abstractmethod
    def send(self, request: Request[Any]) -> None:
        """Sends a request to the engine. Its replies go to `take`."""

    @abstractmethod
    async def close(self) -> None:
        """Stops the engine and waits until it has stopped."""

    async def call(self, request: Request[T]) -> T:
        """Returns the answer. Raises the engine's refusal, or `EngineStopped`."""
        raw = await self._ask(request, next(self._numbers))
        answer: T = msgspec.msgpack.decode(raw, type=answer_of(type(request)))
        return answer

    async def start(self, request: Request[Ticket], deliver: Deliver) -> None:
        """Starts a turn, or continues one of another engine, and returns when `deliver` has received the ticket. Raises
        the engine's refusal. Must not be cancelled: the turn would start anyway."""
        number = next(self._numbers)
        self._streams[number] = deliver
        try:
            await self._ask(request, number)
        except TenutoError:
            self._streams.pop(number, None)
            raise

    async def ended(self) -> None:
        """Waits until the engine has stopped and all callers have been notified."""
        await self._ended.wait()

    def stop(self, stopped: Stopped) -> None:
        super().stop(stopped)
        self._ended.set()

    async def _ask(self, request: Request[Any], number: int) -> msgspec.Raw:
        if self.stopped is not None:
            raise self.stopped.error()
        future: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._waiting[number] = Waiting(msgspec.Raw, future)
        try:
            self.send(msgspec.structs.replace(request, call=number))
            return await future
        finally:
            self._waiting.pop(number, None)
            del future  # its error would keep this frame, and so the request, alive
