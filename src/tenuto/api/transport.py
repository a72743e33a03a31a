"""The transport to an engine in this process."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

import msgspec

from tenuto.base.config import engine_config
from tenuto.base.errors import EngineStopped
from tenuto.base.link import Calls, TurnNews, Waiting
from tenuto.base.messages import (
    AbortTurn,
    Request,
    StartTurn,
    Stopped,
    Withdraw,
    WorkerSettings,
    answer_of,
)
from tenuto.base.turns import Delta, Keep
from tenuto.base.views import Ticket
from tenuto.client.transport import Deliver, Options, RunningTurn
from tenuto.runtime.models import load_model
from tenuto.runtime.service import Service, open_journal

T = TypeVar("T")


class LocalTransport(Calls):
    """Messages to an engine in threads of this process. One thread hands it all requests, in the order in which they
    came, so that no caller prepares input or holds a lock of the service."""

    options: frozenset[str] = frozenset()

    def __init__(self, settings: WorkerSettings) -> None:
        """Loads the model and blocks meanwhile. Raises `ModelError` or `ConfigError`."""
        super().__init__()
        model = load_model(settings.model, settings.device, settings.dtype, settings.page_size, settings.kernels)
        config = engine_config(settings.config, model.max_context)
        self.tokenizer = model.tokenizer
        self.context_length = config.context_length
        self._requests: SimpleQueue[Request[Any] | LocalTurn | None] = SimpleQueue()
        self._closed: Stopped | None = None  # to new requests, and why; set once, under the lock
        self._lock = threading.RLock()  # reentrant: a finalizer may post in the middle of anything
        journal = open_journal(settings, model)
        self._service = Service(model, config, settings.memory_bytes, self.take, journal=journal)
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

    def start(self, request: StartTurn, options: Options, deliver: Deliver) -> RunningTurn:  # noqa: ARG002 - the request has them
        call = next(self._numbers)
        turn = LocalTurn(self, f"turn {call}", deliver)
        self._streams[call] = turn.hear
        try:
            self.post(msgspec.structs.replace(request, call=call, name=turn.name))
        except EngineStopped:
            self._streams.pop(call, None)
            raise
        return turn

    def post(self, request: Request[Any] | LocalTurn) -> None:
        """Send a request whose answer, if it comes under no call, is for nobody, or a turn whose reader has left before
        it began. Raises `EngineStopped`."""
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
            else:  # nobody waits any more
                self._waiting.pop(request.call, None)
            del request, waiting  # the next may be long in coming
        self._service.close()

    def _withdraw(self, turn: LocalTurn) -> None:
        """Whatever is asked of its session from now on finds no trace of the turn. If it is about to begin, that takes
        until the engine's next step."""
        call, withdrawn = next(self._numbers), Future[bool]()
        self._waiting[call] = Waiting(bool, withdrawn)
        self._service.handle(Withdraw(call=call, name=turn.name))
        wait([withdrawn])
        if withdrawn.exception() is None and not withdrawn.result():
            wait([turn.started])
            if turn.ticket is not None:
                self._service.handle(_abort(turn.ticket))

    # -- in whatever thread has news

    def stop(self, stopped: Stopped) -> None:
        with self._lock:
            self._closed = self._closed or stopped
        super().stop(stopped)


class LocalTurn(RunningTurn):
    """A turn on an engine in this process. `name`: by which its input can be withdrawn."""

    def __init__(self, transport: LocalTransport, name: str, deliver: Deliver) -> None:
        super().__init__(deliver)
        self.name = name
        self._transport = transport
        self.ticket: Ticket | None = None
        self._left = False  # nobody reads any more

    def hear(self, news: TurnNews) -> None:
        """What the engine says of it, in order."""
        match news:
            case Ticket():
                self.ticket = news
                if self._left:
                    self.disconnect()
                self.accept()
            case Delta():
                self.take(news)
            case _:
                self.fail(news)

    def disconnect(self) -> None:
        self._left = True
        if not self.ended.done():
            ticket = self.ticket  # if it comes from now on, `hear` sees that nobody reads
            with suppress(EngineStopped):
                self._transport.post(self if ticket is None else _abort(ticket))

    def _end(self, keep: Keep) -> Future[Any]:
        assert self.ticket is not None
        return self._transport.call(_abort(self.ticket, keep))


def _abort(ticket: Ticket, keep: Keep = None) -> AbortTurn:
    return AbortTurn(tenant="", session=ticket.session, turn=ticket.turn, keep=keep)
