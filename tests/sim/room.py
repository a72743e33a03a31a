"""Units that the simulator's turns need at most, and those left for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tenuto.base.groups import Kind
from tenuto.base.turns import TurnState
from tenuto.session.turn import Turn
from tests.sim import internals

if TYPE_CHECKING:
    from tests.sim.world import World


class Room:
    """Upper bounds of the units that turns of a world need, and the units it has for them."""

    def __init__(self, world: World) -> None:
        self._world = world

    def left(self) -> list[int]:
        """Returns the units of each group that are free and not needed for tokens that turns already know."""
        engine = self._world.engine
        room = [pool.free + pool.limbo for pool in engine.memory.pools]
        for turn in engine.batch.running():
            for group, pledge in enumerate(self.pledge(turn)):
                room[group] -= pledge
        return room

    def fits(self, turn: Turn) -> bool:
        """Returns whether a waiting turn fits beside the turns in rows and what they know they will need, if all others
        yield. Units in limbo are not free yet, and each step adds to them."""
        engine, config = self._world.engine, self._world.config
        rows = engine.batch.running()
        if sum(t.state is not TurnState.DRAFTING for t in rows) >= config.running:
            return False
        need = [
            n + pool.limbo for n, pool in zip(internals.essential_units(engine, turn), engine.memory.pools, strict=True)
        ]
        for group, worst in enumerate(self.worst(turn.length + 1)):
            need[group] += worst + 1
        for running in rows:
            for group, pledge in enumerate(self.pledge(running)):
                need[group] += pledge
        return all(n <= capacity for n, capacity in zip(need, config.units, strict=True))

    def fits_with_its_session(self, turn: Turn) -> bool:
        """Returns whether a waiting turn fits beside its session and the running turns, if all others yield. Full
        attention only: for other kinds the upper bounds are too loose."""
        world = self._world
        if any(group.kind is not Kind.FULL for group in world.config.groups) or world.engine.batch.running():
            return False
        kept = internals.essential_units(world.engine, turn)
        size = world.config.page_size
        start = min(turn.session.memory.computed, turn.base_length, max(0, turn.prompt_length - 1))
        more = -(-(turn.length + 1) // size) - start // size
        return all(n + more + 1 <= capacity for n, capacity in zip(kept, world.config.units, strict=True))

    def pledge(self, turn: Turn) -> list[int]:
        """Returns an upper bound of the units a running turn may still acquire for the tokens it knows."""
        own, pledges = internals.held_beyond(self._world.engine, turn), []
        for group, worst in enumerate(self.worst(turn.length + 1 + 2 * self._world.config.overlap)):
            if self._world.config.groups[group].kind is Kind.FULL:
                pledges.append(max(0, worst - internals.table_entries(turn, group)))
            else:
                pledges.append(max(0, worst - own[group]))
        return pledges

    def worst(self, length: int) -> list[int]:
        """Returns an upper bound of the units of each group that a turn needs to compute `length` tokens from
        nothing."""
        config = self._world.config
        found = []
        for group in config.groups:
            pages = -(-length // config.page_size)
            if group.kind is Kind.STATE:
                found.append(3 if config.overlap else 2)
            elif group.kind is Kind.FULL:
                found.append(pages)
            else:
                window = -(-(group.window - 1) // config.page_size) + 1
                kept = config.lookahead + 1 if config.lookahead else 0
                ahead = -(-(config.budget * (1 + config.overlap) + kept) // config.page_size) + 1
                found.append(min(pages, 2 * window + ahead))
        return found

    @property
    def acquired_at_most(self) -> int:
        """The most units of a group that one step can add to a turn."""
        config = self._world.config
        return -(-config.budget // config.page_size) + 1
