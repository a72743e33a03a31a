"""The link between the edge and an engine, wherever that runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any, Protocol, TypeVar

import msgspec

from tenuto.base.errors import EngineStopped, TenutoError
from tenuto.base.messages import Answer, AnyReply, Refusal, Request, StartTurn, Stopped, Updates, answer_of, error_of
from tenuto.base.turns import Delta
from tenuto.base.views import Ticket

T = TypeVar("T")

TurnNews = Ticket | Delta | TenutoError
Deliver = Callable[[TurnNews], None]
"""Receives a turn's events in order: the ticket, then deltas; the last has a result, or an error comes instead."""


class Link(Protocol):
    """The edge's way to an engine. Belongs to one event loop."""

    @property
    def stopped(self) -> str | None:
        """Why the engine has stopped; `None` while it runs."""
        ...

    async def call(self, request: Request[T]) -> T:
        """The answer. Raises the engine's refusal, or `EngineStopped`."""
        ...

    async def start(self, request: StartTurn, deliver: Deliver) -> None:
        """Start a turn; returns when `deliver` has been given the ticket. Raises the engine's refusal. Must not be
        cancelled: the turn would start anyway."""
        ...

    async def ended(self) -> None:
        """Wait until the engine has stopped and everyone waiting for it has been told."""
        ...

    async def close(self) -> None:
        """Stop the engine and wait until it has stopped."""
        ...


class Switchboard:
    """Matches replies to calls: the half of a link that is the same wherever the engine runs."""

    def __init__(self, send: Callable[[Request[Any]], None]) -> None:
        self.stopped: str | None = None
        self._ended = asyncio.Event()
        self._send = send
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._streams: dict[int, Deliver] = {}

    async def call(self, request: Request[T]) -> T:
        """See `Link.call`."""
        raw = await self._ask(request, next(self._numbers))
        answer: T = msgspec.msgpack.decode(raw, type=answer_of(type(request)))
        return answer

    async def start(self, request: StartTurn, deliver: Deliver) -> None:
        """See `Link.start`."""
        number = next(self._numbers)
        self._streams[number] = deliver
        try:
            await self._ask(request, number)
        except TenutoError:
            self._streams.pop(number, None)
            raise

    async def ended(self) -> None:
        """See `Link.ended`."""
        await self._ended.wait()

    async def _ask(self, request: Request[Any], number: int) -> msgspec.Raw:
        if self.stopped is not None:
            raise EngineStopped(self.stopped)
        future: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._send(msgspec.structs.replace(request, call=number))
            return await future
        finally:
            self._waiting.pop(number, None)
            del future  # its error would keep this frame, and so the request, alive

    def take(self, reply: AnyReply) -> None:
        """Handle a reply of the engine."""
        match reply:
            case Updates():
                for call, delta in reply.updates:
                    self._update(call, delta, ended=delta.result is not None)
            case Answer():
                if (deliver := self._streams.get(reply.call)) is not None:
                    deliver(msgspec.msgpack.decode(reply.value, type=Ticket))
                self._resolve(reply.call, reply.value)
            case Refusal():
                error = error_of(reply)
                if not self._resolve(reply.call, error):
                    self._update(reply.call, error, ended=True)
            case Stopped():
                self.stop(reply.reason)

    def stop(self, reason: str) -> None:
        """The engine has stopped: tell everyone who waits why. Only the first reason counts."""
        if self.stopped is not None:
            return
        self.stopped = reason
        for number in list(self._waiting):
            self._resolve(number, EngineStopped(reason))
        for number in list(self._streams):
            self._update(number, EngineStopped(reason), ended=True)
        self._ended.set()

    def _resolve(self, number: int, outcome: Any) -> bool:
        future = self._waiting.pop(number, None)
        if future is None or future.done():
            return False
        if isinstance(outcome, TenutoError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
        return True

    def _update(self, number: int, update: TurnNews, *, ended: bool) -> None:
        deliver = self._streams.pop(number, None) if ended else self._streams.get(number)
        if deliver is not None:
            deliver(update)
