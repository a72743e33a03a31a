"""The outbox: encodes and sends an engine's messages in a separate thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import msgspec

from tenuto.base.errors import TenutoError
from tenuto.base.turns import Delta
from tenuto.base.wire.replies import Answer, AnyReply, Refusal, Stopped, Updates, refusal_of
from tenuto.base.wire.request import Request
from tenuto.runtime.texts import Texts

log = logging.getLogger("tenuto.runtime")

T = TypeVar("T")


class Outbox:
    """Sends messages in the order in which its methods are called, from any thread. A `call` is the number of a
    request; updates carry the call that started their turn. Only updates of an announced call wait, until its answer is
    sent.

    Invariant: `_awaited` has the updates, by call, that wait for their call's answer; only for the outbox's thread.
    """

    def __init__(self, send: Callable[[AnyReply], None], texts: Texts) -> None:
        self._send = send
        self._texts = texts
        self._awaited: dict[int, list[tuple[int, Delta]]] = {}
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tenuto-outbox", daemon=True)
        self._thread.start()

    def announce(self, call: int) -> None:
        """Holds back the updates of `call` until its answer, which is still being computed, has been sent."""
        self._waiting.put(partial(self._await, call))

    def answer(self, request: Request[T], value: T) -> None:
        """Answers a request with `value`."""
        self._waiting.put(partial(self._answer, request.call, value))

    def refuse(self, call: int, error: BaseException) -> None:
        """Refuses a request, or ends the updates of a turn with an error."""
        told = error if isinstance(error, TenutoError) else TenutoError(f"{type(error).__name__}: {error}")
        self._waiting.put(partial(self._refuse, refusal_of(call, told)))

    def update(self, updates: Sequence[tuple[int, Delta]]) -> None:
        """Sends new output of turns, each with the call that started the turn."""
        self._waiting.put(partial(self._update, updates))

    def stopped(self, stopped: Stopped) -> None:
        """Reports that the engine has ended."""
        self._waiting.put(partial(self._send, stopped))

    def close(self) -> None:
        """Sends the waiting messages and ends the thread."""
        self._waiting.put(None)
        self._thread.join()

    # -- in the outbox's thread

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            try:
                work()
            except Exception:  # a bug of ours, which must not stop other messages
                log.exception("a message could not be sent")
            del work  # frees the message now, as the next one may come much later

    def _await(self, call: int) -> None:
        self._awaited[call] = []

    def _answer(self, call: int, value: Any) -> None:
        self._send(Answer(call=call, value=msgspec.Raw(msgspec.msgpack.encode(value))))
        if updates := self._awaited.pop(call, None):
            self._send(Updates(updates=updates))

    def _refuse(self, refusal: Refusal) -> None:
        self._awaited.pop(refusal.call, None)  # updates that came before are dropped
        self._send(refusal)

    def _update(self, updates: Sequence[tuple[int, Delta]]) -> None:
        ready: list[tuple[int, Delta]] = []
        for call, delta in updates:
            self._awaited.get(call, ready).append((call, self._texts.of_delta(delta)))
        if ready:
            self._send(Updates(updates=ready))
