"""Runs an engine in a thread of its own: commands go in and are answered by futures, turns report to subscribers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from tenuto.base.errors import EngineStopped, InvariantError, TenutoError
from tenuto.base.sampling import TokenLogprob
from tenuto.base.turns import Delta, Keep, TurnResult
from tenuto.base.views import AuditReport
from tenuto.engine.engine import Engine
from tenuto.session.turn import Turn

log = logging.getLogger("tenuto.engine")

T = TypeVar("T")
MaybeTurn = TypeVar("MaybeTurn", Turn, Turn | None)

IDLE_SECONDS = 0.1
"""With nothing to compute, how often the clock is looked at: deadlines and idle timeouts are this exact."""


Subscriber = Callable[[Delta | TenutoError], None]
"""Called in the engine's thread with every delta of a turn; the last has its result. Or with the error that kept the
turn from starting or stopped the engine. It must not block. If it raises, nobody is there, and the turn is aborted."""


class EngineLoop:
    """Owns `engine`, which no other thread may touch from now on. In the engine's thread `after_round` is called when
    commands have been obeyed and when a step's events have been published, and `on_stop` once, when the last step is
    done and everyone has been told."""

    def __init__(
        self,
        engine: Engine,
        on_stop: Callable[[], None] = lambda: None,
        after_round: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._on_stop = on_stop
        self._after_round = after_round
        self._commands: SimpleQueue[_Command[object] | None] = SimpleQueue()
        self._audits: list[Future[AuditReport]] = []  # awaited; the engine's thread alone
        self._subscriptions: dict[int, _Subscription] = {}  # by turn number; the engine's thread alone
        self.stopped: str | None = None  # why; set once, under the lock
        self._lock = threading.RLock()  # reentrant: a finalizer may post in the middle of anything
        self._thread = threading.Thread(target=self._run, name="tenuto-engine", daemon=True)
        self._thread.start()

    def call(self, work: Callable[[Engine], T]) -> Future[T]:
        """Have `work` done in the engine's thread, between two steps. The future also takes its error. Raises
        `EngineStopped`."""
        future: Future[T] = Future()
        self._post(_Command(work, future))
        return future

    def start(self, work: Callable[[Engine], MaybeTurn], subscriber: Subscriber) -> Future[MaybeTurn]:
        """As `call`, with work that opens a turn, if it does; `subscriber` then gets its events, or the error."""

        def start_turn(engine: Engine) -> MaybeTurn:
            try:
                turn = work(engine)
            except TenutoError as error:
                subscriber(error)
                raise
            if turn is not None:
                self._subscriptions[turn.number] = _Subscription(turn, subscriber)
            return turn

        return self.call(start_turn)

    def abort(self, started: Future[Turn], keep: Keep = None) -> Future[TurnResult]:
        """End a turn that `start` has started, as `Engine.abort`; the result of a turn that has ended already is
        returned as it is."""

        def abort_turn(engine: Engine) -> TurnResult:
            turn = started.result()  # commands are done in order: it is there
            if not turn.state.ended:
                self.publish(engine.abort(turn.session.id, keep, tenant=turn.session.policy.tenant))
            if turn.result is None:
                raise InvariantError(f"{turn.name} has ended without a result")
            return turn.result

        return self.call(abort_turn)

    def audit(self) -> Future[AuditReport]:
        """A recount as `Engine.audit`, spread over the steps to come so that it holds up none of them. Raises
        `EngineStopped`, as does the future if the engine stops before."""
        asked: Future[AuditReport] = Future()
        asked.set_running_or_notify_cancel()

        def ask(engine: Engine) -> None:
            engine.ask_audit(answer)
            self._audits.append(asked)

        def answer(report: AuditReport) -> None:
            self._audits.remove(asked)
            asked.set_result(report)

        def refuse(done: Future[None]) -> None:
            if (error := done.exception()) is not None:
                asked.set_exception(error)

        self.call(ask).add_done_callback(refuse)
        return asked

    def close(self) -> None:
        """Stop after the step in progress and wait for that. Whoever waits for something gets `EngineStopped`."""
        self.request_stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def request_stop(self) -> None:
        """Stop after the step in progress, and do not wait: a finalizer may run in any thread, also in one that the
        step needs."""
        with self._lock:
            if self.stopped is None:
                self._commands.put(None)

    def _post(self, command: _Command[T]) -> None:
        with self._lock:
            if self.stopped is not None:
                raise EngineStopped(self.stopped)
            self._commands.put(command)  # type: ignore[arg-type] # a queue is invariant, what it carries is not

    # -- in the engine's thread

    def _run(self) -> None:
        reason, wait = "the engine was closed", 0.0
        try:
            while self._obey(wait):
                self._after_round()
                report = self._engine.step()
                self._publish_all(report.progressed)
                self._publish_all(report.ended)
                self._after_round()
                busy = report.worked or report.ended or self._engine.auditor.awaited
                wait = 0.0 if busy else IDLE_SECONDS
        except Exception as error:  # whatever escapes leaves the engine in doubt
            reason = f"the engine stopped: {type(error).__name__}: {error}"
            log.exception("the engine stopped; this is a bug, and here is the report")
        self._stop(reason)

    def _obey(self, wait: float) -> bool:
        """Do the commands there are by now, waiting up to `wait` seconds for the first. False if one was to close."""
        try:
            command = self._commands.get(timeout=wait) if wait else self._commands.get_nowait()
            waiting = self._commands.qsize()  # those that come meanwhile wait for the next step
            while command is not None:
                command.run(self._engine)
                if waiting == 0:
                    return True
                waiting -= 1
                command = self._commands.get_nowait()
        except Empty:
            return True
        return False

    def _publish_all(self, turns: Iterable[Turn]) -> None:
        for turn in turns:
            if not self.publish(turn):
                self._engine.abort(turn.session.id, tenant=turn.session.policy.tenant)

    def publish(self, turn: Turn) -> bool:
        """Tell the turn's subscriber what is new, in the engine's thread. False if the turn is open and nobody is there
        any more."""
        subscription = self._subscriptions.get(turn.number)
        if subscription is None:
            return True
        if turn.state.ended:
            del self._subscriptions[turn.number]
        try:
            subscription.publish()
        except Exception:  # noqa: BLE001 - however it fails, nobody listens
            self._subscriptions.pop(turn.number, None)
            return turn.state.ended
        return True

    def _stop(self, reason: str) -> None:
        with self._lock:
            self.stopped = reason
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                break
            if command is not None:
                command.refuse(reason)
        for audit in self._audits:
            audit.set_exception(EngineStopped(reason))
        for subscription in self._subscriptions.values():
            subscription.refuse(reason)
        self._subscriptions.clear()
        self._on_stop()


class _Subscription:
    """Who listens to a turn, and how much of it they have been told."""

    __slots__ = ("_input_sent", "_sent", "_subscriber", "_turn")

    def __init__(self, turn: Turn, subscriber: Subscriber) -> None:
        self._turn = turn
        self._subscriber = subscriber
        self._sent = 0
        self._input_sent = False

    def publish(self) -> None:
        turn = self._turn
        tokens = tuple(turn.output[self._sent :])
        logprobs = tuple(turn.output_logprobs[self._sent :]) if turn.output_logprobs else ()
        self._sent += len(tokens)
        scores: tuple[TokenLogprob | None, ...] = ()
        if turn.params.input_logprobs is not None and not self._input_sent and (tokens or turn.result is not None):
            scores, self._input_sent = turn.input_logprobs, True
        text = turn.text.take_text() if turn.text is not None else ""
        self._subscriber(Delta(tokens, text, turn.delivered, turn.result, logprobs, scores))

    def refuse(self, reason: str) -> None:
        with suppress(Exception):  # if nobody is there, nobody is told
            self._subscriber(EngineStopped(reason))


class _Command(Generic[T]):
    """Work for the engine's thread, and where its result goes."""

    def __init__(self, work: Callable[[Engine], T], future: Future[T]) -> None:
        self._work = work
        self._future = future

    def run(self, engine: Engine) -> None:
        """Raises `InvariantError` if the engine is broken, before or by this."""
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            self._future.set_result(self._work(engine))
        except TenutoError as error:
            self._future.set_exception(error)
        except InvariantError as error:
            self._future.set_exception(EngineStopped(f"the engine stopped: {error}"))
            raise
        except Exception as error:  # noqa: BLE001 - a mistake in the work; go on if memory is sound
            self._future.set_exception(error)
            engine.audit()

    def refuse(self, reason: str) -> None:
        if self._future.set_running_or_notify_cancel():
            self._future.set_exception(EngineStopped(reason))
