"""The intake: converts the input of turns and drafts to tokens while the engine's thread goes on with its steps, then
hands them to the engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tenuto.base.errors import NotFound, SessionClosed, TenutoError, TurnAborted
from tenuto.base.views import SessionInfo, SessionKey, Ticket
from tenuto.base.wire.messages import Draft, StartTurn
from tenuto.engine.engine import Engine
from tenuto.engine.thread.dispatcher import Dispatcher
from tenuto.engine.thread.loop import EngineLoop, Subscriber
from tenuto.engine.thread.rendering import Basis, Outdated, Prepared
from tenuto.runtime.lanes import LONG, Lane, Lanes
from tenuto.runtime.preparation import Preparer, size_of
from tenuto.session.session import Session

log = logging.getLogger("tenuto.runtime")

SHORT_INPUT = 2**12
"""Input of at most this many characters or tokens is prepared in the calling thread, which takes a millisecond or two;
handing it to another thread could take longer. `LONG` input is prepared only after the engine has confirmed that its
session would accept it."""


@dataclass(slots=True, eq=False)
class Input:
    """A command and its input on their way into the engine. `subscriber` receives the events of the turn that it
    starts. Before the first of them, `answer` is called with the command's answer. If the command fails, `refuse` is
    called with the error instead."""

    command: StartTurn | Draft
    subscriber: Subscriber | None
    answer: Callable[[Any], None]  # takes an answer of the command's type
    refuse: Callable[[BaseException], None]
    size: int = field(init=False)  # see `size_of`
    withdrawn: bool = field(default=False, init=False)
    lane: Lane | None = field(default=None, init=False)  # of its preparation, until `_end`; written by the intake
    number: int = field(default=0, init=False)  # its place in the order of arrival; written by the intake
    meant: Session | None = field(default=None, init=False)  # its session when it came; only for the engine's thread
    met: bool = field(default=False, init=False)  # whether `meant` is set; only for the engine's thread

    def __post_init__(self) -> None:
        self.size = size_of(self.command.input)
        if isinstance(self.command, StartTurn):
            self.size += len(self.command.tools.source) + len(self.command.variables.source)
            self.size += len(self.command.params.prediction)

    @property
    def session(self) -> SessionKey | None:
        """The key of its session; `None` if it opens its own."""
        return self.command.key


class Intake:
    """Prepares inputs and hands them to the engine, for each session in their order of arrival.

    Invariant: for each session, `_pending` has the lane of its inputs and how many are on their way; `_returned` has
    the `number`s of those that the engine gave back to be prepared again, which no later input overtakes. `_lock`
    guards both.
    """

    def __init__(self, dispatcher: Dispatcher, preparer: Preparer, loop: EngineLoop, lanes: Lanes) -> None:
        self._dispatcher = dispatcher
        self._preparer = preparer
        self._loop = loop
        self._lanes = lanes
        self._lock = threading.Lock()
        self._pending: dict[SessionKey, tuple[Lane, int]] = {}
        self._returned: dict[SessionKey, set[int]] = {}
        self._numbers = count(1)
        self._named: dict[str, Input] = {}

    def put(self, item: Input) -> None:
        """Prepares an input and hands it to the engine: at once if it is short and no other input of its session is on
        the way, otherwise in a lane. Not for the engine's thread."""
        with self._lock:
            item.number = next(self._numbers)
            waits = item.session in self._pending
        if item.size > SHORT_INPUT or waits or self._preparer.to_compile(item.command) or not self._take_at_once(item):
            if item.session is not None:
                self._loop.call(lambda engine: _meet(engine, item))  # before another session can get the id
            self._put(item)

    def _put(self, item: Input) -> None:
        with self._lock:
            lane = self._lanes.of(item.size, self._preparer.to_compile(item.command))
            if item.session is not None:
                lane, inputs = self._pending.get(item.session, (lane, 0))
                self._pending[item.session] = lane, inputs + 1
            item.lane = lane
            if item.command.name:
                self._named[item.command.name] = item
        lane.put(item.size, lambda: self._take(item), item.command.tenant)

    def _take_at_once(self, item: Input) -> bool:
        """Prepares and posts an input in the calling thread. Returns False if it needs an answer from the engine first,
        or would be refused."""
        basis = self._guess(item)
        if basis is None:
            return False
        try:
            prepared = self._preparer.prepare(item.command, basis)
        except TenutoError:
            if item.session is None:
                raise
            return False
        self._post(item, prepared)
        return True

    def withdraw(self, name: str) -> bool:
        """Withdraws the input whose command has this name: it is refused unless the engine executes it first. Returns
        whether it was found."""
        with self._lock:
            item = self._named.get(name)
        if item is None:
            return False
        item.withdrawn = True
        return True

    # -- in a lane's thread

    def _take(self, item: Input) -> None:
        try:
            self._require_engine()
            _require_wanted(item)
            self._post(item, self._prepare(item))
        except TenutoError as error:
            self._end(item, finished=True)
            item.refuse(error)
        except Exception as error:  # a bug of ours, which must fail only this request
            log.exception("input could not be taken in")
            self._end(item, finished=True)
            item.refuse(error)

    def _require_engine(self) -> None:
        if self._loop.stopped is not None:
            raise self._loop.stopped.error()

    def _prepare(self, item: Input) -> Prepared:
        """Prepares an input, whose tokens depend on its session's state. Input that is not `LONG` is first prepared for
        a guess of the state. If that fails, and for long input, the engine provides the state, which takes until the
        end of its current step."""
        basis = self._guess(item)
        while True:
            sure = basis is None or item.session is None
            if basis is None:
                basis = self._loop.execute(lambda engine: self._basis(engine, item)).result()
                _require_wanted(item)
            try:
                return self._preparer.prepare(item.command, basis)
            except TenutoError:
                if sure:
                    raise
            basis = None

    def _post(self, item: Input, prepared: Prepared) -> None:
        self._loop.execute(lambda engine: self._begin(engine, item, prepared), lambda done: self._begun(item, done))

    def _guess(self, item: Input) -> Basis | None:
        """Returns the state of the input's session, read from this thread and so perhaps outdated; `None` if only the
        engine can provide it."""
        return self._dispatcher.guess(item.command) if item.session is None or item.size < LONG else None

    # -- in the engine's thread

    def _basis(self, engine: Engine, item: Input) -> Basis:
        _require_meant(engine, item)
        return self._dispatcher.basis(item.command)

    def _begin(self, engine: Engine, item: Input, prepared: Prepared) -> Ticket | SessionInfo | None:
        """Executes the command. Returns `None` if its input must be prepared again, since the state that it was
        prepared for is outdated, or an earlier input has not been executed."""
        _require_wanted(item)
        _meet(engine, item)
        _require_meant(engine, item)
        answer = self._execute(engine, item, prepared) if not self._would_overtake(item) else None
        if answer is None:
            if item.session is not None:
                with self._lock:
                    self._returned.setdefault(item.session, set()).add(item.number)
            return None
        with self._lock:
            self._named.pop(item.command.name, None)  # too late to withdraw it
        return answer

    def _execute(self, engine: Engine, item: Input, prepared: Prepared) -> Ticket | SessionInfo | None:
        command = item.command
        try:
            if isinstance(command, Draft):
                return self._dispatcher.execute(command, prepared)
            ticket = self._dispatcher.execute(command, prepared)
        except Outdated:
            return None
        if item.subscriber is not None:
            self._loop.subscribe(engine.registry.turn(ticket.session, command.tenant), item.subscriber)
        return ticket

    def _would_overtake(self, item: Input) -> bool:
        with self._lock:
            returned = self._returned.get(item.session, ()) if item.session is not None else ()
            return any(number < item.number for number in returned)

    def _begun(self, item: Input, done: Future[Ticket | SessionInfo | None]) -> None:
        error = done.exception()
        answer = done.result() if error is None else None
        self._end(item, finished=error is not None or answer is not None)
        if error is not None:
            item.refuse(error)
        elif answer is not None:
            item.answer(answer)
        else:
            self._put(item)

    def _end(self, item: Input, *, finished: bool) -> None:
        """Records that an input left its lane, and, if `finished`, that it need not be prepared again."""
        with self._lock:
            self._named.pop(item.command.name, None)
            if item.session is not None and item.lane is not None:
                lane, inputs = self._pending.pop(item.session)
                if inputs > 1:
                    self._pending[item.session] = lane, inputs - 1
            item.lane = None
            if finished and item.session in self._returned:
                self._returned[item.session].discard(item.number)
                if not self._returned[item.session]:
                    del self._returned[item.session]


def _require_wanted(item: Input) -> None:
    if item.withdrawn:
        raise TurnAborted("the turn was withdrawn before it began")


def _meet(engine: Engine, item: Input) -> None:
    """Records the session that an input is meant for: the one that has its id now. Later calls do nothing."""
    if not item.met and item.session is not None:
        tenant, session_id = item.session
        item.meant = engine.registry.find(session_id, tenant)  # if not found, the input will be refused
    item.met = True


def _require_meant(engine: Engine, item: Input) -> None:
    """Raises `NotFound` if the input's session did not exist when it came, and `SessionClosed` if another has the id
    now."""
    if item.session is None:
        return
    tenant, session_id = item.session
    session = engine.registry.get(session_id, tenant)
    if item.meant is None:
        raise NotFound(f"there was no session {session_id!r} when this input came")
    if session is not item.meant:
        raise SessionClosed(f"the session {session_id!r} that this input was for is closed, and another has its id now")
