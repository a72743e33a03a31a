"""The process as a replica of a fleet: it keeps its lease, and takes sessions over when they are needed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import msgspec

from tenuto.base.errors import AlreadyExists, ConfigError, EngineStopped, NotAcknowledged, SessionDamaged, TenutoError
from tenuto.base.views import (
    FleetView,
    Membership,
    MovesView,
    OwnerView,
    Place,
    ReplicaLoad,
    SessionKey,
    SessionPage,
)
from tenuto.base.wire.fleet_messages import CheckLease, Enter, FindOwner, GetFleet, ListUnowned, Locate, TellLoad
from tenuto.engine.engine import Engine
from tenuto.engine.thread.loop import EngineLoop
from tenuto.runtime.answering import answered
from tenuto.runtime.burden import load_of
from tenuto.runtime.folders import LeftFolders
from tenuto.runtime.replica_lease import ReplicaLease, awake_or_not
from tenuto.runtime.saved_states import SavedStates
from tenuto.runtime.shared_objects import SharedObjects
from tenuto.runtime.tenant_counts import TenantCounts
from tenuto.session.postgres.database import Database
from tenuto.session.postgres.journal import PostgresJournal
from tenuto.session.postgres.objects import Objects
from tenuto.session.postgres.replicas import Owned, ReadSession, Replicas
from tenuto.session.records import SavedSession
from tenuto.session.session import Session

log = logging.getLogger("tenuto.fleet")

OfFleet = Locate | FindOwner | GetFleet | CheckLease | Enter | TellLoad | ListUnowned
"""Requests about the fleet."""
BEATS = 4
"""The number of heartbeats in the time of a lease."""
SWEEP_SECONDS = 10.0
"""How often to look for sessions whose owner is gone, and whose time to live is over."""
SWEPT = 64
"""How many such sessions to take over at a time."""
ATTEMPTS = 4
"""How often to look for a session that changes its owner meanwhile."""


class _Change(NamedTuple):
    """A change of a session's owner to this replica, as it begins. `owner`: who owns the session before. `saved_by`:
    the replica that may have saved its state. `deadline`: until when to wait for the lease. `lapses`: of the lease."""

    key: SessionKey
    owner: int | None
    saved_by: int | None
    deadline: float
    lapses: int


class Member:
    """The part of this process in its fleet."""

    def __init__(
        self,
        connect: Callable[[], Database],
        fingerprint: str,
        advertised: str,
        lease: float,
        now: Callable[[], float] = awake_or_not,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Joins the fleet. `connect`: returns a connection to its database. `advertised`: where other replicas reach
        this one. `lease`: seconds. `now`: a clock that goes on while the process sleeps. Raises `ConfigError` or
        `ExtraMissing`."""
        self._lease = ReplicaLease(lease, now, sleep)
        self._asks = Replicas(connect(), fingerprint)
        self._join(advertised)
        number = self._asks.number
        self.journal = PostgresJournal(connect(), fingerprint, number)
        self._beats = Replicas(connect(), fingerprint, number)
        self.objects = SharedObjects(Objects(connect()))
        self._asking = ThreadPoolExecutor(1, "tenuto-fleet")  # the only user of `_asks`
        self._beating = threading.Thread(target=self._beat_on, name="tenuto-heartbeat", daemon=True)
        self._failing = False
        self._settling = threading.Lock()  # held while epochs here and in the database are compared, or changed
        self._edge = TellLoad(open_turns=0, draining=False, moves=MovesView())  # what the edge has told last
        self._counts = TenantCounts(lease, now)
        self._load = ReplicaLoad()
        self._asked_load = False
        self._saved: SavedStates | None = None
        # Claimed sessions that do not fit here, to be given up: with their epochs, and the replicas with their state.
        self._returned: list[tuple[SessionKey, int, int | None]] = []
        # Invariant: a session that was claimed with an open turn is in `_untold`, with its epoch and the turn's
        # request, from before it is here until the edge was told of that turn. Nobody is told that it is here without
        # the turn, since a repeated request would start it a second time.
        self._untold: dict[SessionKey, tuple[int, bytes]] = {}

    def _join(self, advertised: str) -> None:
        for last in (False, True):  # a machine that pauses may lose its connection
            try:
                self._asks.join(advertised, self._lease.seconds)
            except self._asks.db.errors as error:
                if last:
                    raise ConfigError(f"the database {self._asks.db.place} cannot be used: {error}") from error
            else:
                return

    def start(self, engine: Engine, loop: EngineLoop, places: Sequence[LeftFolders]) -> None:
        """Keeps the lease from now on, and restores sessions in `engine`, whose thread is that of `loop`. `places`:
        where replicas save state."""
        self._engine, self._loop = engine, loop
        self._saved = SavedStates(places, loop) if places else None
        self._beating.start()

    def close(self) -> None:
        """Ends the lease, so that others take the sessions over at once."""
        self._lease.closing.set()
        if self._beating.ident is not None:
            self._beating.join()
        if self._saved is not None:
            self._saved.close()
        self._asking.shutdown()
        self.objects.close()
        with suppress(self._asks.db.errors):
            self._asks.end()
        self._asks.db.close()
        self._beats.db.close()

    def take(self, request: OfFleet, answer: Callable[[Any], None], refuse: Callable[[BaseException], None]) -> None:
        """Answers a request, now or later."""
        match request:
            case Enter():
                answer(Membership(replica=self._asks.number, secret=self._asks.secret, lease=self._lease.seconds))
            case Locate() if self._is_here(request) and self._lease.holds() and _key(request) not in self._untold:
                self._once_here(request, answer, Place(exists=True))
            case Locate():
                locate = partial(self.locate, request, self._lease.deadline())
                self._asking.submit(answered, locate, partial(self._once_here, request, answer), refuse)
            case TellLoad():
                self._edge = request
                answer(dict(self._engine.registry.elsewhere))
            case FindOwner():
                self._asking.submit(answered, partial(self._owner, request), answer, refuse)
            case CheckLease():
                answer(self._lease.holds())
            case GetFleet():
                self._asking.submit(answered, self._view, answer, refuse)
            case ListUnowned():
                self._asking.submit(answered, partial(self._unowned, request), answer, refuse)

    # -- the lease

    def _beat_on(self) -> None:
        swept = self._lease.now()
        while not self._lease.closing.wait(self._lease.seconds / BEATS):
            with suppress(EngineStopped):
                self.keep_lease()
            self._asking.submit(self.count_unowned)
            if self._lease.now() > swept + SWEEP_SECONDS:
                swept = self._lease.now()
                self._asking.submit(self._sweep)
                if self._saved is not None:
                    self._saved.tidy(lambda replicas: self._asking.submit(self._asks.needed, replicas).result())

    def keep_lease(self) -> None:
        """Prolongs the lease, if the database can be asked. Called `BEATS` times in a lease. Raises `EngineStopped`."""
        try:
            self._beat()
        except self._beats.db.errors as error:
            if not self._failing:
                log.error("the lease cannot be prolonged: %s", error)  # noqa: TRY400 - no bug, so no traceback
            self._failing = True
        else:
            self._failing = False

    def _beat(self) -> None:
        """Prolongs the lease. If sessions may have been claimed since the last call, also drops those."""
        began, sure = self._lease.begin_beat()
        registry = self._engine.registry
        if (beat := self._beats.beat(self._said(), self._counts.told(registry, self._edge.tenants))) is None:
            log.error("another replica has started at the address of this one, which ends")
            self._loop.request_stop()
            return
        self._counts.hear(registry, beat.others)
        if beat.lost or not sure:
            self._lease.lapses += 1
            with self._settling:
                with self.journal.writing:
                    known = self._loop.call(_epochs).result()
                owned = self._beats.epochs()
                self._loop.call(partial(self._drop_lost, known, owned)).result()
        while self._returned:
            self._beats.give_up(*self._returned[0])
            self._returned.pop(0)
        self._lease.prolong(began)

    def _drop_lost(self, known: dict[Session, int], owned: dict[SessionKey, int], _: Engine) -> None:
        """Drops the sessions that are known, and not `owned` any more."""
        for session, epoch in known.items():
            if owned.get(session.key) != epoch:
                self._loop.drop(session)

    def count_unowned(self) -> None:
        """Counts sessions that no live replica owns, if it is time. Called as often as `keep_lease`."""
        self._counts.count_unowned(self._asks, self._engine.registry, self._edge.tenants)

    def _said(self) -> str:
        """Returns a `ReplicaLoad` in JSON for the fleet. Also asks the engine for the next one, since its steps may
        take longer than a lease."""
        if not self._asked_load:
            self._asked_load = True
            self._loop.call(load_of).add_done_callback(self._take_load)
        edge = self._edge
        more = {"open_turns": edge.open_turns, "draining": edge.draining, "moves": edge.moves}
        return msgspec.json.encode(msgspec.structs.replace(self._load, **more)).decode()

    def _take_load(self, done: Future[ReplicaLoad]) -> None:
        self._asked_load = False
        if done.exception() is None:
            self._load = done.result()

    # -- sessions

    def _is_here(self, request: Locate) -> bool:
        return self._engine.registry.find(request.session, request.tenant) is not None

    def _view(self) -> FleetView:
        with self._asked():
            return FleetView(replica=self._asks.number, replicas=self._asks.all())

    def _unowned(self, request: ListUnowned) -> SessionPage:
        with self._asked():
            found, more = self._asks.unowned(request.tenant, request.after, request.limit)
        context = self._engine.registry.context_length
        return SessionPage(sessions=[session.info(context) for session in found], more=more)

    def _owner(self, request: FindOwner) -> OwnerView:
        with self._asked():
            seen = self._asks.find((request.tenant, request.session))
        return OwnerView(session=request.session, url=seen.url if seen is not None and seen.live else None)

    def locate(self, request: Locate, deadline: float) -> Place:
        """Finds a session, and becomes its owner if it has none. `deadline`: until when to wait for a lease."""
        key = _key(request)
        with self._asked():
            for _ in range(ATTEMPTS):
                if self._is_here(request):
                    self._lease.require(deadline)
                    return self._here(key)
                if self._lease.now() > deadline and self._failing:
                    raise NotAcknowledged("the database of the fleet cannot be asked; ask again")
                if (seen := self._asks.find(key)) is None:
                    return self._nowhere(key)
                if seen.live and seen.owner != self._asks.number:
                    return Place(exists=True, url=seen.url)
                if seen.owner == self._asks.number:
                    self._loop.execute(lambda _: None).result()  # it may be closed, which is not written yet
                    if self._is_here(request) or self._asks.find(key) != seen:
                        continue
                if (place := self._claim(key, seen, deadline)) is not None:
                    return place
        raise NotAcknowledged(f"session {request.session!r} changes its owner; ask again")

    def _once_here(self, request: Locate, answer: Callable[[Place], None], place: Place) -> None:
        """Answers where a session is, once it has its state."""

        def tell() -> None:
            answer(place)
            self.told(_key(request), place)

        if self._saved is None:
            tell()
        else:
            self._saved.once_here(_key(request), tell)

    def told(self, key: SessionKey, place: Place) -> None:
        """Records that the edge was told where a session is."""
        if place.begun is not None:
            self._untold.pop(key, None)

    def _here(self, key: SessionKey) -> Place:
        """Returns the place of a session that is here, with its open turn if the edge was not told of that."""
        session, (epoch, begun) = self._engine.registry.find(key[1], key[0]), self._untold.get(key, (0, None))
        return Place(exists=True, begun=begun if session is not None and session.epoch == epoch else None)

    def _instead(self) -> str | None:
        """Returns the address of a replica to claim a session in place of this one, if this one is draining."""
        if not self._edge.draining:
            return None
        others = (each for each in self._asks.all() if each.live and not each.draining)
        return next((each.url for each in others if each.replica != self._asks.number), None)

    def _sweep(self) -> None:
        """Takes over sessions whose owner is gone, and whose time to live is over, so that they are closed."""
        try:
            found = self._asks.expired(SWEPT)
        except self._asks.db.errors as error:
            log.warning("sessions whose time is over cannot be found: %s", error)
            return
        for tenant, session in found:
            try:
                self.locate(Locate(tenant=tenant, session=session), self._lease.deadline())
            except TenutoError as error:
                reason = {"session": session, "reason": str(error)}
                log.warning("a session whose time is over cannot be closed", extra=reason)

    def _nowhere(self, key: SessionKey) -> Place:
        """Answers that there is no such session, also none that has left."""
        self._loop.call(lambda engine: engine.registry.forget_left(key)).result()
        return Place(exists=False)

    def _claim(self, key: SessionKey, seen: Owned, deadline: float) -> Place | None:
        """Takes a session over and restores it; `None` if another replica did. If this replica is draining, names
        another one to do that."""
        if seen.owner != self._asks.number and (url := self._instead()) is not None:
            return Place(exists=True, url=url)
        change = _Change(key, seen.owner, self._saved_by(key, seen), deadline, self._lease.lapses)
        try:
            saved = self._asks.claim(key, seen)
        except SessionDamaged as error:
            log.error("a damaged session is not served", extra={"session": key[1], "reason": str(error)})  # noqa: TRY400
            raise
        if saved is None:
            return None
        self._untold.pop(key, None)
        if saved.begun is not None:
            self._untold[key] = saved.epoch, saved.begun
        if (session := self._come(change, saved, restored)) is None:
            return None
        if self._saved is not None and change.saved_by is not None:
            self._saved.begin(session, change.saved_by)
        log.info("session taken over", extra={"session": key[1], "owner": seen.owner, "epoch": saved.epoch})
        return Place(exists=True, begun=saved.begun)

    def _come(
        self, change: _Change, saved: SavedSession, accept: Callable[[Engine, SavedSession], Session]
    ) -> Session | None:
        """Lets the engine `accept` a session, whose owner this replica has become. Returns `None` if another one may
        have claimed it since. After an error it is given up with the next heartbeat."""
        given_up = (change.key, saved.epoch, change.saved_by)
        try:
            session = self._loop.call(partial(self._count, change, saved, accept)).result()
        except TenutoError:
            self._returned.append(given_up)
            raise
        try:
            self._lease.require(change.deadline)
        except NotAcknowledged:  # so that the next claim finds the open turn's request
            self._loop.call(lambda _: self._loop.drop(session)).result()
            self._returned.append(given_up)
            raise
        if self._lease.lapses != change.lapses:  # it may have been claimed again meanwhile
            self._loop.call(lambda _: self._loop.drop(session)).result()
            return None
        return session

    def _count(
        self, change: _Change, saved: SavedSession, accept: Callable[[Engine, SavedSession], Session], engine: Engine
    ) -> Session:
        """Lets the engine `accept` a session, which is counted here from now on if another replica has counted it."""
        session = accept(engine, saved)
        if change.owner != self._asks.number:
            self._counts.came(engine.registry, session)
        return session

    def _saved_by(self, key: SessionKey, seen: Owned) -> int | None:
        """Returns the other replica that may have saved a session's state, if there is one."""
        if seen.owner == self._asks.number:  # it did not fit here when it was claimed before
            return next((by for other, epoch, by in self._returned if (other, epoch) == (key, seen.epoch)), None)
        return seen.saved_by if seen.saved_by != self._asks.number else None

    # -- moves of sessions between replicas

    def later(self, work: Callable[[], None]) -> None:
        """Runs `work` in the thread that asks the database, in which no session is claimed meanwhile."""
        self._asking.submit(work)

    def read(self, key: SessionKey) -> ReadSession | None:
        """Reads a session that is to move here, so that `receive` takes less time; `None` if the database does not have
        it yet. Raises `NotAcknowledged` if the database cannot be asked. Runs in the thread of `later`."""
        with self._asked():
            return self._asks.read(key)

    def receive(
        self,
        key: SessionKey,
        owner: int,
        epoch: int,
        accept: Callable[[Engine, SavedSession], Session],
        read: ReadSession | None,
    ) -> Session:
        """Becomes the owner of a session that its owner holds in `epoch`, and lets the engine `accept` it. `read`: the
        session as `read` has returned it. Raises `NotAcknowledged` if that is impossible, or it is unknown whether it
        has happened. Runs in the thread of `later`."""
        if self._engine.registry.find(key[1], key[0]) is not None:
            raise AlreadyExists(f"session {key[1]!r} is here")
        change = _Change(key, owner, None, self._lease.deadline(), self._lease.lapses)
        self._lease.require(change.deadline)
        with self._asked():
            saved = self._asks.take(key, owner, epoch, read)
        if saved is None:
            raise NotAcknowledged(f"session {key[1]!r} has changed its owner, or its move has been given up")
        if (session := self._come(change, saved, accept)) is None:
            raise NotAcknowledged(f"session {key[1]!r} changes its owner; ask again")
        return session

    def keep(self, session: Session) -> bool:
        """Makes sure that no replica can `receive` a session any more that is held here. Returns whether this replica
        is its owner. Raises `NotAcknowledged` if that is unknown. Runs in the thread of `later`."""
        with self._asked(), self._settling:
            epoch = self._asks.keep(session.key)
            if epoch is not None:
                session.epoch = epoch
        return epoch is not None

    def give_up(self, session: Session) -> None:
        """Gives up a session that is held here, and whose saved state stays. Raises `NotAcknowledged` if it is unknown
        whether that has happened. Runs in the thread of `later`."""
        with self._asked():
            self._asks.give_up(session.key, session.epoch, self._asks.number)

    @property
    def number(self) -> int:
        """The number of this replica."""
        return self._asks.number

    @property
    def secret(self) -> str:
        """The secret of the fleet that its database has."""
        return self._asks.secret

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """Raises errors of the database as `NotAcknowledged`."""
        try:
            yield
        except self._asks.db.errors as error:
            place = self._asks.db.place
            raise NotAcknowledged(f"the database {place} cannot be asked who owns sessions: {error}") from error


def _key(request: Locate) -> SessionKey:
    return request.tenant, request.session


def restored(engine: Engine, saved: SavedSession) -> Session:
    """Restores a session of the fleet's database."""
    return engine.sessions.restore(saved, journaled=True)


def _epochs(engine: Engine) -> dict[Session, int]:
    """Returns the epochs in which the sessions in memory are owned; without those that are not in the database yet."""
    return {session: session.epoch for session in engine.registry if session.epoch}
