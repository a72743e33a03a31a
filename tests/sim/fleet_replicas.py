"""Replicas of a fleet in the caller's thread, and their connections, which lose messages; see `tests.sim.fleets`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import partial
from random import Random
from typing import Any, Protocol, TypeVar, cast

import psycopg

from tenuto.base.config import EngineConfig
from tenuto.base.errors import NotAcknowledged, TenutoError
from tenuto.base.fleet_views import MovesView, Place, TenantUse
from tenuto.base.options import TurnParams
from tenuto.base.views import KeptTurn, SessionKey
from tenuto.base.wire.fleet_messages import Locate, TellLoad
from tenuto.base.wire.messages import FindTurn, StartTurn
from tenuto.base.wire.moves import StateOffer
from tenuto.engine.engine import Engine
from tenuto.engine.thread.loop import EngineLoop, Subscriber
from tenuto.memory.memory import session_bytes, units_for_budget
from tenuto.memory.shape import Shape
from tenuto.memory.tiers.contents import NamedUnit
from tenuto.memory.tiers.disk import DiskFailed, UnitFile
from tenuto.memory.tiers.left_state import LeftState
from tenuto.runtime.member import BEATS, Member
from tenuto.runtime.models import Model
from tenuto.runtime.moves import Moves
from tenuto.runtime.saved_states import SavedStates
from tenuto.session.changes import Change
from tenuto.session.journal_rows import Rows, Value
from tenuto.session.postgres.database import Database
from tenuto.session.session import Session
from tenuto.session.turn import Turn
from tenuto.text.stream import TextStream
from tests.carriers import AtOnce
from tests.session.test_journal import Journaled
from tests.sim.disk import FaultyDisk
from tests.sim.shared_store import SharedStore, SimulatedTier

T = TypeVar("T")

LEASE = 1.0
BUDGETS = (600, 10**6)
"""Of disks, in bytes: room for a few sessions, or for all."""
SAVING = 3
"""The steps of an idle engine in which it begins to save state, and notices that it is saved."""


def asked_turn(name: str, given: int, key: str | None, *, resumable: bool) -> StartTurn:
    """Returns the request of a turn with one token as its input, after which the turn is named."""
    once = (key, b"") if key is not None else None
    params, named = TurnParams(max_new_tokens=4, ignore_eos=True), str(given)
    return StartTurn(
        kind="turn", tenant="", session=name, input=(given,), params=params, name=named, once=once, resumable=resumable
    )


class Surroundings(Protocol):
    """The world of a replica: its database, and time. `failure` says whether the next message is lost. `disks`: of all
    replicas that ever lived, by number. `chance`: decides what their disks do. `store`: the store that replicas share
    if none can read the disk of another. `reads_ahead`: whether sessions that move are read before they are held."""

    url: str
    now: float
    dbs: list[Database]
    disks: dict[int, FaultyDisk]
    chance: Random
    store: SharedStore | None
    reads_ahead: bool

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


class WorldClock:
    """The clock of a replica's engine."""

    def __init__(self, world: Surroundings) -> None:
        self._world = world

    def now(self) -> float:
        return self._world.now

    def wall(self) -> float:
        return 1e9 + self._world.now


class Left:
    """The files of another replica, which may remove them meanwhile."""

    def __init__(self, disk: FaultyDisk) -> None:
        self._disk = disk

    def read(self, file: UnitFile, rows: Mapping[int, Sequence[int]]) -> dict[int, list[NamedUnit]]:
        if file.name not in self._disk.files():
            raise DiskFailed("read", f"{file.name} is missing")
        return self._disk.read(file, rows)


class Disks:
    """The disks of all replicas, as `LeftFolders`."""

    def __init__(self, disks: Mapping[int, FaultyDisk]) -> None:
        self._disks = disks

    def of(self, replica: int, key: SessionKey) -> LeftState:
        disk = self._disks[replica]
        return LeftState(disk.index, lambda _: nullcontext(Left(disk)))

    def tidy(self, needed: Callable[[Collection[int]], Collection[int]]) -> None:
        """Does nothing: the world keeps all disks."""


class Readings:
    """The thread of a member that reads the state of claimed sessions, as a list of what it has yet to do."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Session, int, Future[None]]] = []

    def submit(self, _: Callable[..., None], session: Session, owner: int, arrived: Future[None]) -> None:
        self.waiting.append((session, owner, arrived))


class Replica(Journaled):
    """A replica: an engine, its member, and the part of a server that connects them, in the caller's thread."""

    def __init__(self, world: Surroundings, name: str) -> None:
        self.world = world
        self.disk = FaultyDisk(world.chance, swaps=world.store is None)
        self.disk.budget = world.chance.choice(BUDGETS)
        super().__init__()
        self.engine.sessions.recover()
        self.engine.snapshots.pause = self.engine.snapshots.delay = 0.0
        self.name = name
        self.cut_off = self.ended = self._quiet = False
        self.wakes = 0.0  # until when it sleeps
        self.beats = world.now
        self._unwritten: list[Change] = []
        self._lost: set[Session] = set()  # those of which a change was refused
        connect = cast("Callable[[], Database]", lambda: Lossy(world.url, self._fails))
        self.member = Member(connect, "tokens", f"http://{name}", LEASE, lambda: self.world.now, self._wait)
        self.member._engine, self.member._loop = self.engine, cast("EngineLoop", self)
        self.member._edge = TellLoad(open_turns=0, draining=False, moves=MovesView(), tenants={"": TenantUse()})
        loop, model = cast("EngineLoop", self), str(self.engine.vocab_size)
        self.moves = Moves(self.member.ownership, loop, lambda: model, lambda _: None, self.engine.turns.ready)
        world.disks[self.member.number] = self.disk
        self.tier: SimulatedTier | None = None
        if world.store is not None:
            self.tier = SimulatedTier(world.store, self.member.number, self._meanwhile, lambda: self.world.now)
        place = self.tier if self.tier is not None else Disks(world.disks)
        self.states, self.readings = SavedStates([place], cast("EngineLoop", self)), Readings()
        self.states._reading = cast("Any", self.readings)
        self.member.ownership.start(self.engine, loop, self.states)
        world.dbs += [self.member.ownership._replicas.db, self.member._beats.db, self.member.journal._db]

    def _built(self, model: Model, config: EngineConfig) -> Engine:
        spec = model.executor.spec
        shape = Shape.of(config, spec.page_size)
        return Engine(
            model.executor,
            units_for_budget(spec, shape, 2 * session_bytes(spec, shape), expected=config.context_length // 4),
            config,
            vocab_size=model.vocab_size,
            eos_ids=model.eos_ids,
            clock=WorldClock(self.world),
            random=self.world.chance,
            text=partial(TextStream, model.tokenizer) if model.tokenizer is not None else None,
            disk=self.disk,
            carrier=AtOnce(),
            identity="tokens",
        )

    @property
    def taken_over(self) -> int:
        """The number of sessions here that went on with state that others had saved."""
        return self.engine.counts.imports["taken over"]

    def _read(self) -> None:
        """Gives sessions that were claimed the state that their last owners have saved."""
        while self.readings.waiting:
            session, owner, arrived = self.readings.waiting.pop(0)
            self.states.find(session, owner)
            self.states.arrive(session, arrived)

    def rest(self) -> None:
        """Does what nobody waits for: saves what has changed, and reads what is left to read."""
        self._read()
        for _ in range(SAVING):
            self._meanwhile()
        if self.tier is not None:
            self.tier.step(self.world.now)

    def _meanwhile(self) -> None:
        """Does a step that begins no turn."""
        if self.engine.idle:
            self.engine.step()

    def _fails(self) -> str:
        return "before" if self.cut_off else "" if self._quiet else self.world.failure()

    def _wait(self, seconds: float) -> None:
        """Waits in the thread that answers where sessions are, while others go on."""
        self.world.advance(seconds)
        self.tick()

    def tick(self) -> None:
        """Keeps the lease, if it is time and the replica is awake."""
        if self.wakes <= self.world.now and self.beats <= self.world.now:
            self.beats = self.world.now + LEASE / BEATS
            self.member.keep_lease()
            with self._answered():
                self.member.count_unowned()

    def locate(self, name: str) -> Place:
        """Raises `NotAcknowledged`."""
        place = self.member.ownership.locate(Locate(tenant="", session=name), self.world.now + LEASE)
        self.member.ownership.told(("", name), place)
        if self.world.chance.random() < 0.8:  # otherwise others ask meanwhile
            self._read()
        return place

    @contextmanager
    def _answered(self) -> Iterator[None]:
        """Loses no message of the block, unless the replica is cut off."""
        self._quiet = True
        try:
            yield
        finally:
            self._quiet = False

    def reserve(self, move: str, offer: StateOffer) -> None:
        """Reserves room for a session that is to come, which it has read before if it can. A lost message would only
        refuse the move, as others do."""
        read = None
        if self.world.reads_ahead and not self.cut_off:
            with self._answered():
                read = self.moves.read(offer)
        self.moves.reserve(move, offer, read)

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

    def execute(self, work: Callable[[Engine], T], **_: bool) -> Future[T]:
        done = self.call(work)
        try:
            self.write()
        except NotAcknowledged as error:
            done = Future()
            done.set_exception(error)
        return done

    def drop(self, session: Session, *, keep_saved: bool = False) -> None:
        self.engine.sessions.leave(session, keep_saved=keep_saved)

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
