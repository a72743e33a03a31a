"""Moves of sessions between replicas: the part of the engine processes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import msgspec
import numpy as np

from tenuto.base.errors import EngineStopped, NotAcknowledged, NotFound, SessionBusy, TenutoError
from tenuto.base.fleet_views import OwnedSession
from tenuto.base.views import Ticket
from tenuto.base.wire.fleet_messages import (
    BeginMove,
    CopyMove,
    DropMove,
    EraseTraces,
    GiveUpSession,
    HoldMove,
    ListOwned,
    PutMove,
    ReserveMove,
    SettleMove,
    TakeMove,
)
from tenuto.base.wire.moves import MovedTurn, StateEnd, StateOffer, StatePiece
from tenuto.base.wire.request import Request
from tenuto.engine.departures import Rest
from tenuto.engine.engine import Engine
from tenuto.engine.moved_turns import Readied
from tenuto.engine.thread import views
from tenuto.engine.thread.loop import EngineLoop, Subscriber
from tenuto.runtime.answering import answered
from tenuto.runtime.burden import Burden, burden_of
from tenuto.runtime.ownership import Ownership
from tenuto.session.postgres.replicas import ReadSession
from tenuto.session.records import SavedSession
from tenuto.session.session import Session
from tenuto.text.constraint import Constraint

log = logging.getLogger("tenuto.fleet")

OfMoves = (
    ListOwned
    | BeginMove
    | CopyMove
    | HoldMove
    | SettleMove
    | GiveUpSession
    | ReserveMove
    | PutMove
    | TakeMove
    | DropMove
    | EraseTraces
)
"""Requests about moves."""
THREADS = 8
"""The number of threads. Each waits for the engine's next step, so many of them move many sessions in a second."""
COPY_BYTES = 3 * 2**19
"""The most bytes of a session that are copied between two steps. Copying, checksumming, sending and receiving them
takes the two replicas together about eight milliseconds of CPU time, so steps meanwhile are not much longer. The
allocator reuses blocks of this size; see `heap.LARGE_BLOCK`."""
MOST_SWEEPS = 2**14
"""The most parts in which traces are overwritten. The rest is then overwritten at once, as turns keep freeing more."""

Ready = Callable[[MovedTurn, Constraint | None], Readied]
Constrain = Callable[[Any], Constraint | None]
"""Returns a new constraint for the grammar of turn parameters, if they have one."""


class Moves:
    """Carries out the edge's requests about moves, in threads other than the engine's.

    A session has one owner throughout: the replica whose number and epoch are in the database. The replica that it
    leaves holds it from `HoldMove` on: its turn gets no more tokens, nothing changes it, and all its changes are
    written. Then one transaction makes the other replica the owner, on the condition that owner and epoch are still the
    same. If the old owner does not learn the outcome, it keeps the session held, and begins a new epoch if it is still
    the owner. Only then does the session continue there: a delayed transaction of the other replica no longer matches.
    """

    def __init__(
        self, ownership: Ownership, loop: EngineLoop, identity: Callable[[], str], constrain: Constrain, ready: Ready
    ) -> None:
        """`identity`: returns the identity of the model's state, which may take seconds the first time. `ready`: see
        `TurnOperations.ready`."""
        self._ready = ready
        self._ownership = ownership
        self._loop = loop
        self._identity = identity
        self._constrain = constrain
        self._working = ThreadPoolExecutor(THREADS, "tenuto-moves")
        # By move. Only this class's threads use them, and only one thread at a time works on a move.
        self._held: dict[str, Session] = {}  # sessions that are held here
        self._leaving: dict[str, StateOffer] = {}  # of sessions that are to leave, until their moves are settled
        self._offers: dict[str, StateOffer] = {}  # of sessions that are to arrive
        self._read: dict[str, ReadSession | None] = {}  # those sessions, as read from the database ahead of the move
        self._tickets: dict[str, Ticket] = {}  # of turns that continue here, until their moves are answered
        self._counting = threading.Lock()  # held while the load of what leaves or comes is weighed and noted

    def close(self) -> None:
        self._working.shutdown()

    def take(
        self,
        request: OfMoves,
        answer: Callable[[Any], None],
        refuse: Callable[[BaseException], None],
        subscriber: Subscriber,
    ) -> None:
        """Answers a request later. `subscriber`: gets the output of a turn that continues here."""
        parts: dict[type[Request[Any]], Callable[[Any], Any]] = {
            ListOwned: lambda _: self.owned(),
            BeginMove: self.begin,
            CopyMove: lambda asked: self.copy(asked.move),
            HoldMove: lambda asked: self.hold(asked.move),
            SettleMove: self.settle,
            GiveUpSession: self.give_up,
            PutMove: lambda asked: self.put(asked.move, asked.piece),
            DropMove: lambda asked: self.drop(asked.move),
            EraseTraces: self.erase_traces,
        }
        if isinstance(request, TakeMove):
            self._working.submit(self._take, request, answer, refuse, subscriber)
            return
        if isinstance(request, ReserveMove):
            self._ownership.later(partial(self._reserve, request, answer, refuse))
            return
        work = partial(answered, partial(parts[type(request)], request), answer, refuse)
        settles = isinstance(request, SettleMove) and request.asked and not request.gone
        if settles or isinstance(request, GiveUpSession):
            self._ownership.later(work)  # since it asks the database
        else:
            self._working.submit(work)

    def _reserve(
        self, request: ReserveMove, answer: Callable[[Any], None], refuse: Callable[[BaseException], None]
    ) -> None:
        """Reads a session that is to come, while its owner still changes it, and then reserves room for it."""
        try:
            read = self.read(request.offer)
            self._working.submit(answered, partial(self.reserve, request.move, request.offer, read), answer, refuse)
        except BaseException as error:  # noqa: BLE001 - every error is answered
            refuse(error)

    def _take(
        self,
        request: TakeMove,
        answer: Callable[[Any], None],
        refuse: Callable[[BaseException], None],
        subscriber: Subscriber,
    ) -> None:
        """Prepares for `TakeMove`, while earlier sessions still change their owners."""
        try:
            readied = self.prepare(request.move, request.end)
        except BaseException as error:  # noqa: BLE001 - every error is answered
            refuse(error)
        else:
            become = partial(self.become, request.move, request.end, readied, subscriber)
            self._ownership.later(partial(answered, become, answer, refuse))

    # -- for the replica that a session leaves

    def begin(self, request: BeginMove) -> StateOffer:
        """Carries out `BeginMove`."""
        identity = self._identity()

        def begin(engine: Engine) -> tuple[StateOffer, Burden]:
            return engine.departures.begin(request.move, request.session, request.tenant), burden_of(engine)

        offer, burden = self._loop.call(begin).result()
        with self._counting:
            relieved = burden.without(list(self._leaving.values())).relieved(request.relieves)
            self._leaving[request.move] = offer
        return msgspec.structs.replace(offer, owner=self._ownership.number, identity=identity, relieved=relieved)

    def copy(self, move: str) -> list[StatePiece]:
        """Carries out `CopyMove`."""
        sizes, pieces = self._loop.call(
            lambda engine: (engine.departures.unit_bytes, engine.departures.copy(move, COPY_BYTES))
        ).result()
        return [piece.summed(sizes[piece.group]) for piece in pieces]

    def hold(self, move: str) -> StateEnd:
        """Carries out `HoldMove`."""

        def hold(engine: Engine) -> tuple[Rest, list[int], float]:
            rest = engine.departures.hold(move)
            self._held[move] = rest.session
            self._loop.publish(rest.session)
            return rest, engine.departures.unit_bytes, engine.now() - rest.session.last_turn_end

        rest, sizes, rested = self._loop.execute(
            hold, after_output=True
        ).result()  # the edge hands over what it has got
        position, units, pieces = rest.position, rest.units, rest.pieces
        if (lent := rest.lent) is not None:
            state = lent.read()
            self._loop.call(lambda engine: engine.states.take_back(lent))
            position, units = state.position, [len(group) for group in state.groups]
            pieces = [StatePiece.of(group, 0, np.stack(copies)) for group, copies in enumerate(state.groups) if copies]
        return StateEnd(
            identity=self._identity(),
            epoch=rest.session.epoch,
            position=position,
            units=units,
            kept=rest.kept if rest.lent is None else [0] * len(units),
            pieces=[piece.summed(sizes[piece.group]) for piece in pieces],
            turn=rest.moved,
            rested=rested,
        )

    def owned(self) -> list[OwnedSession]:
        """Carries out `ListOwned`."""
        return self._loop.call(_owned).result()

    def settle(self, request: SettleMove) -> bool:
        """Carries out `SettleMove`."""
        session = self._held.get(request.move)
        if session is not None and (request.gone or (request.asked and not self._ownership.keep(session))):
            self._loop.call(lambda engine: self._leave(engine, request.move)).result()
            del self._held[request.move]
            self._leaving.pop(request.move, None)
            return False
        self._loop.call(lambda engine: engine.departures.resume(request.move)).result()
        self._held.pop(request.move, None)
        self._leaving.pop(request.move, None)
        return True

    def _leave(self, engine: Engine, move: str, *, keep_saved: bool = False) -> None:
        if (session := engine.departures.forget(move)) is not None:
            self._loop.drop(session, keep_saved=keep_saved)

    def give_up(self, request: GiveUpSession) -> None:
        """Carries out `GiveUpSession`. The session is dropped here even if it is unknown whether the database has
        recorded that: its next request finds out."""
        move = f"given up {request.tenant} {request.session}"

        def hold(engine: Engine) -> Session:
            engine.departures.begin(move, request.session, request.tenant)
            session = engine.registry.get(request.session, request.tenant)
            try:
                session.require_idle("give up")
                if not (request.unsaved or engine.snapshots.is_saved(session)):
                    raise SessionBusy(f"the state of session {request.session} is not saved yet")
                lent = engine.departures.hold(move).lent
            except TenutoError:
                engine.departures.resume(move)
                raise
            if lent is not None:
                engine.states.take_back(lent)
            return session

        try:
            session = self._loop.execute(hold).result()
        except NotAcknowledged:  # its last change is not written
            self._loop.call(lambda engine: engine.departures.resume(move)).result()
            raise
        try:
            self._ownership.give_up(session)
        finally:
            self._loop.call(lambda engine: self._leave(engine, move, keep_saved=True)).result()

    def erase_traces(self, request: EraseTraces) -> list[str]:
        """Carries out `EraseTraces`, mostly in parts, between which the engine takes steps."""

        def sweep(engine: Engine) -> bool:
            return engine.erasure.sweep(request.session, tenant=request.tenant)

        def erase(engine: Engine) -> list[str]:
            return engine.erasure.erase_traces(request.session, tenant=request.tenant)

        for _ in range(MOST_SWEEPS):
            if not self._loop.call(sweep).result():
                break
        return self._loop.execute(erase).result()

    # -- for the replica to which it moves

    def read(self, offer: StateOffer) -> ReadSession | None:
        """Carries out the part of `ReserveMove` that asks the database; see `Ownership.read`. Raises `InvalidRequest`
        unless the state is of this model and these weights."""
        self._require_weights(offer.identity)
        return self._ownership.read((offer.tenant, offer.session))

    def reserve(self, move: str, offer: StateOffer, read: ReadSession | None) -> None:
        """Carries out the rest of `ReserveMove`. `read`: the result of `read`. Raises `NoRoom` if there is no room, or
        if the session is to move to spread load, and this replica would have more of it than the one it leaves."""
        if offer.params is not None:
            self._constrain(offer.params)  # compiles the grammar
        with self._counting if offer.relieved is not None else nullcontext():
            if offer.relieved is not None:
                burden = self._loop.call(burden_of).result().plus(list(self._offers.values()))
                burden.require_less(offer.relieved, offer)
            self._loop.call(lambda engine: engine.arrivals.reserve(move, offer)).result()
            self._offers[move], self._read[move] = offer, read

    def put(self, move: str, piece: StatePiece) -> None:
        """Carries out `PutMove`."""
        self._loop.call(lambda engine: engine.arrivals.put(move, piece)).result()

    def prepare(self, move: str, end: StateEnd) -> Readied | None:
        """Carries out the part of `TakeMove` before the owner changes. Returns the open turn, if there is one. An error
        leaves this replica as it was."""
        try:
            self._expected(move)
            self._require_weights(end.identity)
            completing = self._loop.call(lambda engine: engine.arrivals.complete(move, end))
            readied = self._ready(end.turn, self._constrain(end.turn.params)) if end.turn is not None else None
            completing.result()
        except BaseException:
            self._drop(move)
            raise
        return readied

    def become(self, move: str, end: StateEnd, readied: Readied | None, subscriber: Subscriber) -> Ticket:
        """Carries out the rest of `TakeMove`: this replica becomes the owner. An error before that leaves it as it
        was."""
        try:
            offer = self._expected(move)
            key = offer.tenant, offer.session
            accept = partial(self._accept, move, end, readied, subscriber)
            session = self._ownership.receive(key, offer.owner, end.epoch, accept, self._read.get(move))
        finally:
            self._drop(move)
        log.info("session moved here", extra={"session": key[1], "owner": offer.owner, "epoch": session.epoch})
        if (ticket := self._tickets.pop(move, None)) is not None:
            return ticket
        name, version = session.id, session.version
        return Ticket(turn=0, session=name, history=0, prompt_tokens=0, max_new_tokens=0, version=version)

    def _require_weights(self, identity: str) -> None:
        if identity != self._identity():
            raise NotAcknowledged(
                "the session's state is of other weights than this replica's, or laid out for other kernels; allowed: "
                "replicas with the same model"
            )

    def _expected(self, move: str) -> StateOffer:
        offer = self._offers.get(move)
        if offer is None:
            raise NotFound("nothing is expected of this move here: it took too long")
        return offer

    def _accept(
        self,
        move: str,
        end: StateEnd,
        readied: Readied | None,
        subscriber: Subscriber,
        engine: Engine,
        saved: SavedSession,
    ) -> Session:
        """Opens a session that this replica owns now, with its state and its open turn. Runs in the engine's thread."""
        engine.arrivals.let_in(move)
        session = engine.sessions.restore(saved, journaled=True, rested=end.rested)
        try:
            engine.arrivals.give(move, session, end.position)
            if readied is not None:
                turn = engine.turns.go_on(session, readied, session.memory.computed)
                self._tickets[move] = views.ticket(turn, echo=False)
                self._loop.subscribe(turn, subscriber)
        except TenutoError:
            engine.sessions.leave(session)
            raise
        return session

    def drop(self, move: str) -> None:
        """Carries out `DropMove`."""
        if (dropping := self._drop(move)) is not None:
            with suppress(EngineStopped):
                dropping.result()

    def _drop(self, move: str) -> Future[None] | None:
        """Begins to carry out `DropMove`, unless the engine has stopped."""
        self._offers.pop(move, None)
        self._read.pop(move, None)
        with suppress(EngineStopped):
            return self._loop.call(lambda engine: engine.arrivals.drop(move))
        return None


def _owned(engine: Engine) -> list[OwnedSession]:
    now, pools = engine.now(), engine.memory.pools

    def owned(session: Session) -> OwnedSession:
        memory, turn = session.memory, session.turn
        kept = list(map(len, memory.kept())) if memory.computed and not memory.arriving else []
        return OwnedSession(
            tenant=session.policy.tenant,
            session=session.id,
            turn=turn.state if turn is not None else None,
            units=max(sum(kept), engine.idle_memory.position(session)),
            share=max((count / pool.capacity for count, pool in zip(kept, pools, strict=False) if count), default=0.0),
            rested=now - session.last_turn_end,
            pinned=session.policy.pinned,
        )

    return [owned(each) for each in engine.registry if each.policy.lasting]
