"""Sessions that arrive from another replica: room for their state, and the state until they are here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from tenuto.base.errors import ContextExceeded, InvalidRequest, InvariantError, NoRoom, NotFound
from tenuto.base.plan import Bytes, Copier, CopyFailed
from tenuto.base.wire.moves import StateEnd, StateOffer, StatePiece
from tenuto.base.wire.state_file import CopiedState
from tenuto.engine.core import Core
from tenuto.engine.guard import guarded
from tenuto.engine.lifecycle import Lifecycle
from tenuto.engine.occupation import Occupation
from tenuto.memory.pool import HolderKind, Lease
from tenuto.memory.session_memory import SessionMemory
from tenuto.session.session import Session


@dataclass(slots=True)
class Arrival:
    """A session that arrives. `leases`: one for each group, whose first `filled` units have contents. `copies`: in
    place of these, copies of its units, if there is no room on the device for a session without an open turn.
    `weights`: the identity of those in use when room was reserved. `complete`: whether nothing is missing any more.
    `waits`: whether a place in the registry is kept for it."""

    offer: StateOffer
    weights: str
    leases: list[Lease] | None
    filled: list[int]
    copies: list[list[Bytes]] = field(default_factory=list)
    complete: bool = False
    waits: bool = True


class Arrivals:
    """Keeps room for sessions that arrive, and their state until they belong to this replica.

    State is written to units that this holder leases, or kept as copies for the tiers if the device has no room. None
    of it can be found before `give` has moved it to the session. Room is given up before a turn has to yield, and when
    other weights are put to use; the session then stays where it is. Once its state is complete, it may belong to this
    replica already: only its state is given up then, and computed again.

    A place in the registry, the units of a pinned session, and the adapter are kept for it until `let_in`. So nothing
    can refuse the session once its owner has changed.

    Invariant: the leases of `_arrivals` are those of this holder; `registry.coming` is the number of arrivals that
    wait.
    """

    holder_kind: ClassVar[HolderKind] = "copy"
    holder_name = "sessions that arrive"

    def __init__(self, core: Core, lifecycle: Lifecycle, occupation: Occupation) -> None:
        self.fuse = core.fuse
        self._memory = core.memory
        self._copier: Copier = core.executor
        self._registry = core.registry
        self._adapters = core.adapters
        self._idle_memory = core.idle_memory
        self._batch = core.batch
        self._lifecycle = lifecycle
        self._occupation = occupation
        self._arrivals: dict[str, Arrival] = {}
        lifecycle.withdraw_arrival = self.withdraw

    def leases(self) -> list[Lease]:
        return [lease for each in self._arrivals.values() for lease in each.leases or ()]

    # -- room

    @guarded
    def reserve(self, move: str, offer: StateOffer) -> None:
        """Reserves room for a session, under the name of its move. Raises `InvalidRequest` if its state has another
        form than here, `NoRoom` if the device has no room beside running turns, and the errors for which the session
        could not be opened here."""
        if move in self._arrivals:
            raise InvalidRequest(f"there is a move {move} already")
        self._occupation.require_memory()
        self._check(offer)
        self._registry.keep_place(offer.policy)
        leases = self._lease(np.array(offer.units, np.int64))
        if leases is None and (offer.params is not None or not self._idle_memory.restores):
            self._registry.free_place(offer.policy)
            raise NoRoom(f"the state of session {offer.session} takes {offer.units} units, which this replica lacks")
        nothing = [0] * len(offer.units)
        copies: list[list[Bytes]] = [[] for _ in offer.units] if leases is None else []
        self._arrivals[move] = Arrival(offer, self._memory.weights.identity, leases, nothing, copies)

    def _check(self, offer: StateOffer) -> None:
        sizes = [self._copier.unit_bytes(group) for group in range(len(self._memory.groups))]
        if (offer.page_size, offer.unit_bytes) != (self._memory.page_size, sizes):
            raise InvalidRequest(
                f"the session's state is in pages of {offer.page_size} tokens and units of {offer.unit_bytes} bytes; "
                f"allowed: pages of {self._memory.page_size} tokens and units of {sizes} bytes"
            )
        if len(offer.units) != len(sizes) or min([*offer.units, 0]) < 0:
            raise InvalidRequest(f"the session's state has {offer.units} units; allowed: one number for each group")
        limit = self._registry.limit(offer.policy)
        if offer.length > limit:
            raise ContextExceeded(f"the session may get {offer.length} tokens; allowed here: {limit}")
        self._adapters.slot(offer.session, offer.policy)

    def _lease(self, needed: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[Lease] | None:
        """Returns leases on the units of each group, or `None` if they do not fit beside running turns."""
        if not self._make_room(needed):
            return None
        leases: list[Lease] = []
        for pool, count in zip(self._memory.pools, needed.tolist(), strict=True):
            lease = pool.acquire(count, self)
            if lease is None:  # a missing lease would shift the state of later groups
                raise InvariantError(f"{pool.name} has {pool.free} free units, but does not lease {count}")
            leases.append(lease)
        return leases

    def _make_room(self, needed: np.ndarray[tuple[int], np.dtype[np.int64]]) -> bool:
        """Lets idle sessions yield until so many units of each group are free. Returns whether they are."""
        running, held = list(self._batch.running()), self.leases()
        beside = self._lifecycle.pressure.room_beside(running)
        for group, pool in enumerate(self._memory.pools):
            beside[group] -= sum(len(lease) for lease in held if lease.pool is pool)
        if (needed > beside).any():
            return False
        self._lifecycle.pressure.relieve(lambda: needed, running, (), at_once=True)
        return not (needed > self._memory.free()).any()

    # -- state

    def _find(self, move: str) -> Arrival:
        if move not in self._arrivals:
            raise NotFound("nothing is expected of this move here: its room was needed, or it took too long")
        return self._arrivals[move]

    @guarded
    def put(self, move: str, piece: StatePiece) -> None:
        """Takes in units of an arriving session. Raises `NotFound` if its room was given up, `NoRoom` if there is no
        room for more, and `InvalidRequest` if the units are damaged or out of order."""
        arrival = self._find(move)
        if not 0 <= piece.group < len(arrival.filled) or not 0 <= piece.first <= arrival.filled[piece.group]:
            raise InvalidRequest(f"units from {piece.first} on of group {piece.group} were not expected")
        group, first = piece.group, piece.first
        units = piece.units(self._copier.unit_bytes(group))
        if arrival.leases is None:
            del arrival.copies[group][first:]
            arrival.copies[group] += list(units)
        else:
            self._write(move, arrival.leases, group, first, units)
        arrival.filled[group] = first + len(units)

    def _write(self, move: str, leases: Sequence[Lease], group: int, first: int, units: Bytes) -> None:
        lease, missing = leases[group], first + len(units) - len(leases[group])
        if missing > 0:
            needed = np.zeros(len(leases), np.int64)
            needed[group] = missing
            has_room = self._make_room(needed)
            self._find(move)  # its own room may have been given up for that
            if not has_room or not lease.grow(missing):
                raise NoRoom("the state of a session that moves here has grown, and this replica has no room for it")
        try:
            targets = np.array(lease.units[first : first + len(units)], np.int32)
            self._copier.write_units(group, targets, list(units))
        except CopyFailed as error:
            raise NoRoom(f"the state of a session that moves here cannot be written: {error}") from error

    @guarded
    def complete(self, move: str, end: StateEnd) -> None:
        """Takes in the rest of a session's state, of which nothing is missing then. Raises the errors of `put`, and
        `InvalidRequest` if something is missing, or other weights are in use by now."""
        arrival = self._find(move)
        groups = range(len(arrival.filled))
        if arrival.weights != self._memory.weights.identity or end.identity != arrival.offer.identity:
            raise InvalidRequest("other weights were put to use meanwhile; move the session again")
        wanted = self._counts(end.position) if end.position > 0 else [0 for _ in groups]
        if end.position < 0 or end.units != wanted or any(end.kept[group] > arrival.filled[group] for group in groups):
            raise InvalidRequest(f"the state of {end.position} tokens is not complete; it has {end.units} units")
        for group, kept in enumerate(end.kept):
            arrival.filled[group] = kept
        for piece in end.pieces:
            self.put(move, piece)
        if arrival.filled != wanted:
            raise InvalidRequest(f"the state has {arrival.filled} units; allowed: {wanted}")
        if arrival.leases is not None:
            for lease, count in zip(arrival.leases, wanted, strict=True):
                lease.truncate(count)
        for group, copies in enumerate(arrival.copies):
            del copies[wanted[group] :]
        arrival.complete = True

    def _counts(self, position: int) -> list[int]:
        return [table.kept_units(position) for table in SessionMemory(self._memory, self.holder_name).tables]

    # -- the end

    @guarded
    def let_in(self, move: str) -> None:
        """Frees the place that was kept for a session, which is opened next."""
        if (arrival := self._arrivals.get(move)) is not None:
            self._free_place(arrival)

    def with_adapter(self, digest: str) -> int:
        """Returns the number of arriving sessions whose adapter has these weights."""
        adapters = [each.offer.policy.adapter for each in self._arrivals.values()]
        return sum(adapter is not None and adapter.digest == digest for adapter in adapters)

    @guarded
    def give(self, move: str, session: Session, position: int) -> None:
        """Gives a session that was just restored, and has no memory, the complete state of its first `position` tokens,
        with those of its open turn. Without room in the tiers, or if the room was given up, the state is computed
        again."""
        arrival = self._take(move)
        if arrival is None:
            return
        if session.memory.computed:
            raise InvariantError(f"{session!r} has memory that the arrived state would replace")
        current = arrival.weights == self._memory.weights.identity and not self._occupation.released
        if not position or not current:
            self._release(arrival)
        elif arrival.leases is not None:
            session.memory.receive(position, arrival.leases, self._memory.current)
            if position < len(session.history):
                self._lifecycle.note_memory(session)
        elif position < len(session.history):
            self._idle_memory.hold(session, CopiedState(position, arrival.copies))

    def _take(self, move: str) -> Arrival | None:
        arrival = self._arrivals.pop(move, None)
        if arrival is not None:
            self._free_place(arrival)
        return arrival

    def _free_place(self, arrival: Arrival) -> None:
        if arrival.waits:
            self._registry.free_place(arrival.offer.policy)
        arrival.waits = False

    @staticmethod
    def _release(arrival: Arrival) -> None:
        for lease in arrival.leases or ():
            lease.release()

    @guarded
    def drop(self, move: str) -> None:
        """Gives up the room of a move, if there is any."""
        if (arrival := self._take(move)) is not None:
            self._give_up(arrival)

    def withdraw(self) -> bool:
        """Gives up the room that was reserved last, because its units are needed. Returns whether there was any."""
        for move, arrival in reversed(self._arrivals.items()):
            if arrival.leases is not None:
                self._withdraw(move, arrival)
                return True
        return False

    def withdraw_all(self) -> None:
        """Gives up all room."""
        for move, arrival in list(self._arrivals.items()):
            self._withdraw(move, arrival)

    def _withdraw(self, move: str, arrival: Arrival) -> None:
        if arrival.complete:
            self._give_up(arrival)
        else:
            self.drop(move)

    def _give_up(self, arrival: Arrival) -> None:
        self._release(arrival)
        arrival.leases, arrival.copies, arrival.weights = None, [], ""  # of no weights, so it is not used
        self._registry.traces.add((arrival.offer.tenant, arrival.offer.session))
