"""The loop that runs an engine in a separate thread. Futures answer commands; turns report to subscribers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar, cast

from tenuto.base.errors import EngineStopped, ExecutorLost, InvariantError, NotAcknowledged, TenutoError
from tenuto.base.sampling import TokenLogprob
from tenuto.base.turns import Delta
from tenuto.base.views import AuditReport
from tenuto.base.wire.replies import Stopped
from tenuto.engine.engine import Engine
from tenuto.engine.thread.acknowledge import Acknowledger, Announcer, AtOnce, Tell
from tenuto.engine.thread.gathering import Gathering
from tenuto.session.changes import Change
from tenuto.session.registry import LOST
from tenuto.session.session import Session
from tenuto.session.turn import Turn

log = logging.getLogger("tenuto.engine")

T = TypeVar("T")

IDLE_SECONDS = 0.1
"""The interval at which an idle engine checks the clock, and so the precision of deadlines and idle timeouts."""

COMMANDS_SECONDS = 0.02
"""The time after which commands wait for the next step, so that thousands of them do not hold up running turns."""

Subscriber = Callable[[Delta | TenutoError], None]
"""Called in the engine's thread with every delta of a turn, the last of which has its result, or with the error that
prevented the turn from starting or stopped the engine. It must not block. If it raises, the loop treats its reader as
gone, and aborts the turn."""


class EngineLoop:
    """Owns `engine`, which no other thread may use from now on. The engine's thread calls `after_round` after each
    batch of commands and after each step's events are published. It calls `on_stop` once, after the last step, when all
    waiting callers have been answered.

    A change of a session is reported only after `acknowledger` confirms it, in the order of changes. This applies to a
    committed turn's last delta, and to every `execute` that made the change or ran after it; a turn started after the
    change also reports only then. While changes cannot be acknowledged, waiting callers get `NotAcknowledged`, and
    `execute` rejects work unless it ends a turn."""

    def __init__(
        self,
        engine: Engine,
        on_stop: Callable[[Stopped], None] = lambda _: None,
        after_round: Callable[[], None] = lambda: None,
        acknowledger: Acknowledger | None = None,
    ) -> None:
        self._engine = engine
        self._announcer = Announcer(acknowledger or AtOnce(), self.drop)
        self._gathering = Gathering()
        self._on_stop = on_stop
        self._after_round = after_round
        self._commands: SimpleQueue[_Command[object] | None] = SimpleQueue()
        self._audits: list[Future[AuditReport]] = []  # outstanding; used only in the engine's thread
        self._subscriptions: dict[int, _Subscription] = {}  # by turn number; used only in the engine's thread
        self._opened: list[Turn] = []  # the turns to which the current command has subscribed
        self.stopped: Stopped | None = None  # set once, under the lock
        self._lock = threading.RLock()  # reentrant, since a finalizer may post at any point
        engine.idle_memory.tiers.moves.wake = engine.idle_memory.tiers.writes.wake = self.wake
        self._thread = threading.Thread(target=self._run, name="tenuto-engine", daemon=True)
        self._thread.start()

    def call(self, work: Callable[[Engine], T]) -> Future[T]:
        """Runs `work` in the engine's thread, between two steps. The future gets its result or its error at once, so
        `work` must not show the state of sessions. Raises `EngineStopped`."""
        future: Future[T] = Future()
        self._post(_Command(work, future))
        return future

    def execute(
        self,
        work: Callable[[Engine], T],
        then: Callable[[Future[T]], None] | None = None,
        *,
        ends: bool = False,
        after_output: bool = False,
    ) -> Future[T]:
        """Runs `work` like `call`; for work that changes sessions or shows their state. The future gets the result once
        all earlier changes and its own are acknowledged. While changes cannot be acknowledged, the work is rejected
        unless it `ends` a turn. `after_output`: `after_round` is called before the future gets the result, so that all
        output reported until then is sent first. `then` is called with the completed future, before turns that `work`
        started report."""
        future: Future[T] = Future()
        if then is not None:
            future.add_done_callback(then)
        self._post(_Command(work, future, self._announcer, ends=ends, after_output=after_output))
        return future

    def subscribe(self, turn: Turn, subscriber: Subscriber) -> None:
        """Reports the turn's deltas from now on to `subscriber`, after the command that opened the turn is answered.
        Called in the engine's thread, by that command."""
        self._subscriptions[turn.number] = _Subscription(turn, subscriber)
        self._opened.append(turn)

    def wake(self) -> None:
        """Wakes the loop after more changes are durable, or can be made durable again, or after a copy has ended. Any
        thread may call this."""
        with suppress(EngineStopped):
            self.call(lambda _: None)

    def audit(self) -> Future[AuditReport]:
        """Recounts as `Engine.audit` does, but spread over the coming steps so that no step is delayed. Raises
        `EngineStopped`, as does the future if the engine stops first."""
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
        """Stops after the step in progress, and waits until it has ended. Pending futures and subscribers get
        `EngineStopped`."""
        self.request_stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def request_stop(self) -> None:
        """Stops after the step in progress, without waiting for it; for finalizers, which may run in a thread that the
        step needs."""
        with self._lock:
            if self.stopped is None:
                self._commands.put(None)

    def _post(self, command: _Command[T]) -> None:
        with self._lock:
            if self.stopped is not None:
                raise self.stopped.error()
            self._commands.put(command)  # type: ignore[arg-type] # queues are invariant, commands are not

    # -- in the engine's thread

    def _run(self) -> None:
        stopped, wait = Stopped(reason="the engine was closed"), 0.0
        try:
            while self._obey(wait):
                self._after_round()
                only_begins = self._engine.only_begins
                if (wait := self._gathering.seconds(self._engine.now(), only_begins=only_begins)) > 0:
                    continue
                report = self._engine.step()
                for turn in report.progressed:
                    if not turn.state.ended:
                        self._publish(turn)
                self._end(report.ended, report.changes)
                self._announcer.advance()
                self._after_round()
                busy = report.worked or report.ended or self._engine.auditor.awaited
                wait = 0.0 if busy else IDLE_SECONDS
        except ExecutorLost as error:
            stopped = Stopped(reason="the engine stopped", detail=str(error))
            log.error("the engine stopped: %s", error)  # noqa: TRY400 - no bug, so no traceback
        except Exception as error:  # the engine's state is unknown
            stopped = Stopped(reason="the engine stopped", detail=f"{type(error).__name__}: {error}")
            log.exception("the engine stopped; this is a bug, and here is the report")
        self._stop(stopped)

    def _obey(self, wait: float) -> bool:
        """Runs the commands queued so far, waiting up to `wait` seconds for the first. Leaves the rest for later after
        `COMMANDS_SECONDS` if there are turns. Returns False to stop the loop."""
        try:
            command = self._commands.get(timeout=wait) if wait else self._commands.get_nowait()
            waiting = self._commands.qsize()  # later commands wait for the next step
            began = self._engine.now()
            while command is not None:
                self._carry_out(command)
                late = self._engine.now() >= began + COMMANDS_SECONDS and not self._engine.idle
                if waiting == 0 or late:
                    return True
                waiting -= 1
                command = self._commands.get_nowait()
        except Empty:
            return True
        return False

    def _carry_out(self, command: _Command[object]) -> None:
        """Runs a command. Turns that it ended report before it is answered, and turns that it started after that."""
        try:
            answer = command.run(self._engine)
        finally:
            self._end(self._engine.outcomes.take_ended(), self._engine.outcomes.take_changes())
            opened, self._opened = self._opened, []
            if opened:
                self._gathering.begin(opened, self._engine.now())

        def tell(refusal: TenutoError | None) -> None:
            if command.after_output:
                self._after_round()
            answer(refusal)
            for turn in opened:
                self._open(turn, refusal)

        if command.shows_sessions:
            self._announcer.hold(tell)
        else:
            tell(None)
        self._announcer.advance()

    def _open(self, turn: Turn, refusal: TenutoError | None) -> None:
        """Lets a turn report after the command that started it is answered."""
        subscription = self._subscriptions.get(turn.number)
        if subscription is None:
            return
        if refusal is not None:
            del self._subscriptions[turn.number]
            self._give_up(turn)
            return
        subscription.open = True
        if (subscription.late and not turn.state.ended) or (turn.result is not None and not turn.result.committed):
            self._publish(turn)

    def _end(self, turns: Iterable[Turn], changes: Sequence[Change]) -> None:
        """Reports ended turns, and announces changes in order; committed turns report when acknowledged."""
        for turn in turns:
            if turn.result is None or not turn.result.committed:
                self._publish(turn)
        if changes:
            self._gathering.note(changes, self._engine.now())
        for change in changes:
            self._announcer.changed(change)
            if change.turn is not None:
                self._announcer.hold(partial(self._tell_commit, change.turn), change.session)

    def _tell_commit(self, turn: Turn, refusal: TenutoError | None) -> None:
        if refusal is None:
            self._publish(turn)
        elif (subscription := self._subscriptions.pop(turn.number, None)) is not None:
            subscription.refuse(refusal)

    def publish(self, session: Session) -> None:
        """Reports all output of the session's open turn so far, or does so when the command that started the turn is
        answered. Called in the engine's thread, by a command."""
        if session.turn is not None:
            self._publish(session.turn)

    def drop(self, session: Session, *, keep_saved: bool = False) -> None:
        """Drops a session that another replica owns, or may own. Its open turn ends with an error. `keep_saved`: see
        `SessionOperations.leave`. Called in the engine's thread, between commands or by one."""
        if session.turn is not None and (mine := self._subscriptions.pop(session.turn.number, None)) is not None:
            mine.refuse(NotAcknowledged(LOST))
        self._engine.sessions.leave(session, keep_saved=keep_saved)
        self._end(self._engine.outcomes.take_ended(), self._engine.outcomes.take_changes())

    def _publish(self, turn: Turn) -> None:
        """Sends the turn's new output to its subscriber. If the subscriber is gone, aborts the turn if it is open."""
        subscription = self._subscriptions.get(turn.number)
        if subscription is None or not subscription.open:
            return
        if turn.state.ended:
            del self._subscriptions[turn.number]
        try:
            subscription.publish()
        except Exception:  # noqa: BLE001 - any failure means the reader is gone
            self._subscriptions.pop(turn.number, None)
            self._give_up(turn)

    def _give_up(self, turn: Turn) -> None:
        if not turn.state.ended and self.stopped is None:
            self._engine.turns.abort(turn.session.id, tenant=turn.session.policy.tenant)

    def _stop(self, stopped: Stopped) -> None:
        with self._lock:
            self.stopped = stopped
        while not self._commands.empty():  # nobody adds any more
            if (command := self._commands.get_nowait()) is not None:
                command.refuse(stopped.error())
        self._announcer.stop(stopped)
        for audit in self._audits:
            audit.set_exception(stopped.error())
        for subscription in self._subscriptions.values():
            subscription.refuse(stopped.interrupted())
        self._subscriptions.clear()
        self._on_stop(stopped)


class _Subscription:
    """A turn's subscriber, and the amount of output that it has received."""

    __slots__ = ("_input_sent", "_sent", "_subscriber", "_turn", "open")

    def __init__(self, turn: Turn, subscriber: Subscriber) -> None:
        self._turn = turn
        self._subscriber = subscriber
        self._sent = len(turn.output)  # more than 0 if another engine began it
        self._input_sent = self._sent > 0
        self.open = False  # set once the command that started the turn is answered

    @property
    def late(self) -> bool:
        """Whether there is output that was not sent."""
        return len(self._turn.output) > self._sent

    def publish(self) -> None:
        turn = self._turn
        tokens = tuple(turn.output[self._sent :])
        logprobs = tuple(turn.output_logprobs[self._sent :]) if turn.output_logprobs else ()
        self._sent += len(tokens)
        scores: tuple[TokenLogprob | None, ...] = ()
        if turn.params.scores_input and not self._input_sent and (tokens or turn.result is not None):
            scores, self._input_sent = turn.input_logprobs, True
        text = turn.text.take_text() if turn.text is not None else ""
        vector = turn.pool.vector() if turn.pool is not None and turn.result is not None else b""
        self._subscriber(Delta(tokens, text, turn.delivered, turn.result, logprobs, scores, vector))

    def refuse(self, error: TenutoError) -> None:
        with suppress(Exception):  # the reader is gone
            self._subscriber(error)


class _Command(Generic[T]):
    """Work for the engine's thread, and the future for its result. A command with an `announcer` shows the state of
    sessions, and is rejected while changes cannot be acknowledged, unless it `ends` a turn. `after_output`: see
    `EngineLoop.execute`."""

    def __init__(
        self,
        work: Callable[[Engine], T],
        future: Future[T],
        announcer: Announcer | None = None,
        *,
        ends: bool = False,
        after_output: bool = False,
    ) -> None:
        self.after_output = after_output
        self._work = work
        self._future = future
        self._announcer = announcer
        self._ends = ends

    @property
    def shows_sessions(self) -> bool:
        return self._announcer is not None

    def run(self, engine: Engine) -> Tell:
        """Runs the work, and returns a function that sets the future. Raises `InvariantError` if the engine is
        inconsistent, before or after the work."""
        if not self._future.set_running_or_notify_cancel():
            return _nothing_to_tell
        if self._announcer is not None and self._announcer.failure is not None and not self._ends:
            return partial(self._tell, None, NotAcknowledged(str(self._announcer.failure)))
        try:
            return partial(self._tell, self._work(engine), None)
        except TenutoError as error:
            return partial(self._tell, None, error)
        except InvariantError as error:
            self._future.set_exception(EngineStopped("the engine stopped", detail=str(error)))
            raise
        except Exception as error:  # noqa: BLE001 - a bug in the work; continues if memory is sound
            self._future.set_exception(error)
            engine.audit()
            return _nothing_to_tell

    def _tell(self, result: T | None, error: TenutoError | None, refusal: TenutoError | None) -> None:
        failure = refusal or error
        if failure is not None:
            self._future.set_exception(failure)
        else:
            self._future.set_result(cast("T", result))

    def refuse(self, error: EngineStopped) -> None:
        if self._future.set_running_or_notify_cancel():
            self._future.set_exception(error)


def _nothing_to_tell(_: TenutoError | None) -> None:
    """The future is cancelled or already set."""
