"""Replicas of a fleet in the caller's thread, and their connections, which lose messages; see `tests.sim.fleets`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Protocol, TypeVar, cast

import psycopg

from tenuto.base.errors import NotAcknowledged, TenutoError
from tenuto.base.options import TurnParams
from tenuto.base.views import KeptTurn, MovesView, Place, TenantUse
from tenuto.base.wire.messages import FindTurn, Locate, StartTurn, TellLoad
from tenuto.engine.engine import Engine
from tenuto.engine.thread.loop import EngineLoop, Subscriber
from tenuto.runtime.member import BEATS, Member
from tenuto.runtime.moves import Moves
from tenuto.session.changes import Change
from tenuto.session.journal_rows import Rows, Value
from tenuto.session.postgres.database import Database
from tenuto.session.session import Session
from tenuto.session.turn import Turn
from tests.session.test_journal import Journaled

T = TypeVar("T")

LEASE = 1.0


def asked_turn(name: str, given: int, key: str | None, *, resumable: bool) -> StartTurn:
    """Returns the request of a turn with one token as its input, after which the turn is named."""
    once = (key, b"") if key is not None else None
    params, named = TurnParams(max_new_tokens=4, ignore_eos=True), str(given)
    return StartTurn(
        kind="turn", tenant="", session=name, input=(given,), params=params, name=named, once=once, resumable=resumable
    )


class Surroundings(Protocol):
    """The world of a replica: its database, and time. `failure` says whether the next message is lost."""

    url: str
    now: float
    dbs: list[Database]

    def failure(self) -> str: ...

    def advance(self, seconds: float) -> None: ...


class Lossy(Database):
    """A connection on which statements and commits may fail before they are carried out, or after."""

    idle_seconds = 0  # the process may be stopped for any time

    def __init__(self, url: str, fails: Callable[[], str]) -> None:
        super().__init__(url)
        self._fails = fails
        self._inside = False

    @contextmanager
    def transaction(self) -> Iterator[None]:
        failure = self._failure()
        with super().transaction():
            self._inside = True
            try:
                yield
            finally:
                self._inside = False
        self._lose(failure)

    def execute(self, query: str, values: Sequence[Value] = (), /) -> Rows:
        failure = "" if self._inside else self._failure()
        found = super().execute(query, values)
        self._lose(failure)
        return found

    def _failure(self) -> str:
        if (failure := self._fails()) == "before":
            raise psycopg.OperationalError("the request is lost")
        return failure

    def _lose(self, failure: str) -> None:
        if failure:
            raise psycopg.OperationalError("the confirmation is lost")


class Replica(Journaled):
    """A replica: an engine, its member, and the part of a server that connects them, in the caller's thread."""

    def __init__(self, world: Surroundings, name: str) -> None:
        super().__init__()
        self.world = world
        self.name = name
        self.cut_off = self.ended = self._counting = False
        self.wakes = 0.0  # until when it sleeps
        self.beats = world.now
        self._unwritten: list[Change] = []
        self._lost: set[Session] = set()  # those of which a change was refused
        connect = cast("Callable[[], Database]", lambda: Lossy(world.url, self._fails))
        self.member = Member(connect, "tokens", f"http://{name}", LEASE, lambda: self.world.now, self._wait)
        self.member._engine, self.member._loop = self.engine, cast("EngineLoop", self)
        self.member._edge = TellLoad(open_turns=0, draining=False, moves=MovesView(), tenants={"": TenantUse()})
        loop, model = cast("EngineLoop", self), str(self.engine.vocab_size)
        self.moves = Moves(self.member, loop, lambda: model, lambda _: None, self.engine.turns.ready)
        world.dbs += [self.member._asks.db, self.member._beats.db, self.member.journal._db]

    def _fails(self) -> str:
        return "before" if self.cut_off else "" if self._counting else self.world.failure()

    def _wait(self, seconds: float) -> None:
        """Waits in the thread that answers where sessions are, while others go on."""
        self.world.advance(seconds)
        self.tick()

    def tick(self) -> None:
        """Keeps the lease, if it is time and the replica is awake."""
        if self.wakes <= self.world.now and self.beats <= self.world.now:
            self.beats = self.world.now + LEASE / BEATS
            self.member.keep_lease()
            self._counting = True
            self.member.count_unowned()
            self._counting = False

    def locate(self, name: str) -> Place:
        """Raises `NotAcknowledged`."""
        return self.member.locate(Locate(tenant="", session=name), self.world.now + LEASE)

    def start(self, command: StartTurn) -> None:
        """Starts a turn of tokens."""
        prompt = self.prompt([token for token in command.input if isinstance(token, int)])
        self.dispatcher.execute(command, self.renderer.prepare(self.dispatcher.basis(command), prompt, generate=True))

    def find(self, name: str, key: str) -> KeptTurn | None:
        """Returns the session's committed turn with an idempotency key."""
        return self.dispatcher.execute(FindTurn(tenant="", session=name, once=key)).turn

    # -- the loop, as the member uses it

    def call(self, work: Callable[[Engine], T]) -> Future[T]:
        done: Future[T] = Future()
        try:
            done.set_result(work(self.engine))
        except TenutoError as error:
            done.set_exception(error)
        return done

    def execute(self, work: Callable[[Engine], T]) -> Future[T]:
        done = self.call(work)
        try:
            self.write()
        except NotAcknowledged as error:
            done = Future()
            done.set_exception(error)
        return done

    def drop(self, session: Session) -> None:
        self.engine.sessions.leave(session)

    def publish(self, session: Session) -> None:
        """Nobody reads output."""

    def subscribe(self, turn: Turn, subscriber: Subscriber) -> None:
        """Nobody reads output."""

    def request_stop(self) -> None:
        self.ended = True

    def acknowledges(self, session: Session) -> bool:
        """Writes all changes so far; returns whether those of this session were its owner's. Raises
        `NotAcknowledged`."""
        self.write()
        return session not in self._lost

    def write(self) -> None:
        """Writes all changes so far, and drops the sessions that others own. What has failed is repeated as it was,
        before what has changed since. Raises `NotAcknowledged`."""
        self._unwritten = self._unwritten or self.new_changes()
        while self._unwritten:
            try:
                refused = self.member.journal.write(self._unwritten)
            except psycopg.Error as error:
                raise NotAcknowledged(str(error)) from error
            self._lost |= refused
            for session in refused:
                self.drop(session)
            self._unwritten = self.new_changes()
