"""The asynchronous client: the operations of `client.sync`, awaitable."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from os import PathLike
from typing import ClassVar, Generic, Self, TypeVar, Unpack

from tenuto.base.errors import EngineStopped
from tenuto.base.options import ChatOptions, Policy, SessionAdapter
from tenuto.base.tokens import SessionTokens
from tenuto.base.tools.answer_part import AnswerPart
from tenuto.base.tools.definitions import ToolCall
from tenuto.base.turns import Delta, Input, Keep, TurnKind, TurnResult
from tenuto.base.views import AuditReport, Compacted, Erased, SessionInfo
from tenuto.client.compaction import CompactionOptions
from tenuto.client.core import SessionCore, TurnReader
from tenuto.client.faces import ClientBase, SessionBase, TurnStreamBase
from tenuto.client.results import Results
from tenuto.client.transport import Deliver, Event, Options, Transport

T = TypeVar("T")
AsyncSessionT = TypeVar("AsyncSessionT", bound="AsyncSession")


async def _answer(future: Future[T]) -> T:
    return await asyncio.wrap_future(future)


async def _opened(future: Future[SessionCore]) -> SessionCore:
    """Waits for a session to open. If the caller is cancelled meanwhile, closes the session once it is open."""
    try:
        return await asyncio.shield(asyncio.wrap_future(future))
    except asyncio.CancelledError:
        future.add_done_callback(_close_orphan)
        raise


def _close_orphan(opened: Future[SessionCore]) -> None:
    if not opened.cancelled() and opened.exception() is None:
        with suppress(EngineStopped):
            opened.result().close(finish=False)


class AsyncClient(ClientBase, Generic[AsyncSessionT]):
    """The asynchronous `Client`."""

    session_type: type[AsyncSessionT]

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self._mailboxes: dict[asyncio.AbstractEventLoop, Mailbox] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def mailbox(self) -> Mailbox:
        """Returns the mailbox of the running loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._mailboxes:
            still = {each: mailbox for each, mailbox in self._mailboxes.items() if not each.is_closed()}
            self._mailboxes = {**still, loop: Mailbox(loop)}
        return self._mailboxes[loop]

    async def session(
        self,
        session_id: str | None = None,
        *,
        system: str | None = None,
        ttl: float | None = None,
        priority: int = 0,
        max_tokens: int | None = None,
        pinned: bool = False,
        adapter: str | None = None,
    ) -> AsyncSessionT:
        """See `Client.session`."""
        policy = Policy(priority, ttl, max_tokens, pinned=pinned, adapter=SessionAdapter.named(adapter))
        return self.session_type(self, await _opened(self._core.open(session_id, system, policy)))

    async def attach(self, session_id: str) -> AsyncSessionT:
        """See `Client.attach`."""
        return self.session_type(self, await _answer(self._core.attach(session_id)))

    async def import_session(self, exported: bytes | str, *, session_id: str | None = None) -> AsyncSessionT:
        """See `Client.import_session`."""
        return self.session_type(self, await _opened(self._core.import_session(exported, session_id)))

    async def import_file(self, path: str | PathLike[str], *, session_id: str | None = None) -> AsyncSessionT:
        """See `Client.import_file`."""
        return self.session_type(self, await _opened(self._core.import_file(path, session_id)))

    def generate(self, input: Input, **options: Unpack[ChatOptions]) -> AsyncTurnStream:  # noqa: A002 - as in `Client`
        """See `Client.generate`."""
        return self.session_type.stream_type(self, partial(self._core.start, None, "turn", input, options))

    async def sessions(self) -> list[SessionInfo]:
        """See `Client.sessions`."""
        return await _answer(self._core.sessions())

    async def detokenize(self, token_ids: Iterable[int]) -> str:
        """See `Client.detokenize`."""
        return await _answer(self._core.detokenize(token_ids))

    async def audit(self) -> AuditReport:
        """See `Client.audit`."""
        return await _answer(self._core.audit())

    async def pause_generation(self, *, retract: bool = False) -> None:
        """See `Client.pause_generation`."""
        await _answer(self._core.pause(retract=retract))

    async def continue_generation(self) -> None:
        """See `Client.continue_generation`."""
        await _answer(self._core.go_on())

    async def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """See `Client.release_memory_occupation`."""
        await _answer(self._core.release_memory(tags))

    async def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """See `Client.resume_memory_occupation`."""
        await _answer(self._core.resume_memory(tags))

    async def update_weights_from_disk(
        self,
        model_path: str | PathLike[str],
        *,
        weight_version: str | None = None,
        abort: bool = False,
        keep_state: bool = False,
    ) -> str:
        """See `Client.update_weights_from_disk`."""
        return await _answer(self._core.update_weights(model_path, weight_version, abort=abort, keep_state=keep_state))

    async def close(self) -> None:
        """See `Client.close`."""
        self._closer.detach()
        await asyncio.to_thread(self._core.transport.close)


class AsyncTurnStream(TurnStreamBase):
    """The asynchronous `TurnStream`. Cancelling a task that waits for the stream closes the stream."""

    def __init__(self, engine: ClientBase, start: Callable[[Deliver], TurnReader]) -> None:
        assert isinstance(engine, AsyncClient)
        self._events = asyncio.Queue[Event]()
        super().__init__(engine, start, partial(engine.mailbox().post, self._events))

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        while await self._next() is not None:
            if self._reader.latest.text:
                return self._reader.latest.text
        raise StopAsyncIteration

    async def parts(self) -> AsyncIterator[AnswerPart]:
        """Iterates over the parsed answer as it arrives: text, reasoning and calls."""
        while await self._next() is not None:
            if self._reader.latest:
                yield self._reader.latest

    async def calls(self) -> AsyncIterator[ToolCall]:
        """See `TurnStream.calls`."""
        async for part in self.parts():
            for call in part.calls:
                yield call

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def tokens(self) -> AsyncIterator[int]:
        """See `TurnStream.tokens`."""
        while True:
            while self._unread:
                yield self._unread.popleft()
            if (event := await self._next()) is None:
                return
            self._unread.extend(event.tokens)

    async def result(self) -> TurnResult:
        """Waits for the turn to end and returns its result."""
        while await self._next() is not None:
            pass
        result = self._reader.result
        assert result is not None
        return result

    async def abort(self, keep: Keep = None) -> TurnResult:
        """See `TurnStream.abort`. The turn is aborted even if the caller is cancelled."""
        return await asyncio.shield(asyncio.wrap_future(self._reader.abort(keep)))

    async def _next(self) -> Delta | None:
        self._unread.clear()
        if self._reader.ended:
            return None
        try:
            event = await self._events.get()
        except asyncio.CancelledError:
            self.close()
            raise
        return self._reader.take(event)


class Mailbox:
    """Passes events from other threads to `loop`. One wake-up delivers all events posted by then, because waking the
    loop for each token would take longer than everything else it does with the token.

    Invariant: while `_letters` is not empty, the loop has been woken and `_woken` is set, or `_empty` is running.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._letters: deque[tuple[asyncio.Queue[Event], Event]] = deque()
        self._woken = False

    def post(self, events: asyncio.Queue[Event], event: Event) -> None:
        """Puts `event` into `events`, in the loop's thread. Any thread may call this. Raises `RuntimeError` if the loop
        is closed."""
        if self._loop.is_closed():  # it may have been woken but closed before it delivered the events
            self._letters.clear()
            raise RuntimeError("the event loop is closed")
        self._letters.append((events, event))
        if not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._empty)
            except RuntimeError:
                self._woken = False
                self._letters.clear()
                raise

    def _empty(self) -> None:
        self._woken = False  # first: events posted from now on may be missed below
        with suppress(IndexError):
            while True:
                events, event = self._letters.popleft()
                events.put_nowait(event)


class AsyncToolResults(Results):
    """The asynchronous `ToolResults`."""

    def __init__(self, session: AsyncSession, turn: TurnReader) -> None:
        super().__init__(turn)
        self._session = session
        self._lock = asyncio.Lock()

    async def add(self, call: ToolCall | str, content: str) -> None:
        """See `ToolResults.add`."""
        async with self._lock:
            self.put(call, content)
            if messages := self.due():
                await self._session.draft(messages)


class AsyncSession(SessionBase):
    """The asynchronous `Session`."""

    stream_type: ClassVar[type[AsyncTurnStream]] = AsyncTurnStream

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def info(self) -> SessionInfo:
        """The session's current state."""
        return await _answer(self._core.info())

    async def history(self) -> list[int]:
        """The session's committed tokens."""
        return await _answer(self._core.history())

    async def tokens(self) -> SessionTokens:
        """See `Session.tokens`."""
        return await _answer(self._core.tokens())

    def turn(self, input: Input = (), **options: Unpack[ChatOptions]) -> AsyncTurnStream:  # noqa: A002 - as above
        """See `Session.turn`. The turn starts at once; the engine's errors are raised at the first read of the
        stream."""
        return self._start("turn", input, options)

    def chat(self, text: str, **options: Unpack[ChatOptions]) -> AsyncTurnStream:
        """Runs a turn with one user message."""
        return self._start("turn", [{"role": "user", "content": text}], options)

    async def append(self, input: Input, **options: Unpack[ChatOptions]) -> TurnResult:  # noqa: A002 - as above
        """See `Session.append`."""
        return await self._start("append", input, options).result()

    def regenerate(self, **options: Unpack[ChatOptions]) -> AsyncTurnStream:
        """See `Session.regenerate`."""
        return self._start("regenerate", (), options)

    def _start(self, kind: TurnKind, given: Input, options: Options) -> AsyncTurnStream:
        return self.stream_type(self._engine, partial(self._core.start, kind, given, options))

    async def draft(self, input: Input) -> None:  # noqa: A002 - as above
        """See `Session.draft`."""
        await _answer(self._core.draft(input))

    def results(self, turn: AsyncTurnStream) -> AsyncToolResults:
        """See `Session.results`."""
        return AsyncToolResults(self, turn.reader)

    async def expect(self, within: float | None) -> SessionInfo:
        """See `Session.expect`."""
        return await _answer(self._core.expect(within))

    async def abort(self) -> None:
        """See `Session.abort`."""
        await _answer(self._core.abort())

    async def fork(
        self, turn: int | None = None, position: int | None = None, *, session_id: str | None = None
    ) -> Self:
        """See `Session.fork`."""
        return type(self)(self._engine, await _opened(self._core.fork(turn, position, session_id)))

    async def trim(self, turns: Sequence[int], *, session_id: str | None = None) -> Self:
        """See `Session.trim`."""
        return type(self)(self._engine, await _opened(self._core.trim(turns, session_id)))

    async def export(self) -> bytes:
        """See `Session.export`."""
        return await _answer(self._core.export())

    async def export_file(self, path: str | PathLike[str]) -> None:
        """See `Session.export_file`."""
        await _answer(self._core.export_file(path))

    async def rewind(self, turn: int | None = None, position: int | None = None) -> SessionInfo:
        """See `Session.rewind`."""
        return await _answer(self._core.rewind(turn, position))

    async def compact(self, first: int = 1, last: int | None = None, **options: Unpack[CompactionOptions]) -> Compacted:
        """See `Session.compact`. Cancelling the caller ends the compaction, and the session stays as it was."""
        return await _answer(self._core.compact(first, last, options))

    async def erase(self) -> Erased:
        """See `Session.erase`."""
        return await _answer(self._core.erase())

    async def close(self, *, finish: bool = False) -> None:
        """See `Session.close`."""
        await _answer(self._core.close(finish=finish))
