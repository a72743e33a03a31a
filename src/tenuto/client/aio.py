"""The asynchronous face: the same operations as `client.sync`, to be awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Self, TypeVar, Unpack
from weakref import finalize

from tenuto.base.errors import EngineStopped
from tenuto.base.options import Policy, RemoteOptions
from tenuto.base.turns import Delta, Keep, TurnResult
from tenuto.base.views import AuditReport, SessionInfo
from tenuto.client.core import ServerCore, SessionCore
from tenuto.client.feed import Deliver, Event
from tenuto.client.reader import TurnReader
from tenuto.text.prompt import Input

T = TypeVar("T")


def connect_async(url: str, api_key: str | None = None) -> AsyncRemoteEngine:
    """See `connect`. There is nothing to await yet: `async with tenuto.connect_async(url) as engine`."""
    return AsyncRemoteEngine(url, api_key)


async def _answer(future: Future[T]) -> T:
    return await asyncio.wrap_future(future)


async def _opened(future: Future[SessionCore]) -> SessionCore:
    """A session that is being opened. If the caller is cancelled, it is closed as soon as it is there."""
    try:
        return await asyncio.shield(asyncio.wrap_future(future))
    except asyncio.CancelledError:
        future.add_done_callback(_close_orphan)
        raise


def _close_orphan(opened: Future[SessionCore]) -> None:
    if not opened.cancelled() and opened.exception() is None:
        with suppress(EngineStopped):
            opened.result().close(finish=False)


class AsyncRemoteEngine:
    """As `RemoteEngine`. Made by `tenuto.connect_async`."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._core = ServerCore(url, api_key)
        self._closer = finalize(self, self._core.connection.request_stop)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def context_length(self) -> int:
        """The most tokens a session's history may have."""
        return await _answer(self._core.context_length())

    async def session(
        self,
        session_id: str | None = None,
        *,
        system: str | None = None,
        ttl: float | None = None,
        priority: int = 0,
        max_tokens: int | None = None,
    ) -> AsyncRemoteSession:
        """See `RemoteEngine.session`."""
        policy = Policy(priority, ttl, max_tokens)
        return AsyncRemoteSession(self, await _opened(self._core.open(session_id, system, policy)))

    async def attach(self, session_id: str) -> AsyncRemoteSession:
        """See `RemoteEngine.attach`."""
        return AsyncRemoteSession(self, await _answer(self._core.attach(session_id)))

    def generate(self, input: Input, **options: Unpack[RemoteOptions]) -> AsyncRemoteTurnStream:  # noqa: A002 - as in `Engine`
        """See `RemoteEngine.generate`."""
        return AsyncRemoteTurnStream(self, lambda deliver: self._core.generate(input, options, deliver))

    async def sessions(self) -> list[SessionInfo]:
        """See `RemoteEngine.sessions`."""
        return await _answer(self._core.sessions())

    async def audit(self) -> AuditReport:
        """See `RemoteEngine.audit`."""
        return await _answer(self._core.audit())

    async def close(self) -> None:
        """See `RemoteEngine.close`."""
        self._closer.detach()
        await asyncio.to_thread(self._core.connection.close)


class AsyncRemoteSession:
    """As `RemoteSession`."""

    def __init__(self, engine: AsyncRemoteEngine, core: SessionCore) -> None:
        self._engine = engine
        self._core = core

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def id(self) -> str:
        return self._core.id

    async def info(self) -> SessionInfo:
        return await _answer(self._core.info())

    async def history(self) -> list[int]:
        """Its committed tokens."""
        return await _answer(self._core.history())

    def turn(self, input: Input = (), **options: Unpack[RemoteOptions]) -> AsyncRemoteTurnStream:  # noqa: A002 - as above
        """See `RemoteSession.turn`. It starts at once; an error of the server's is raised where the stream is first
        read."""
        return AsyncRemoteTurnStream(self._engine, lambda deliver: self._core.turn(input, options, deliver))

    def chat(self, text: str, **options: Unpack[RemoteOptions]) -> AsyncRemoteTurnStream:
        """A turn of one user message."""
        return self.turn([{"role": "user", "content": text}], **options)

    async def append(self, input: Input, **options: Unpack[RemoteOptions]) -> TurnResult:  # noqa: A002 - as above
        """See `RemoteSession.append`."""
        return await _answer(self._core.append(input, options))

    def regenerate(self, **options: Unpack[RemoteOptions]) -> AsyncRemoteTurnStream:
        """See `RemoteSession.regenerate`."""
        return AsyncRemoteTurnStream(self._engine, lambda deliver: self._core.regenerate(options, deliver))

    def follow(self, turn_id: str) -> AsyncRemoteTurnStream:
        """See `RemoteSession.follow`."""
        return AsyncRemoteTurnStream(self._engine, lambda deliver: self._core.follow(turn_id, deliver))

    async def draft(self, input: Input) -> None:  # noqa: A002 - as above
        """See `Session.draft`."""
        await _answer(self._core.draft(input))

    async def abort(self) -> None:
        """See `RemoteSession.abort`."""
        await _answer(self._core.abort())

    async def fork(
        self, turn: int | None = None, position: int | None = None, *, session_id: str | None = None
    ) -> AsyncRemoteSession:
        """See `Session.fork`."""
        return AsyncRemoteSession(self._engine, await _opened(self._core.fork(turn, position, session_id)))

    async def trim(self, turns: Sequence[int], *, session_id: str | None = None) -> AsyncRemoteSession:
        """See `RemoteSession.trim`."""
        return AsyncRemoteSession(self._engine, await _opened(self._core.trim(turns, session_id)))

    async def rewind(self, turn: int | None = None, position: int | None = None) -> SessionInfo:
        """See `RemoteSession.rewind`."""
        return await _answer(self._core.rewind(turn, position))

    async def close(self, *, finish: bool = False) -> None:
        """See `RemoteSession.close`."""
        await _answer(self._core.close(finish=finish))


class AsyncRemoteTurnStream:
    """As `RemoteTurnStream`. Cancelling a task that waits for it closes it."""

    def __init__(self, engine: AsyncRemoteEngine, start: Callable[[Deliver], TurnReader]) -> None:
        self._engine = engine  # stays open while a turn of it is read
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()
        self._events = events
        self._reader = start(lambda event: _post(loop, events, event))
        self._closer = finalize(self, self._reader.disconnect)
        self._closer.atexit = False  # the process's own end sees to that

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        while (event := await self._next()) is not None:
            if event.text:
                return event.text
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def tokens(self) -> AsyncIterator[int]:
        """Output token ids as they come, instead of text."""
        while (event := await self._next()) is not None:
            for token in event.tokens:
                yield token

    async def result(self) -> TurnResult:
        """Wait for the end."""
        while await self._next() is not None:
            pass
        result = self._reader.result
        assert result is not None
        return result

    @property
    def turn_id(self) -> str | None:
        """See `RemoteTurnStream.turn_id`; `None` until the server has accepted the turn."""
        return self._reader.turn_id

    @property
    def text(self) -> str:
        """All text read so far."""
        return self._reader.text

    @property
    def token_ids(self) -> list[int]:
        """All output token ids read so far."""
        return list(self._reader.token_ids)

    @property
    def time_to_first_token(self) -> float | None:
        """See `RemoteTurnStream.time_to_first_token`."""
        return self._reader.time_to_first_token

    async def abort(self, keep: Keep = None) -> TurnResult:
        """See `TurnStream.abort`."""
        return await asyncio.shield(
            asyncio.wrap_future(self._reader.abort(keep))
        )  # done also if the caller is cancelled

    def close(self) -> None:
        """See `RemoteTurnStream.close`."""
        self._closer()

    async def _next(self) -> Delta | None:
        if self._reader.ended:
            return None
        try:
            event = await self._events.get()
        except asyncio.CancelledError:
            self.close()
            raise
        return self._reader.take(event)


def _post(loop: asyncio.AbstractEventLoop, events: asyncio.Queue[Event], event: Event) -> None:
    loop.call_soon_threadsafe(events.put_nowait, event)
