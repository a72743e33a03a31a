"""The asynchronous face: the same operations as `api.sync`, to be awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Self, TypeVar, Unpack
from weakref import finalize

from tenuto.api.core import EngineCore, SessionCore
from tenuto.api.reader import Deliver, Event, TurnReader
from tenuto.base.config import EngineOptions
from tenuto.base.errors import EngineStopped
from tenuto.base.options import Policy, TurnOptions
from tenuto.base.turns import Delta, Keep, TurnResult
from tenuto.base.views import AuditReport, SessionInfo
from tenuto.text.prompt import Input
from tenuto.text.tokenizer import Tokenizer

T = TypeVar("T")


async def _answer(future: Future[T]) -> T:
    return await asyncio.wrap_future(future)


async def _opened(future: Future[SessionCore]) -> SessionCore:
    """A session that is being opened. If the caller is cancelled, it is closed as soon as it is there."""
    try:
        return await _answer(future)
    except asyncio.CancelledError:
        future.add_done_callback(_close_orphan)
        raise


def _close_orphan(opened: Future[SessionCore]) -> None:
    if not opened.cancelled() and opened.exception() is None:
        with suppress(EngineStopped):
            opened.result().close(finish=False)


class AsyncEngine:
    """As `tenuto.Engine`. Making one loads the model and blocks meanwhile; `asyncio.to_thread(AsyncEngine, ...)` does
    it in the background."""

    def __init__(
        self,
        model: str = "smollm2",
        *,
        device: str = "cpu",
        dtype: str | None = None,
        memory_bytes: int | None = None,
        page_size: int = 16,
        **config: Unpack[EngineOptions],
    ) -> None:
        self._core = EngineCore(model, device, dtype, memory_bytes, page_size, config)
        self._closer = finalize(self, self._core.loop.request_stop)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._core.tokenizer

    @property
    def context_length(self) -> int:
        """The most tokens a session's history may have."""
        return self._core.config.context_length

    async def session(
        self,
        session_id: str | None = None,
        *,
        system: str | None = None,
        ttl: float | None = None,
        priority: int = 0,
        max_tokens: int | None = None,
    ) -> AsyncSession:
        """See `Engine.session`."""
        policy = Policy(priority, ttl, max_tokens)
        return AsyncSession(self, await _opened(self._core.open(session_id, system, policy)))

    def generate(self, input: Input, **options: Unpack[TurnOptions]) -> AsyncTurnStream:  # noqa: A002 - the natural name
        """See `Engine.generate`."""
        return AsyncTurnStream(self, lambda deliver: self._core.generate(input, options, deliver))

    async def sessions(self) -> list[SessionInfo]:
        """All open sessions."""
        return await _answer(self._core.sessions())

    async def audit(self) -> AuditReport:
        """See `Engine.audit`."""
        return await _answer(self._core.audit())

    async def close(self) -> None:
        """See `Engine.close`."""
        self._closer.detach()
        await asyncio.to_thread(self._core.loop.close)


class AsyncSession:
    """As `tenuto.Session`."""

    def __init__(self, engine: AsyncEngine, core: SessionCore) -> None:
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

    def turn(self, input: Input = (), **options: Unpack[TurnOptions]) -> AsyncTurnStream:  # noqa: A002 - as above
        """See `Session.turn`. It starts at once; an error of the engine's is raised where the stream is first read."""
        return AsyncTurnStream(self._engine, lambda deliver: self._core.turn(input, options, deliver))

    def chat(self, text: str, **options: Unpack[TurnOptions]) -> AsyncTurnStream:
        """A turn of one user message."""
        return self.turn([{"role": "user", "content": text}], **options)

    async def append(self, input: Input, **options: Unpack[TurnOptions]) -> TurnResult:  # noqa: A002 - as above
        """See `Session.append`."""
        return await AsyncTurnStream(self._engine, lambda d: self._core.append(input, options, d)).result()

    def regenerate(self, **options: Unpack[TurnOptions]) -> AsyncTurnStream:
        """See `Session.regenerate`."""
        return AsyncTurnStream(self._engine, lambda deliver: self._core.regenerate(options, deliver))

    async def draft(self, input: Input) -> None:  # noqa: A002 - as above
        """See `Session.draft`."""
        await _answer(self._core.draft(input))

    async def abort(self) -> None:
        """See `Session.abort`."""
        await _answer(self._core.abort())

    async def fork(
        self, turn: int | None = None, position: int | None = None, *, session_id: str | None = None
    ) -> AsyncSession:
        """See `Session.fork`."""
        return AsyncSession(self._engine, await _opened(self._core.fork(turn, position, session_id)))

    async def rewind(self, turn: int | None = None, position: int | None = None) -> SessionInfo:
        """See `Session.rewind`."""
        return await _answer(self._core.rewind(turn, position))

    async def close(self, *, finish: bool = False) -> None:
        """See `Session.close`."""
        await _answer(self._core.close(finish=finish))


class AsyncTurnStream:
    """As `tenuto.TurnStream`. Cancelling a task that waits for it aborts the turn."""

    def __init__(self, engine: AsyncEngine, start: Callable[[Deliver], TurnReader]) -> None:
        self._engine = engine  # stays open while a turn of it is read
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()
        self._events = events
        self._reader = start(lambda event: _post(loop, events, event))
        self._closer = finalize(self, self._reader.disconnect)
        self._closer.atexit = False  # the engine's own end sees to that

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
    def text(self) -> str:
        """All text read so far."""
        return self._reader.text

    @property
    def token_ids(self) -> list[int]:
        """All output token ids read so far."""
        return list(self._reader.token_ids)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from the call that opened the turn to its first token, once that is there."""
        return self._reader.time_to_first_token

    async def abort(self, keep: Keep = None) -> TurnResult:
        """See `TurnStream.abort`."""
        return await asyncio.shield(
            asyncio.wrap_future(self._reader.abort(keep))
        )  # done also if the caller is cancelled

    def close(self) -> None:
        """Abort the turn if it has not ended."""
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
