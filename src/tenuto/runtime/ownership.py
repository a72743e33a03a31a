"""The sessions that a replica owns: finds owners in the fleet's database, and makes the replica the owner of sessions
that are needed here."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

from tenuto.base.errors import AlreadyExists, NotAcknowledged, SessionDamaged, TenutoError
from tenuto.base.fleet_views import FleetView, OwnerView, Place, Uses
from tenuto.base.views import SessionKey, SessionPage
from tenuto.base.wire.fleet_messages import FindOwner, GetFleet, ListUnowned, Locate
from tenuto.engine.engine import Engine
from tenuto.engine.thread.loop import EngineLoop
from tenuto.runtime.answering import answered
from tenuto.runtime.replica_lease import ReplicaLease
from tenuto.runtime.saved_states import SavedStates
from tenuto.runtime.tenant_counts import TenantCounts
from tenuto.session.postgres.replicas import Owned, ReadSession, Replicas
from tenuto.session.records import SavedSession
from tenuto.session.session import Session

log = logging.getLogger("tenuto.fleet")

OfOwners = Locate | FindOwner | GetFleet | ListUnowned
"""Requests about owners of sessions."""
SWEPT = 64
"""The most expired sessions that are taken over at a time."""
ATTEMPTS = 4
"""How often a session is looked for again because its owner has changed meanwhile."""

Accept = Callable[[Engine, SavedSession], Session]
"""Opens a session in an engine, in the engine's thread."""


class _Change(NamedTuple):
    """An attempt to become a session's owner. `owner`: its owner so far, if it has one. `saved_by`: another replica
    that may have saved its state. `deadline`: when to stop waiting for the lease. `lapses`: those of the lease when the
    attempt began."""

    key: SessionKey
    owner: int | None
    saved_by: int | None
    deadline: float
    lapses: int


class Ownership:
    """Finds the owners of sessions, and makes this replica the owner where one is missing. It claims sessions that no
    live replica owns, receives those that move here, and keeps or gives up its own.

    Only one thread, that of `later`, uses the database.
    """

    def __init__(self, replicas: Replicas, lease: ReplicaLease, counts: TenantCounts) -> None:
        """`replicas`: of a replica that has joined; for this object alone. `counts`: of the sessions that come."""
        self.number = replicas.number
        self.draining = False  # whether others should claim sessions in place of this replica; written by `Member`
        self.settling = threading.Lock()  # held while epochs here and in the database are compared, or changed
        self._replicas = replicas
        self._lease = lease
        self._counts = counts
        self._asking = ThreadPoolExecutor(1, "tenuto-fleet")  # the only user of `_replicas`
        self._saved: SavedStates | None = None
        # Claimed sessions that could not be opened here, and are to be given up: each with its epoch, and the replica
        # that has its state.
        self._unopened: list[tuple[SessionKey, int, int | None]] = []
        # Invariant: a session that was claimed with an open turn is in `_untold`, with its epoch and the turn's
        # request, from before it is opened here until the edge has got the request. Until then no answer says that the
        # session is here without naming the turn, since a repeated request would start the turn a second time.
        self._untold: dict[SessionKey, tuple[int, bytes]] = {}

    def start(self, engine: Engine, loop: EngineLoop, saved: SavedStates | None) -> None:
        """Opens sessions in `engine` from now on, whose thread is that of `loop`. `saved`: fetches the state that other
        replicas have saved, if they save any."""
        self._engine, self._loop, self._saved = engine, loop, saved

    def close(self) -> None:
        """Finishes what has begun, then ends the replica's lease in the database, so that others can take its sessions
        over at once."""
        if self._saved is not None:
            self._saved.close()
        self._asking.shutdown()
        with suppress(self._replicas.db.errors):
            self._replicas.end()
        self._replicas.db.close()

    def take(self, request: OfOwners, answer: Callable[[Any], None], refuse: Callable[[BaseException], None]) -> None:
        """Answers a request, now or later."""
        match request:
            case Locate() if self._is_here(request) and self._lease.holds() and _key(request) not in self._untold:
                self._once_here(request, answer, Place(exists=True))
            case Locate():
                locate = partial(self.locate, request, self._lease.deadline())
                self._asking.submit(answered, locate, partial(self._once_here, request, answer), refuse)
            case FindOwner():
                self._asking.submit(answered, partial(self._owner, request), answer, refuse)
            case GetFleet():
                self._asking.submit(answered, self._view, answer, refuse)
            case ListUnowned():
                self._asking.submit(answered, partial(self._unowned, request), answer, refuse)

    def later(self, work: Callable[[], None]) -> None:
        """Runs `work` in the thread that asks the database. No session is claimed meanwhile."""
        self._asking.submit(work)

    # -- questions about the fleet

    def _view(self) -> FleetView:
        with self._asked():
            return FleetView(replica=self.number, replicas=self._replicas.all())

    def _unowned(self, request: ListUnowned) -> SessionPage:
        with self._asked():
            found, more = self._replicas.unowned(request.tenant, request.after, request.limit)
        context = self._engine.registry.context_length
        return SessionPage(sessions=[session.info(context) for session in found], more=more)

    def _owner(self, request: FindOwner) -> OwnerView:
        with self._asked():
            seen = self._replicas.find((request.tenant, request.session))
        return OwnerView(session=request.session, url=seen.url if seen is not None and seen.live else None)

    def count_unowned(self, tenants: Uses) -> None:
        """Counts the sessions of `tenants` that no live replica owns, if it is time. Runs in the thread of `later`."""
        self._counts.count_unowned(self._replicas, self._engine.registry, tenants)

    # -- claims of sessions that no live replica owns

    def _is_here(self, request: Locate) -> bool:
        return self._engine.registry.find(request.session, request.tenant) is not None

    def locate(self, request: Locate, deadline: float) -> Place:
        """Finds a session, and claims it unless another live replica owns it. `deadline`: when to stop waiting for the
        lease. Raises `NotAcknowledged`, `SessionDamaged`, and the engine's errors if the session cannot be opened."""
        key = _key(request)
        with self._asked():
            for _ in range(ATTEMPTS):
                if self._is_here(request):
                    self._lease.require(deadline)
                    return self._here(key)
                if self._lease.now() > deadline and self._lease.failing:
                    raise NotAcknowledged("the database of the fleet cannot be asked; ask again")
                if (seen := self._replicas.find(key)) is None:
                    return self._nowhere(key)
                if seen.live and seen.owner != self.number:
                    return Place(exists=True, url=seen.url)
                if seen.owner == self.number:
                    self._loop.execute(lambda _: None).result()  # it may be closed, which is not written yet
                    if self._is_here(request) or self._replicas.find(key) != seen:
                        continue
                if (place := self._claim(key, seen, deadline)) is not None:
                    return place
        raise NotAcknowledged(f"session {request.session!r} changes its owner; ask again")

    def _once_here(self, request: Locate, answer: Callable[[Place], None], place: Place) -> None:
        """Answers where a session is, once its state has arrived."""

        def tell() -> None:
            answer(place)
            self.told(_key(request), place)

        if self._saved is None:
            tell()
        else:
            self._saved.once_here(_key(request), tell)

    def told(self, key: SessionKey, place: Place) -> None:
        """Notes that the edge has got this answer to where a session is."""
        if place.begun is not None:
            self._untold.pop(key, None)

    def _here(self, key: SessionKey) -> Place:
        """Returns the place of a session that is here, with its open turn's request unless the edge has got that."""
        session, (epoch, begun) = self._engine.registry.find(key[1], key[0]), self._untold.get(key, (0, None))
        return Place(exists=True, begun=begun if session is not None and session.epoch == epoch else None)

    def _nowhere(self, key: SessionKey) -> Place:
        """Returns the place of a session that does not exist, and forgets that it has left this replica, if it has."""
        self._loop.call(lambda engine: engine.registry.forget_left(key)).result()
        return Place(exists=False)

    def _claim(self, key: SessionKey, seen: Owned, deadline: float) -> Place | None:
        """Takes a session over and opens it here; returns `None` if another replica was faster. If this replica is
        draining, returns the address of another one that can do it."""
        if seen.owner != self.number and (url := self._instead()) is not None:
            return Place(exists=True, url=url)
        change = _Change(key, seen.owner, self._saved_by(key, seen), deadline, self._lease.lapses)
        try:
            saved = self._replicas.claim(key, seen)
        except SessionDamaged as error:
            log.error("a damaged session is not served", extra={"session": key[1], "reason": str(error)})  # noqa: TRY400
            raise
        if saved is None:
            return None
        self._untold.pop(key, None)
        if saved.begun is not None:
            self._untold[key] = saved.epoch, saved.begun
        if (session := self._open(change, saved, _restored)) is None:
            return None
        if self._saved is not None and change.saved_by is not None:
            self._saved.begin(session, change.saved_by)
        log.info("session taken over", extra={"session": key[1], "owner": seen.owner, "epoch": saved.epoch})
        return Place(exists=True, begun=saved.begun)

    def _instead(self) -> str | None:
        """Returns the address of a replica that can claim sessions in place of this one, if this one is draining."""
        if not self.draining:
            return None
        others = (each for each in self._replicas.all() if each.live and not each.draining)
        return next((each.url for each in others if each.replica != self.number), None)

    def _saved_by(self, key: SessionKey, seen: Owned) -> int | None:
        """Returns the other replica that may have saved a session's state, if there is one."""
        if seen.owner == self.number:  # it was claimed before, and could not be opened
            return next((by for other, epoch, by in self._unopened if (other, epoch) == (key, seen.epoch)), None)
        return seen.saved_by if seen.saved_by != self.number else None

    def _open(self, change: _Change, saved: SavedSession, accept: Accept) -> Session | None:
        """Opens a session here, whose owner this replica has become. Returns `None` if another replica may have claimed
        it since. After an error the session is given up with the next heartbeat."""
        unopened = (change.key, saved.epoch, change.saved_by)
        try:
            session = self._loop.call(partial(self._count, change, saved, accept)).result()
        except TenutoError:
            self._unopened.append(unopened)
            raise
        try:
            self._lease.require(change.deadline)
        except NotAcknowledged:  # so that the next claim finds the open turn's request
            self._loop.call(lambda _: self._loop.drop(session)).result()
            self._unopened.append(unopened)
            raise
        if self._lease.lapses != change.lapses:  # it may have been claimed again meanwhile
            self._loop.call(lambda _: self._loop.drop(session)).result()
            return None
        return session

    def _count(self, change: _Change, saved: SavedSession, accept: Accept, engine: Engine) -> Session:
        """Opens a session in the engine. If another replica has counted it so far, it is counted here from now on."""
        session = accept(engine, saved)
        if change.owner != self.number:
            self._counts.came(engine.registry, session)
        return session

    def give_up_unopened(self, replicas: Replicas) -> None:
        """Gives up the claimed sessions that could not be opened here. `replicas`: for the calling thread. Raises the
        database's errors; the rest is given up with the next call."""
        while self._unopened:
            replicas.give_up(*self._unopened[0])
            self._unopened.pop(0)

    # -- what is left over

    def sweep(self) -> None:
        """Begins to close expired sessions whose owner is gone, and to remove saved state that nobody needs."""
        self._asking.submit(self._close_expired)
        if self._saved is not None:
            self._saved.tidy(self._needed)

    def _close_expired(self) -> None:
        """Takes over expired sessions whose owner is gone. The engine closes them."""
        try:
            found = self._replicas.expired(SWEPT)
        except self._replicas.db.errors as error:
            log.warning("sessions whose time is over cannot be found: %s", error)
            return
        for tenant, session in found:
            try:
                self.locate(Locate(tenant=tenant, session=session), self._lease.deadline())
            except TenutoError as error:
                reason = {"session": session, "reason": str(error)}
                log.warning("a session whose time is over cannot be closed", extra=reason)

    def _needed(self, replicas: Collection[int]) -> set[int]:
        return self._asking.submit(self._replicas.needed, replicas).result()

    # -- moves of sessions between replicas

    def read(self, key: SessionKey) -> ReadSession | None:
        """Reads a session that is to move here, so that `receive` takes less time; returns `None` if the database does
        not have it yet. Raises `NotAcknowledged` if the database cannot be asked. Runs in the thread of `later`."""
        with self._asked():
            return self._replicas.read(key)

    def receive(self, key: SessionKey, owner: int, epoch: int, accept: Accept, read: ReadSession | None) -> Session:
        """Becomes the owner of a session that `owner` holds in `epoch`, and opens it with `accept`. `read`: the result
        of `read`. Raises `NotAcknowledged` if that is impossible, or if it is unknown whether it has happened. Runs in
        the thread of `later`."""
        if self._engine.registry.find(key[1], key[0]) is not None:
            raise AlreadyExists(f"session {key[1]!r} is here")
        change = _Change(key, owner, None, self._lease.deadline(), self._lease.lapses)
        self._lease.require(change.deadline)
        with self._asked():
            saved = self._replicas.take(key, owner, epoch, read)
        if saved is None:
            raise NotAcknowledged(f"session {key[1]!r} has changed its owner, or its move has been given up")
        if (session := self._open(change, saved, accept)) is None:
            raise NotAcknowledged(f"session {key[1]!r} changes its owner; ask again")
        return session

    def keep(self, session: Session) -> bool:
        """Makes sure that no other replica can still `receive` a session that is held here. Returns whether this
        replica is its owner. Raises `NotAcknowledged` if that is unknown. Runs in the thread of `later`."""
        with self._asked(), self.settling:
            epoch = self._replicas.keep(session.key)
            if epoch is not None:
                session.epoch = epoch
        return epoch is not None

    def give_up(self, session: Session) -> None:
        """Gives up a session that is held here. Its saved state stays. Raises `NotAcknowledged` if it is unknown
        whether the session was given up. Runs in the thread of `later`."""
        with self._asked():
            self._replicas.give_up(session.key, session.epoch, self.number)

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """Raises errors of the database as `NotAcknowledged`."""
        try:
            yield
        except self._replicas.db.errors as error:
            place = self._replicas.db.place
            raise NotAcknowledged(f"the database {place} cannot be asked who owns sessions: {error}") from error


def _key(request: Locate) -> SessionKey:
    return request.tenant, request.session


def _restored(engine: Engine, saved: SavedSession) -> Session:
    """Restores a session of the fleet's database."""
    return engine.sessions.restore(saved, journaled=True)
