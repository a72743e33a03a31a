"""The process as a member of its fleet: it keeps the replica's lease with heartbeats, and answers requests about the
fleet."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from tenuto.base.errors import ConfigError, EngineStopped
from tenuto.base.fleet_views import Membership, MovesView, ReplicaLoad
from tenuto.base.views import SessionKey
from tenuto.base.wire.fleet_messages import CheckLease, Enter, TellLoad
from tenuto.engine.engine import Engine
from tenuto.engine.thread.loop import EngineLoop
from tenuto.runtime.burden import load_of
from tenuto.runtime.folders import LeftFolders
from tenuto.runtime.ownership import OfOwners, Ownership
from tenuto.runtime.replica_lease import ReplicaLease, awake_or_not
from tenuto.runtime.saved_states import SavedStates
from tenuto.runtime.shared_objects import SharedObjects
from tenuto.runtime.tenant_counts import TenantCounts
from tenuto.session.postgres.database import Database
from tenuto.session.postgres.journal import PostgresJournal
from tenuto.session.postgres.objects import Objects
from tenuto.session.postgres.replicas import Replicas
from tenuto.session.session import Session

log = logging.getLogger("tenuto.fleet")

OfFleet = OfOwners | CheckLease | Enter | TellLoad
"""Requests about the fleet."""
BEATS = 4
"""The number of heartbeats in the time of a lease."""
SWEEP_SECONDS = 10.0
"""How often to look for expired sessions whose owner is gone."""


class Member:
    """The membership of this process in its fleet. `ownership`, `objects` and `journal` read and write parts of the
    fleet's database, each over its own connection."""

    def __init__(
        self,
        connect: Callable[[], Database],
        fingerprint: str,
        advertised: str,
        lease: float,
        now: Callable[[], float] = awake_or_not,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Joins the fleet. `connect`: returns a connection to its database. `advertised`: the address at which other
        replicas reach this one. `lease`: in seconds. `now`: a clock that continues while the process sleeps. Raises
        `ConfigError` or `ExtraMissing`."""
        self._lease = ReplicaLease(lease, now, sleep)
        replicas = Replicas(connect(), fingerprint)
        self._join(replicas, advertised)
        self.number, self.secret = replicas.number, replicas.secret
        self.journal = PostgresJournal(connect(), fingerprint, self.number)
        self._beats = Replicas(connect(), fingerprint, self.number)  # for heartbeats alone
        self.objects = SharedObjects(Objects(connect()))
        self._counts = TenantCounts(lease, now)
        self.ownership = Ownership(replicas, self._lease, self._counts)
        self._beating = threading.Thread(target=self._beat_on, name="tenuto-heartbeat", daemon=True)
        self._edge = TellLoad(open_turns=0, draining=False, moves=MovesView())  # the edge's last report
        self._load = ReplicaLoad()  # the engine's last report
        self._asked_load = False  # whether the next one is under way

    def _join(self, replicas: Replicas, advertised: str) -> None:
        for last in (False, True):  # a machine that pauses may lose its connection
            try:
                replicas.join(advertised, self._lease.seconds)
            except replicas.db.errors as error:
                if last:
                    raise ConfigError(f"the database {replicas.db.place} cannot be used: {error}") from error
            else:
                return

    def start(self, engine: Engine, loop: EngineLoop, places: Sequence[LeftFolders]) -> None:
        """Keeps the lease from now on, and opens sessions in `engine`, whose thread is that of `loop`. `places`: where
        replicas save state."""
        self._engine, self._loop = engine, loop
        self.ownership.start(engine, loop, SavedStates(places, loop) if places else None)
        self._beating.start()

    def close(self) -> None:
        """Ends the lease, so that others can take the sessions over at once."""
        self._lease.closing.set()
        if self._beating.ident is not None:
            self._beating.join()
        self.objects.close()
        self.ownership.close()
        self._beats.db.close()

    def take(self, request: OfFleet, answer: Callable[[Any], None], refuse: Callable[[BaseException], None]) -> None:
        """Answers a request, now or later."""
        match request:
            case Enter():
                answer(Membership(replica=self.number, secret=self.secret, lease=self._lease.seconds))
            case TellLoad():
                self._edge = request
                self.ownership.draining = request.draining
                answer(dict(self._engine.registry.elsewhere))
            case CheckLease():
                answer(self._lease.holds())
            case _:
                self.ownership.take(request, answer, refuse)

    # -- heartbeats

    def _beat_on(self) -> None:
        swept = self._lease.now()
        while not self._lease.closing.wait(self._lease.seconds / BEATS):
            with suppress(EngineStopped):
                self.keep_lease()
            self.ownership.later(self.count_unowned)
            if self._lease.now() > swept + SWEEP_SECONDS:
                swept = self._lease.now()
                self.ownership.sweep()

    def keep_lease(self) -> None:
        """Prolongs the lease, if the database can be asked. Called `BEATS` times in a lease. Raises `EngineStopped`."""
        try:
            self._beat()
        except self._beats.db.errors as error:
            if not self._lease.failing:
                log.error("the lease cannot be prolonged: %s", error)  # noqa: TRY400 - no bug, so no traceback
            self._lease.failing = True
        else:
            self._lease.failing = False

    def _beat(self) -> None:
        """Prolongs the lease. Before that, drops the sessions that others may have claimed since the last heartbeat."""
        began, sure = self._lease.begin_beat()
        registry = self._engine.registry
        if (beat := self._beats.beat(self._reported(), self._counts.told(registry, self._edge.tenants))) is None:
            log.error("another replica has started at the address of this one, which ends")
            self._loop.request_stop()
            return
        self._counts.hear(registry, beat.others)
        if beat.lost or not sure:
            self._lease.lapses += 1
            with self.ownership.settling:
                with self.journal.writing:
                    known = self._loop.call(_epochs).result()
                owned = self._beats.epochs()
                self._loop.call(partial(self._drop_lost, known, owned)).result()
        self.ownership.give_up_unopened(self._beats)
        self._lease.prolong(began)

    def _drop_lost(self, known: dict[Session, int], owned: dict[SessionKey, int], _: Engine) -> None:
        """Drops the sessions of `known` that this replica does not own any more in that epoch."""
        for session, epoch in known.items():
            if owned.get(session.key) != epoch:
                self._loop.drop(session)

    def count_unowned(self) -> None:
        """Counts sessions that no live replica owns, if it is time. Called as often as `keep_lease`, in the thread of
        `Ownership.later`."""
        self.ownership.count_unowned(self._edge.tenants)

    def _reported(self) -> str:
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


def _epochs(engine: Engine) -> dict[Session, int]:
    """Returns the sessions in memory with the epochs in which they are owned, without those that are not in the
    database yet."""
    return {session: session.epoch for session in engine.registry if session.epoch}
