"""Pauses, release of the model's memory to the system and its restoration, and replacement of the weights."""

from __future__ import annotations

from collections.abc import Collection

from tenuto.base.checks import shown
from tenuto.base.errors import IllegalTransition, InvalidRequest, InvariantError, MemoryReleased
from tenuto.base.plan import PARTS, MemoryPart, Weights
from tenuto.base.turns import EndReason
from tenuto.engine.core import Core
from tenuto.engine.flights import Flights
from tenuto.engine.guard import guarded
from tenuto.engine.lifecycle import Lifecycle
from tenuto.memory.lineage import WeightsVersion

NEW_WEIGHTS = "weights changed"
"""The reason why tokens are computed again under other weights."""


class Occupation:
    """Determines whether the engine computes. It plans no steps while it is `paused`, or while the system has parts of
    the model's memory back, which are `released`."""

    def __init__(self, core: Core, lifecycle: Lifecycle, flights: Flights) -> None:
        self.fuse = core.fuse
        self._executor = core.executor
        self._memory = core.memory
        self._sessions = core.registry
        self._batch = core.batch
        self._queue = core.queue
        self._lifecycle = lifecycle
        self._idle_memory = core.idle_memory
        self._proposer = core.proposer
        self._flights = flights
        self.paused = False
        self.released: frozenset[MemoryPart] = frozenset()
        self._updates = 0  # the number of times that other weights were put to use

    @property
    def has_turns(self) -> bool:
        """Whether turns run or wait, or steps are in flight."""
        return bool(len(self._batch) or len(self._queue) or len(self._flights))

    def require_memory(self) -> None:
        """Raises `MemoryReleased` while turns cannot run."""
        if self.released:
            raise MemoryReleased(
                f"the memory of {' and '.join(sorted(self.released))} is released; allowed until it is resumed: "
                "operations that need no turn"
            )

    @guarded
    def pause(self, *, release: bool = False) -> None:
        """Plans no steps until `resume`. With `release`, running turns give up the units they acquired, and queue."""
        self.paused = True
        for turn in list(self._batch.running()) if release else ():
            self._lifecycle.preempt(turn)

    @guarded
    def resume(self) -> None:
        """Ends a pause."""
        self.paused = False

    @guarded
    def release(self, parts: Collection[MemoryPart]) -> None:
        """Gives memory back to the system until `restore`. Every session drops to its tokens, or is parked. New turns
        are rejected; turns of a paused engine wait. Raises `IllegalTransition` unless the engine is paused or idle."""
        if self.has_turns and not self.paused:
            raise IllegalTransition(
                "turns run or wait; memory can be released while generation is paused or once no turn runs or waits"
            )
        wanted = frozenset(_part(part) for part in parts) - self.released
        if wanted:
            self._vacate(park=True)
            self._executor.release(wanted)
            if self._proposer is not None:
                self._proposer.release(wanted)
            self.released |= wanted

    @guarded
    def restore(
        self, parts: Collection[MemoryPart], weights: Weights | None = None, identity: str | None = None
    ) -> None:
        """Allocates those of `parts` that are released; `weights` are given exactly if weights are among these. Turns
        go on once no part is released. `identity`: the engine's new identity, if the weights differ from the released
        ones; parked memory is then never used again. Raises `ConfigError`, having changed nothing, if there is not
        enough memory."""
        wanted = frozenset(_part(part) for part in parts) & self.released
        if ("weights" in wanted) != (weights is not None):
            raise IllegalTransition("the weights were released or resumed meanwhile; try again")
        if wanted:
            self._executor.restore(wanted, weights)
            if self._proposer is not None:
                self._proposer.restore(wanted)
            self.released -= wanted
            if identity is not None:
                self._vacate(park=False)
                self._begin_version(identity, self._memory.weights.name)

    @guarded
    def update(
        self,
        weights: Weights,
        identity: str = "",
        *,
        version: str | None = None,
        abort: bool = False,
        keep_state: bool = False,
    ) -> str:
        """Computes with `weights` from now on; `identity` is the engine's new identity, and `version` their name, by
        default the number of updates. Results of the old weights are never used again: every session drops to its
        tokens, and parked memory is discarded. With `keep_state` sessions and their forks go on with the state they
        have, on the device and parked, which no other session finds and no later process uses. Submitted turns go on,
        or with `abort` end. Returns the version. Raises `IllegalTransition` if the weights are released, and
        `ConfigError`, having replaced nothing, if there is not enough memory."""
        if "weights" in self.released:
            raise IllegalTransition("the weights are released; resume them before they are replaced")
        if abort:
            self._abort_turns()
        if keep_state:
            self._stand_still()
        else:
            self._vacate(park=False)
        self._executor.restore((), weights, [pool.leased_units() for pool in self._memory.pools])
        self._begin_version(identity, version, keep=keep_state)
        return self._memory.weights.name

    @guarded
    def name_weights(self, version: str, *, abort: bool = False) -> None:
        """Calls the weights in use `version` from now on. With `abort`, ends submitted turns."""
        if abort:
            self._abort_turns()
        self._note_weights()
        self._memory.weights = self._memory.weights._replace(name=version)

    def _abort_turns(self) -> None:
        for session in list(self._sessions):
            if session.turn is not None and not session.turn.drafting and not session.held:
                self._lifecycle.abort(session.turn, EndReason.ABORT)

    def _note_weights(self) -> None:
        """Records in open turns what the weights in use have sampled, before they or their name change."""
        for session in self._sessions:
            if session.turn is not None:
                session.turn.note_weights(self._memory.weights.name)

    def _begin_version(self, identity: str, version: str | None, *, keep: bool = False) -> None:
        """Records that other weights are in use. With `keep`, some state of earlier ones stays."""
        self._updates += 1
        self._note_weights()
        self._idle_memory.weights_change(self._sessions, identity, keep=keep)
        name = version if version is not None else str(self._updates)
        self._memory.weights = WeightsVersion(identity or f"update {self._updates}", name)
        for session in self._sessions if keep else ():
            self._lifecycle.note_memory(session)

    def _stand_still(self) -> None:
        """Lets running turns queue again with the memory of their settled tokens, and lands all steps in flight. Memory
        that only served to be found by other sessions is released, and vectors are averaged anew."""
        for turn in list(self._batch.running()):
            self._lifecycle.pause(turn)
        self._flights.land()
        self._idle_memory.finish()
        for session in list(self._sessions.prefixes):
            self._lifecycle.flush(session)
        for session in self._sessions:
            if session.turn is not None and session.turn.pool is not None:
                if session.memory.turn is not None:
                    self._lifecycle.preempt(session.turn)
                session.turn.pool.restart()

    def _vacate(self, *, park: bool) -> None:
        """Frees all units and lands all steps in flight; running turns queue again. With `park`, the memory of sessions
        is parked as far as there is room; otherwise it is discarded, in tiers too."""
        self._lifecycle.expectations.withdraw_all()
        while self._lifecycle.withdraw_arrival():
            pass
        why = "preempted" if park else NEW_WEIGHTS
        for turn in list(self._batch.running()):
            self._lifecycle.preempt(turn, why)
        for session in [*self._sessions, *self._sessions.prefixes]:
            if not park:
                self._lifecycle.flush(session, NEW_WEIGHTS)
                if session.turn is not None and session.turn.pool is not None:
                    session.turn.pool.restart()
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
