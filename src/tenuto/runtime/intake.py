"""Makes tokens of what commands bring, while the engine's thread goes on with its steps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tenuto.base.errors import NotFound, SessionClosed, TenutoError, TurnAborted
from tenuto.base.turns import Message, TurnInput
from tenuto.base.views import SessionInfo, SessionKey, Ticket
from tenuto.base.wire.messages import Draft, StartTurn
from tenuto.engine.engine import Engine
from tenuto.engine.thread.dispatcher import Dispatcher
from tenuto.engine.thread.loop import EngineLoop, Subscriber
from tenuto.engine.thread.rendering import Basis, Outdated, Prepared
from tenuto.runtime.lanes import LONG, Lane, Lanes
from tenuto.runtime.preparation import Preparer
from tenuto.session.session import Session

log = logging.getLogger("tenuto.runtime")

SHORT_INPUT = 2**12
"""Characters, or tokens, up to which input is prepared by whoever puts it in: that takes a millisecond or two, and
another thread might have to wait longer for its turn. Input that is `LONG` is prepared only after the engine has said
that its session would take it."""


@dataclass(slots=True, eq=False)
class Input:
    """A command's input on its way into the engine. `subscriber`: of the turn that it starts, if it starts one.
    `answer` is called with the command's answer, before anything that the turn brings, or `refuse` with an error."""

    command: StartTurn | Draft
    subscriber: Subscriber | None
    answer: Callable[[Any], None]  # with what a command of this type is answered with
    refuse: Callable[[BaseException], None]
    size: int = field(init=False)  # see `size_of`
    withdrawn: bool = field(default=False, init=False)
    lane: Lane | None = field(default=None, init=False)  # that it is in, or comes from; written by the intake
    number: int = field(default=0, init=False)  # of all inputs, as they came; written by the intake
    meant: Session | None = field(default=None, init=False)  # had the id when it came; the engine's thread alone
    met: bool = field(default=False, init=False)  # `meant` is known

    def __post_init__(self) -> None:
        self.size = size_of(self.command.input)
        if isinstance(self.command, StartTurn):
            self.size += len(self.command.tools.source) + len(self.command.variables.source)

    @property
    def session(self) -> SessionKey | None:
        """`None` for one of its own."""
        return self.command.key


class Intake:
    """Takes input in, in the order in which it came as far as one session is concerned.

    Invariant: `_pending` has how much input of each session is on its way, and in which lane, and `_returned` the
    numbers of what has to be prepared again, none of which is overtaken by a later one; under `_lock`.
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
        """Take it in as soon as possible. For any thread but the engine's."""
        with self._lock:
            item.number = next(self._numbers)
            waits = item.session in self._pending
        if item.size > SHORT_INPUT or waits or self._preparer.to_compile(item.command) or not self._take_at_once(item):
            if item.session is not None:
                self._loop.call(lambda engine: _meet(engine, item))  # before any other session can have the id
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
        """False if the engine has to be asked first, or the input would be refused."""
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
        """Nobody wants this input any more: it is refused, unless it is in the engine by now. Whether there was any."""
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
        except Exception as error:  # our mistake, and one request's
            log.exception("input could not be item in")
            self._end(item, finished=True)
            item.refuse(error)

    def _require_engine(self) -> None:
        if self._loop.stopped is not None:
            raise self._loop.stopped.error()

    def _prepare(self, item: Input) -> Prepared:
        """Short input is prepared against what its session seems to be; only if that does not go well, or it is long,
        the engine is asked, which takes a step."""
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
        """What the input is prepared against, as far as that can be seen from here."""
        return self._dispatcher.guess(item.command) if item.session is None or item.size < LONG else None

    # -- in the engine's thread

    def _basis(self, engine: Engine, item: Input) -> Basis:
        _require_meant(engine, item)
        return self._dispatcher.basis(item.command)

    def _begin(self, engine: Engine, item: Input, prepared: Prepared) -> Ticket | SessionInfo | None:
        """Carry the command out. `None` if its input has to be prepared again."""
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
            self._loop.subscribe(engine.sessions.turn(ticket.session, command.tenant), item.subscriber)
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
        """It is in no lane any more, if it was in one; nor does it come back, if it is finished."""
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


def size_of(given: TurnInput) -> int:
    """Characters of text or messages, or token ids; a message counts for something besides its content."""
    if isinstance(given, str):
        return len(given)
    if given and isinstance(given[0], Message):
        return sum(part.size for part in given if isinstance(part, Message))
    return len(given)


def _require_wanted(item: Input) -> None:
    if item.withdrawn:
        raise TurnAborted("the turn was given up before it began")


def _meet(engine: Engine, item: Input) -> None:
    """The session that has the input's id now is the one that it is meant for, unless that is known."""
    if not item.met and item.session is not None:
        tenant, session_id = item.session
        item.meant = engine.sessions.find(session_id, tenant)  # if there is none, it will be refused
    item.met = True


def _require_meant(engine: Engine, item: Input) -> None:
    """Raises `NotFound`, also if the session was opened since, or `SessionClosed` if another has the id by now."""
    if item.session is None:
        return
    tenant, session_id = item.session
    session = engine.sessions.get(session_id, tenant)
    if item.meant is None:
        raise NotFound(f"there was no session {session_id!r} when this input came")
    if session is not item.meant:
        raise SessionClosed(f"the session with the id {session_id} was another when this input came")
