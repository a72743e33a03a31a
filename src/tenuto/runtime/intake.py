"""Makes tokens of what requests bring, while the engine's thread goes on with its steps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from queue import SimpleQueue

from tenuto.base.errors import EngineStopped, SessionClosed, TenutoError, TurnAborted
from tenuto.base.turns import Message, TurnInput
from tenuto.base.views import SessionKey
from tenuto.engine.chat_engine import ChatEngine
from tenuto.engine.engine import Engine
from tenuto.engine.loop import EngineLoop
from tenuto.engine.rendering import Basis, Prepared
from tenuto.runtime.heap import give_back
from tenuto.session.session import Session
from tenuto.session.turn import Turn
from tenuto.text.prompt import Prompt

log = logging.getLogger("tenuto.runtime")

SHORT_INPUT = 2**12
"""Characters, or tokens, up to which input is prepared by whoever puts it in: that takes a millisecond or two, and
another thread might have to wait longer for its turn."""
LONG_INPUT = 2**15
"""Characters, or tokens: input from this size on has a lane of its own, so that short input does not wait for it, and
is prepared only after the engine has said that its session would take it."""
MESSAGE_SIZE = 2**5
"""Characters for which a message counts even if it is empty: a template writes something around each."""
LARGE_INPUT = 2**18
"""After input of this size, free memory is returned to the system."""


@dataclass(slots=True, eq=False)
class Input:
    """A request's input on its way into the engine.

    `name`: by which it can be withdrawn. `session`: `None` for one of its own. `size`: see
    `size_of`. `basis` says what to prepare it against, in the engine's thread, and raises what the request is refused
    for in any case. `parse` may use the room that a basis has. `begin` takes it in, in the engine's thread; `None` if
    it has to be prepared again. `post` has that done, and `reply` and `refuse` say what came of it."""

    name: str
    session: SessionKey | None
    size: int
    generate: bool
    basis: Callable[[Engine], Basis]
    parse: Callable[[Basis], Prompt]
    begin: Callable[[Engine, Prepared], Turn | None]
    post: Callable[[Callable[[Engine], Turn | None]], Future[Turn | None]]
    reply: Callable[[Turn], None]
    refuse: Callable[[BaseException], None]
    withdrawn: bool = field(default=False, init=False)
    lane: _Lane | None = field(default=None, init=False)  # that it is in, or comes from; written by the intake
    number: int = field(default=0, init=False)  # of all inputs, as they came; written by the intake
    meant: Session | None = field(default=None, init=False)  # had the id when it came; the engine's thread alone
    met: bool = field(default=False, init=False)  # `meant` is known


class Intake:
    """Takes input in, in the order in which it came as far as one session is concerned.

    Invariant: `_pending` has how much input of each session is on its way, and in which lane, and `_returned` the
    numbers of what has to be prepared again, none of which is overtaken by a later one; under `_lock`.
    """

    def __init__(self, chats: ChatEngine, loop: EngineLoop) -> None:
        self._chats = chats
        self._loop = loop
        self._lock = threading.Lock()
        self._pending: dict[SessionKey, tuple[_Lane, int]] = {}
        self._returned: dict[SessionKey, set[int]] = {}
        self._numbers = count(1)
        self._named: dict[str, Input] = {}
        self._short, self._long = _Lane("short", self._take), _Lane("long", self._take)

    def put(self, taken: Input) -> None:
        """Take it in as soon as possible. For any thread but the engine's."""
        with self._lock:
            taken.number = next(self._numbers)
            waits = taken.session in self._pending
        if taken.size > SHORT_INPUT or waits or not self._take_at_once(taken):
            if taken.session is not None:
                self._loop.call(lambda engine: _meet(engine, taken))  # before any other session can have the id
            self._put(taken)

    def _put(self, taken: Input) -> None:
        with self._lock:
            lane = self._long if taken.size >= LONG_INPUT else self._short
            if taken.session is not None:
                lane, inputs = self._pending.get(taken.session, (lane, 0))
                self._pending[taken.session] = lane, inputs + 1
            taken.lane = lane
            if taken.name:
                self._named[taken.name] = taken
        lane.put(taken)

    def _take_at_once(self, taken: Input) -> bool:
        """False if the engine has to be asked first, or the input would be refused."""
        basis = self._guess(taken)
        if basis is None:
            return False
        try:
            prepared = self._chats.prepare(basis, taken.parse(basis), generate=taken.generate)
        except TenutoError:
            if taken.session is None:
                raise
            return False
        self._post(taken, prepared)
        return True

    def withdraw(self, name: str) -> bool:
        """Nobody wants this input any more: it is refused, unless it is in the engine by now. Whether there was any."""
        with self._lock:
            taken = self._named.get(name)
        if taken is None:
            return False
        taken.withdrawn = True
        return True

    def close(self) -> None:
        """Take in no more, and wait for what is being prepared."""
        for lane in (self._short, self._long):
            lane.close()

    # -- in a lane's thread

    def _take(self, taken: Input) -> None:
        try:
            self._require_engine()
            _require_wanted(taken)
            self._post(taken, self._prepare(taken))
        except TenutoError as error:
            self._end(taken, finished=True)
            taken.refuse(error)
        except Exception as error:  # our mistake, and one request's
            log.exception("input could not be taken in")
            self._end(taken, finished=True)
            taken.refuse(error)

    def _require_engine(self) -> None:
        if self._loop.stopped is not None:
            raise EngineStopped(self._loop.stopped)

    def _prepare(self, taken: Input) -> Prepared:
        """Short input is prepared against what its session seems to be; only if that does not go well, or it is long,
        the engine is asked, which takes a step."""
        basis = self._guess(taken)
        while True:
            sure = basis is None or taken.session is None
            if basis is None:
                basis = self._loop.call(lambda engine: _basis(engine, taken)).result()
                _require_wanted(taken)
            try:
                return self._chats.prepare(basis, taken.parse(basis), generate=taken.generate)
            except TenutoError:
                if sure:
                    raise
            basis = None

    def _post(self, taken: Input, prepared: Prepared) -> None:
        posted = taken.post(lambda engine: self._begin(engine, taken, prepared))
        posted.add_done_callback(lambda done: self._begun(taken, done))

    def _guess(self, taken: Input) -> Basis | None:
        if taken.session is None:
            return self._chats.opening()
        tenant, session_id = taken.session
        return self._chats.guess(session_id, tenant=tenant) if taken.size < LONG_INPUT else None

    # -- in the engine's thread

    def _begin(self, engine: Engine, taken: Input, prepared: Prepared) -> Turn | None:
        _require_wanted(taken)
        _meet(engine, taken)
        _require_meant(engine, taken)
        turn = taken.begin(engine, prepared) if not self._would_overtake(taken) else None
        if turn is not None:
            taken.reply(turn)  # before anything that the turn brings
        elif taken.session is not None:
            with self._lock:
                self._returned.setdefault(taken.session, set()).add(taken.number)
        return turn

    def _would_overtake(self, taken: Input) -> bool:
        with self._lock:
            returned = self._returned.get(taken.session, ()) if taken.session is not None else ()
            return any(number < taken.number for number in returned)

    def _begun(self, taken: Input, done: Future[Turn | None]) -> None:
        error = done.exception()
        self._end(taken, finished=error is not None or done.result() is not None)
        if error is not None:
            taken.refuse(error)
        elif done.result() is None:
            self._put(taken)

    def _end(self, taken: Input, *, finished: bool) -> None:
        """It is in no lane any more, if it was in one; nor does it come back, if it is finished."""
        with self._lock:
            self._named.pop(taken.name, None)
            if taken.session is not None and taken.lane is not None:
                lane, inputs = self._pending.pop(taken.session)
                if inputs > 1:
                    self._pending[taken.session] = lane, inputs - 1
            taken.lane = None
            if finished and taken.session in self._returned:
                self._returned[taken.session].discard(taken.number)
                if not self._returned[taken.session]:
                    del self._returned[taken.session]


class _Lane:
    """A thread that takes one after the other."""

    def __init__(self, name: str, take: Callable[[Input], None]) -> None:
        self._waiting: SimpleQueue[Input | None] = SimpleQueue()
        self._take = take
        self._thread = threading.Thread(target=self._run, name=f"tenuto-intake-{name}", daemon=True)
        self._thread.start()

    def put(self, taken: Input) -> None:
        self._waiting.put(taken)

    def close(self) -> None:
        self._waiting.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while (taken := self._waiting.get()) is not None:
            large = taken.size >= LARGE_INPUT
            self._take(taken)
            del taken  # the next may be long in coming
            if large:
                give_back()


def size_of(given: TurnInput) -> int:
    """Characters of text or messages, or token ids; a message counts `MESSAGE_SIZE` besides its content."""
    if isinstance(given, str):
        return len(given)
    if given and isinstance(given[0], Message):
        return sum(MESSAGE_SIZE + len(part.content) for part in given if isinstance(part, Message))
    return len(given)


def _require_wanted(taken: Input) -> None:
    if taken.withdrawn:
        raise TurnAborted("the turn was given up before it began")


def _basis(engine: Engine, taken: Input) -> Basis:
    _require_meant(engine, taken)
    return taken.basis(engine)


def _meet(engine: Engine, taken: Input) -> None:
    """The session that has the input's id now is the one that it is meant for, unless that is known."""
    if not taken.met and taken.session is not None:
        tenant, session_id = taken.session
        taken.meant = engine.sessions.find(session_id, tenant)  # if there is none, it will be refused
    taken.met = True


def _require_meant(engine: Engine, taken: Input) -> None:
    """Raises `NotFound`, or `SessionClosed` if another session has the id by now."""
    if taken.session is None:
        return
    tenant, session_id = taken.session
    if engine.sessions.get(session_id, tenant) is not taken.meant:
        raise SessionClosed(f"the session with the id {session_id} was another when this input came")
