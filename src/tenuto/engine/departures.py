"""Sessions that leave for another replica: their state is copied while they go on, and then they are held."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tenuto.base.errors import InvalidRequest, NotFound, SessionBusy, SessionClosed
from tenuto.base.plan import Copier
from tenuto.base.turns import EndReason
from tenuto.base.views import SessionState
from tenuto.base.wire.moves import MovedTurn, StateOffer, StatePiece
from tenuto.engine.core import Core
from tenuto.engine.flights import Flights
from tenuto.engine.guard import guarded
from tenuto.engine.lifecycle import Lifecycle
from tenuto.engine.moved_turns import packed
from tenuto.memory.tiers.lent import LentUnits
from tenuto.session.session import Session
from tenuto.session.turn import Turn


@dataclass(slots=True)
class Departure:
    """A session that leaves. `sent`: the units of each group that were copied, each with its generation then; if that
    is still the same, so are the unit's contents. `identity`: of the weights that computed them."""

    session: Session
    identity: str
    sent: list[list[tuple[int, int]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Rest:
    """The rest of a held session; see `StateEnd`. `lent`: in place of `pieces`, parked memory, to be taken
    back once it is read."""

    session: Session
    position: int
    units: list[int]
    kept: list[int]
    pieces: list[StatePiece]
    lent: LentUnits | None
    turn: Turn | None
    moved: MovedTurn | None


class Departures:
    """Copies the state of sessions that move to another replica, and holds them.

    Pages in which every slot is settled are copied between steps while the session goes on. Then the session is held
    between two tokens: no operation finds it, its open turn has no row and does not wait for one, and no deadline ends
    it. What has changed since, and recurrent state, is copied then. A session that is held either goes on here,
    exactly where it stood, or leaves.

    Invariant: a session is `held` exactly while its departure is in `_departures` and `hold` was called.
    """

    def __init__(self, core: Core, lifecycle: Lifecycle, flights: Flights) -> None:
        self.fuse = core.fuse
        self._memory = core.memory
        self._copier: Copier = core.executor
        self._registry = core.registry
        self._idle_memory = core.idle_memory
        self._clock = core.clock
        self._lifecycle = lifecycle
        self._flights = flights
        self._departures: dict[str, Departure] = {}

    @property
    def unit_bytes(self) -> list[int]:
        """The size in bytes of a unit of each group."""
        return [self._copier.unit_bytes(group) for group in range(len(self._memory.groups))]

    @guarded
    def begin(self, move: str, session_id: str, tenant: str = "") -> StateOffer:
        """Begins the departure called `move` of a session, which goes on. Returns its offer, without identity and
        owner. Raises `SessionBusy` if it is leaving already, and `InvalidRequest` if it cannot move."""
        session = self._registry.get(session_id, tenant)
        session.require_open()
        if not session.policy.lasting:
            raise InvalidRequest(f"session {session_id} is ephemeral; allowed: a session that the database has")
        if any(each.session is session for each in self._departures.values()):
            raise SessionBusy(f"session {session_id} is moving already")
        weights = self._memory.weights.identity
        self._departures[move] = Departure(session, weights, [[] for _ in self._memory.groups])
        turn = session.turn
        length = turn.prompt_length + turn.max_new_tokens if turn is not None else len(session.history)
        computed = self._computed(session)
        units = [table.kept_units(computed) if computed else 0 for table in session.memory.tables]
        return StateOffer(
            tenant=tenant,
            session=session_id,
            owner=0,
            identity="",
            page_size=self._memory.page_size,
            unit_bytes=self.unit_bytes,
            units=units,
            length=length,
            policy=session.policy,
            params=turn.params if turn is not None and not turn.drafting else None,
        )

    def _computed(self, session: Session) -> int:
        """Returns the number of tokens whose settled state is on the device; 0 if other weights than those in use have
        computed any of it."""
        turn = session.memory.turn
        current = turn.is_current if turn is not None else session.memory.is_current
        if session.memory.arriving or not current:
            return 0
        return turn.computed if turn is not None else session.memory.computed

    @guarded
    def copy(self, move: str, most: int) -> list[StatePiece]:
        """Returns copies of settled units that were not copied before, of at most `most` bytes, but at least one unit.
        May be empty. Raises `NotFound` if the session is gone."""
        departure = self._find(move)
        position = self._computed(departure.session)
        for group, table in enumerate(departure.session.memory.tables):
            sent, pool = departure.sent[group], table.pool
            units = table.sealed(position)
            first = _same(sent, units, pool.generation)
            del sent[first:]
            new = units[first : first + max(1, most // self._copier.unit_bytes(group))]
            if new:
                data = self._copier.read_units(group, np.array(new, np.int32))
                sent += [(unit, pool.generation[unit]) for unit in new]
                return [StatePiece.of(group, first, data)]
        return []

    def _find(self, move: str) -> Departure:
        departure = self._departures.get(move)
        if departure is None or not self._is_here(departure.session):
            raise NotFound("the session is not leaving, or was closed")
        return departure

    def _is_here(self, session: Session) -> bool:
        return self._registry.find(session.id, session.policy.tenant) is session

    @guarded
    def hold(self, move: str) -> Rest:
        """Holds the session between two tokens, once all steps in flight have settled, and returns what is left to
        send. Its draft is dropped. Raises `NotFound` if the session is gone, and `SessionBusy` while its turn is of a
        kind that cannot go on elsewhere: one that averages its input, or whose input is still being scored."""
        departure = self._find(move)
        session = departure.session
        self._flights.land()
        if not self._is_here(session) or session.state is not SessionState.OPEN:
            raise SessionClosed(f"session {session.id} was closed")
        turn = session.turn
        if turn is not None and turn.drafting:
            self._lifecycle.abort(turn, EndReason.ABORT)
            turn = None
        if turn is not None and not _can_move(turn):
            raise SessionBusy(f"the open turn of session {session.id} averages or scores its input; wait for its end")
        if turn is not None:
            self._lifecycle.hold(turn)
        session.held = True
        return self._rest(departure, turn)

    def _rest(self, departure: Departure, turn: Turn | None) -> Rest:
        session, memory = departure.session, departure.session.memory
        moved = packed(turn, self._clock.now(), self._memory.weights.name) if turn is not None else None
        nothing = [0] * len(memory.tables)
        if departure.identity != self._memory.weights.identity:
            return Rest(session, 0, nothing, nothing, [], None, turn, moved)
        own = memory.turn
        if own is not None and own.computed <= own.start:  # it has only what its session has
            own.abort()
            own = None
        if own is None and self._idle_memory.position(session) > memory.computed:
            lent = self._idle_memory.lend(session) if self._idle_memory.is_parked_current(session) else None
            return Rest(session, 0, nothing, nothing, [], lent, turn, moved)
        position = self._computed(session)
        units = own.kept() if own is not None and position else memory.kept() if position else []
        if turn is not None and turn.replaces and position >= turn.base_length:  # what it replaces is still history
            position = 0 if self._memory.needs_checkpoints else turn.base_length - 1
            units = [each[: table.kept_units(position)] for each, table in zip(units, memory.tables, strict=True)]
        if not position:
            return Rest(session, 0, nothing, nothing, [], None, turn, moved)
        kept = [
            _same(sent, each, table.pool.generation)
            for sent, each, table in zip(departure.sent, units, memory.tables, strict=True)
        ]
        pieces = [
            StatePiece.of(group, first, self._copier.read_units(group, np.array(each[first:], np.int32)))
            for group, (each, first) in enumerate(zip(units, kept, strict=True))
            if len(each) > first
        ]
        return Rest(session, position, [len(each) for each in units], kept, pieces, None, turn, moved)

    @guarded
    def resume(self, move: str) -> None:
        """Lets the session go on here, if it was held and is still here. Otherwise does nothing."""
        departure = self._departures.pop(move, None)
        if departure is None or not departure.session.held:
            return
        session, departure.session.held = departure.session, False
        if not self._is_here(session):
            return
        if session.turn is not None:
            self._lifecycle.go_on(session.turn)
        else:
            self._registry.watch(session)

    @guarded
    def forget(self, move: str) -> Session | None:
        """Ends a departure, whose session has another owner now. Returns the session, if it is still here."""
        departure = self._departures.pop(move, None)
        if departure is None:
            return None
        departure.session.held = False
        return departure.session if self._is_here(departure.session) else None


def _same(sent: Sequence[tuple[int, int]], units: array[int], generation: array[int]) -> int:
    """Returns the number of leading `units` that were sent, and have the contents that they had then."""
    count = 0
    for (unit, then), now in zip(sent, units, strict=False):
        if unit != now or generation[unit] != then:
            break
        count += 1
    return count


def _can_move(turn: Turn) -> bool:
    scored = not turn.params.scores_input or turn.next_scored >= turn.prompt_length
    return turn.pool is None and scored
