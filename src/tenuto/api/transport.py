"""The transport to an engine in this process."""

from __future__ import annotations

import threading
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from itertools import count
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import msgspec

from tenuto.base.config import engine_config
from tenuto.base.errors import EngineStopped, TenutoError
from tenuto.base.link import TurnNews
from tenuto.base.messages import (
    AbortTurn,
    Answer,
    AnyReply,
    Refusal,
    Request,
    StartTurn,
    Stopped,
    Updates,
    Withdraw,
    WorkerSettings,
    answer_of,
    error_of,
)
from tenuto.base.turns import Delta, Keep
from tenuto.base.views import Ticket
from tenuto.client.transport import Deliver, Options, RunningTurn
from tenuto.runtime.models import load_model
from tenuto.runtime.service import Service

T = TypeVar("T")


class LocalTransport:
    """Messages to an engine in threads of this process. One thread hands it all requests, in the order in which they
    came, so that no caller prepares input or holds a lock of the service.

    Invariant: what is in `_waiting` or `_turns`, by call, will be answered or told why not, by whoever removes it.
    """

    options: frozenset[str] = frozenset()

    def __init__(self, settings: WorkerSettings) -> None:
        """Loads the model and blocks meanwhile. Raises `ModelError` or `ConfigError`."""
        model = load_model(settings.model, settings.device, settings.dtype, settings.page_size)
        config = engine_config(settings.config, model.max_context)
        self.tokenizer = model.tokenizer
        self.context_length = config.context_length
        self._calls = count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._turns: dict[int, LocalTurn] = {}
        self._requests: SimpleQueue[Request[Any] | LocalTurn | None] = SimpleQueue()
        self._stopped: Stopped | None = None  # set once, under the lock
        self._lock = threading.RLock()  # reentrant: a finalizer may post in the middle of anything
        self._service = Service(model, config, settings.memory_bytes, self._take)
        self._thread = threading.Thread(target=self._run, name="tenuto-requests", daemon=True)
        self._thread.start()

    def call(self, request: Request[T]) -> Future[T]:
        call, future = next(self._calls), Future[T]()
        self._waiting[call] = _Waiting(answer_of(type(request)), future)
        try:
            self.post(msgspec.structs.replace(request, call=call))
        except EngineStopped:
            self._waiting.pop(call, None)
            raise
        return future

    def start(self, request: StartTurn, options: Options, deliver: Deliver) -> RunningTurn:  # noqa: ARG002 - the request has them
        call = next(self._calls)
        turn = LocalTurn(self, f"turn {call}", deliver)
        self._turns[call] = turn
        try:
            self.post(msgspec.structs.replace(request, call=call, name=turn.name))
        except EngineStopped:
            self._turns.pop(call, None)
            raise
        return turn

    def post(self, request: Request[Any] | LocalTurn) -> None:
        """Send a request whose answer, if it comes under no call, is for nobody, or a turn whose reader has left before
        it began. Raises `EngineStopped`."""
        with self._lock:
            if self._stopped is not None:
                raise self._stopped.error()
            self._requests.put(request)

    def request_stop(self) -> None:
        with self._lock:
            self._stopped = self._stopped or Stopped(reason="the engine was closed")
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
        call, withdrawn = next(self._calls), Future[bool]()
        self._waiting[call] = _Waiting(bool, withdrawn)
        self._service.handle(Withdraw(call=call, name=turn.name))
        wait([withdrawn])
        if withdrawn.exception() is None and not withdrawn.result():
            wait([turn.started])
            if turn.ticket is not None:
                self._service.handle(_abort(turn.ticket))

    # -- in whatever thread has news

    def _take(self, reply: AnyReply) -> None:
        match reply:
            case Updates(updates=updates):
                for call, delta in updates:
                    turn = self._turns.get(call) if delta.result is None else self._turns.pop(call, None)
                    if turn is not None:
                        turn.hear(delta)
            case Answer(call=call, value=value):
                if (turn := self._turns.get(call)) is not None:
                    turn.hear(msgspec.msgpack.decode(value, type=Ticket))
                elif (waiting := self._waiting.pop(call, None)) is not None:
                    with suppress(InvalidStateError):  # it was cancelled
                        waiting.future.set_result(msgspec.msgpack.decode(value, type=waiting.answer))
            case Refusal(call=call):
                self._refuse(call, error_of(reply))
            case Stopped():
                self._stop(reply)

    def _refuse(self, call: int, error: TenutoError) -> None:
        if (turn := self._turns.pop(call, None)) is not None:
            turn.hear(error)
        elif (waiting := self._waiting.pop(call, None)) is not None:
            with suppress(InvalidStateError):  # it was cancelled
                waiting.future.set_exception(error)

    def _stop(self, stopped: Stopped) -> None:
        with self._lock:
            self._stopped = self._stopped or stopped
        for call in (*self._turns, *self._waiting):
            self._refuse(call, stopped.error())


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


class _Waiting(NamedTuple):
    """Who waits for an answer, and of which type that is."""

    answer: type[Any]
    future: Future[Any]
