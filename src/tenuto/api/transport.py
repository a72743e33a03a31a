"""The transport to an engine in this process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, TypeVar

import msgspec

from tenuto.api.compaction import compacted
from tenuto.base.config import WorkerSettings
from tenuto.base.errors import EngineStopped
from tenuto.base.tools.definitions import ModelHabits
from tenuto.base.tools.tool_use import ToolUse
from tenuto.base.turns import Delta, Keep, last_role
from tenuto.base.views import Compacted, Ticket
from tenuto.base.wire.link import Calls, TurnNews, Waiting
from tenuto.base.wire.messages import AbortTurn, Expect, StartTurn, Withdraw
from tenuto.base.wire.replies import Stopped
from tenuto.base.wire.request import Request, answer_of
from tenuto.client.transport import Deliver, Options, RunningTurn
from tenuto.runtime.models import load_model, memory_bytes
from tenuto.runtime.opening import open_journal
from tenuto.runtime.service import Service

T = TypeVar("T")


class LocalTransport(Calls):
    """Sends messages to an engine in this process. A thread hands all requests to the engine's service in order, so
    that callers do not wait while their input is encoded or the service is locked."""

    options: frozenset[str] = frozenset()

    def __init__(self, settings: WorkerSettings) -> None:
        """Loads the model, which blocks. Raises `ModelError` or `ConfigError`."""
        super().__init__()
        model = load_model(settings)
        config = model.configured(settings.config)
        self.tokenizer = model.tokenizer
        self._habits = model.chat.habits if model.chat is not None else ModelHabits()
        self.context_length = config.context_length
        self._requests: SimpleQueue[Request[Any] | LocalTurn | None] = SimpleQueue()
        self._closed: Stopped | None = None  # why new requests are refused; set once, under the lock
        self._lock = threading.RLock()  # reentrant: a finalizer may post in the middle of anything
        journal = open_journal(settings, model)
        self._service = Service(
            model, config, memory_bytes(settings), self.take, journal=journal, adapters=settings.adapters
        )
        self._thread = threading.Thread(target=self._run, name="tenuto-requests", daemon=True)
        self._thread.start()

    def call(self, request: Request[T]) -> Future[T]:
        call, future = next(self._numbers), Future[T]()
        self._waiting[call] = Waiting(answer_of(type(request)), future)
        try:
            self.post(msgspec.structs.replace(request, call=call))
        except EngineStopped:
            self._waiting.pop(call, None)
            raise
        return future

    def start(
        self,
        request: StartTurn,
        options: Options,  # noqa: ARG002 - the request has them
        use: ToolUse | None,
        deliver: Deliver,
    ) -> RunningTurn:
        call = next(self._numbers)
        turn = LocalTurn(self, f"turn {call}", deliver)
        if use is not None and request.kind != "append":
            params, own = request.params, request.params.grammar
            habits = self._habits.after(last_role(request.input))
            params = replace(params, grammar=use.grammar(habits, params.grammar), marks=use.marks(habits))
            request = msgspec.structs.replace(request, params=params)
            turn.reading = use.reading(habits, params.grammar)
            turn.grammar_field = "tools" if request.params.grammar is not None and own is None else "grammar"
        self._streams[call] = turn.hear
        try:
            self.post(msgspec.structs.replace(request, call=call, name=turn.name))
        except EngineStopped:
            self._streams.pop(call, None)
            raise
        return turn

    def compact(self, session: str, first: int, last: int | None, options: Options) -> Future[Compacted]:
        return compacted(self, self._habits, session, first, last, options)

    def post(self, request: Request[Any] | LocalTurn) -> None:
        """Queues a request; its answer is discarded unless `call` or `start` waits for it. A `LocalTurn` is withdrawn:
        its reader has left before it started. Raises `EngineStopped`."""
        with self._lock:
            if self._closed is not None:
                raise self._closed.error()
            self._requests.put(request)

    def request_stop(self) -> None:
        with self._lock:
            self._closed = self._closed or Stopped(reason="the engine was closed")
            self._requests.put(None)

    def close(self) -> None:
        self.request_stop()
        self._thread.join()

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            if isinstance(request, LocalTurn):
                self._withdraw(request)
                continue
            waiting = self._waiting.get(request.call)
            if waiting is None or waiting.future.set_running_or_notify_cancel():
                self._service.handle(request)
            else:  # its future was cancelled
                self._waiting.pop(request.call, None)
            del request, waiting  # do not keep them alive until the next request
        self._service.close()

    def _withdraw(self, turn: LocalTurn) -> None:
        """Withdraws a turn whose reader has left, before later requests are handled. If it is too late for that, waits
        until the turn has started and aborts it."""
        call, withdrawn = next(self._numbers), Future[bool]()
        self._waiting[call] = Waiting(bool, withdrawn)
        self._service.handle(Withdraw(call=call, name=turn.name))
        wait([withdrawn])
        if withdrawn.exception() is None and not withdrawn.result():
            wait([turn.started])
            if turn.ticket is not None:
                self._service.handle(_abort(turn.ticket))

    # -- in the thread that delivers answers

    def stop(self, stopped: Stopped) -> None:
        with self._lock:
            self._closed = self._closed or stopped
        super().stop(stopped)


class LocalTurn(RunningTurn):
    """A turn on an engine in this process. Until it starts, it can be withdrawn by its `name`."""

    def __init__(self, transport: LocalTransport, name: str, deliver: Deliver) -> None:
        super().__init__(deliver)
        self.name = name
        self._transport = transport
        self.ticket: Ticket | None = None
        self.grammar_field = "grammar"  # the request's field that determines its grammar
        self._left = False  # whether its reader is gone

    def hear(self, news: TurnNews) -> None:
        """Handles the engine's next message about the turn."""
        match news:
            case Ticket():
                self.ticket = news
                if self._left:
                    self.disconnect()
                self.accept()
            case Delta():
                self.take(news)
            case _:
                if news.param == "grammar":
                    news.param = self.grammar_field
                self.fail(news)

    def called(self, version: int, names: Sequence[str]) -> None:
        assert self.ticket is not None
        expect = Expect(tenant="", session=self.ticket.session, calls=tuple(names), version=version)
        with suppress(EngineStopped):
            self._transport.call(expect)  # refused if the session has ended or gone on, which is no error

    def disconnect(self) -> None:
        self._left = True
        if not self.ended.done():
            ticket = self.ticket  # if the ticket comes later, `hear` sees that the reader is gone
            with suppress(EngineStopped):
                self._transport.post(self if ticket is None else _abort(ticket))

    def _end(self, keep: Keep) -> Future[Any]:
        assert self.ticket is not None
        return self._transport.call(_abort(self.ticket, keep))


def _abort(ticket: Ticket, keep: Keep = None) -> AbortTurn:
    return AbortTurn(tenant="", session=ticket.session, turn=ticket.turn, keep=keep)
