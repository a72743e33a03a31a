"""Release of the model's memory to the system and its restoration, and replacement of the weights."""

from __future__ import annotations

from collections.abc import Collection

from tenuto.base.checks import shown
from tenuto.base.errors import IllegalTransition, InvalidRequest, InvariantError, MemoryReleased
from tenuto.base.plan import PARTS, MemoryPart, Weights
from tenuto.base.turns import EndReason
from tenuto.engine.core import Core
from tenuto.engine.flights import Flights
from tenuto.engine.lifecycle import Lifecycle


class Occupation:
    """Releases and restores the model's memory. `released`: the parts that the system has back."""

    def __init__(self, core: Core, lifecycle: Lifecycle, flights: Flights) -> None:
        self._executor = core.executor
        self._memory = core.memory
        self._sessions = core.registry
        self._batch = core.batch
        self._lifecycle = lifecycle
        self._idle_memory = core.idle_memory
        self._flights = flights
        self.released: frozenset[MemoryPart] = frozenset()

    def require_memory(self) -> None:
        """Raises `MemoryReleased` while turns cannot run."""
        if self.released:
            raise MemoryReleased(
                f"the memory of {' and '.join(sorted(self.released))} is released; allowed until it is resumed: "
                "operations that need no turn"
            )

    def release(self, parts: Collection[MemoryPart]) -> None:
        """See `Engine.release_memory`."""
        wanted = frozenset(_part(part) for part in parts) - self.released
        if wanted:
            self._vacate(park=True)
            self._executor.release(wanted)
            self.released |= wanted

    def restore(self, parts: Collection[MemoryPart], weights: Weights | None, identity: str | None) -> None:
        """See `Engine.restore_memory`."""
        wanted = frozenset(_part(part) for part in parts) & self.released
        if ("weights" in wanted) != (weights is not None):
            raise IllegalTransition("the weights were released or resumed meanwhile; try again")
        if wanted:
            self._executor.restore(wanted, weights)
            self.released -= wanted
            if identity is not None:
                self._vacate(park=False)
                self._idle_memory.tiers.become(identity)

    def update(self, weights: Weights, identity: str, *, abort: bool) -> None:
        """See `Engine.update_weights`."""
        if "weights" in self.released:
            raise IllegalTransition("the weights are released; resume them before they are replaced")
        for session in list(self._sessions) if abort else ():
            if session.turn is not None and not session.turn.drafting:
                self._lifecycle.abort(session.turn, EndReason.ABORT)
        self._vacate(park=False)
        self._executor.restore((), weights)
        self._idle_memory.tiers.become(identity)

    def _vacate(self, *, park: bool) -> None:
        """Frees all units and lands all steps in flight; running turns queue again. With `park`, the memory of sessions
        is parked as far as there is room; otherwise it is discarded, in tiers too."""
        for turn in list(self._batch.running()):
            self._lifecycle.preempt(turn)
        for session in [*self._sessions, *self._sessions.prefixes]:
            if not park:
                self._lifecycle.flush(session)
            while session.memory.computed or session.memory.turn is not None:
                self._lifecycle.drop(session)
        self._flights.land()
        self._require_empty()

    def _require_empty(self) -> None:
        """Waits for copies under way. Raises `InvariantError` if any unit is not free then."""
        self._idle_memory.finish()
        for pool in self._memory.pools:
            if pool.free != pool.capacity:
                raise InvariantError(f"{pool.name}: {pool.capacity - pool.free} units are in use without a holder")


def _part(part: object) -> MemoryPart:
    """Returns `part` if it names a part of memory. Raises `InvalidRequest` otherwise."""
    for known in PARTS:
        if part == known:
            return known
    raise InvalidRequest(f"a tag is {shown(part)}; allowed: {' and '.join(PARTS)}", param="tags")
