"""The map of a viewer who looks from time to time, compared with the leases of sessions."""

from __future__ import annotations

from tenuto.engine.engine import Engine
from tenuto.serve.map_state import MapState


class Mapped:
    """Looks at an engine's map. Each look describes one session that has not changed, so that others are described only
    if they were noted."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        engine._watch.round = 1
        self._state: MapState | None = None
        self._again: list[int] = []

    def look(self) -> str | None:
        """Returns what is wrong with the map, or `None`. Units of checkpoints that were evicted may still be shown,
        until the next looks."""
        state, fresh = self._state or MapState(), self._state is None
        self._state = state
        part = self._engine.look(fresh=fresh, again=self._again)
        news = state.read(part)
        for number in news.gone:
            del state.sessions[number]
        state.take(news)
        self._again = news.again
        if news.more:
            return "a look has left sessions for the next one, although no time has passed"
        there = [*self._engine.registry, *self._engine.registry.prefixes]
        shown = {number: shown.units for number, shown in state.sessions.items()}
        numbers = self._engine._watch._numbers
        if set(map(numbers.get, there)) != shown.keys():
            return f"{len(shown)} sessions are shown; there are {len(there)}"
        for session in there:
            for index, pool in enumerate(self._engine.memory.pools):
                held = {
                    unit
                    for holder in session.memory.holders()
                    for lease in holder.leases()
                    if lease.pool is pool
                    for unit in lease.units
                }
                if missing := held.difference(shown[numbers[session]][index].tolist()):
                    return f"units {sorted(missing)} of {pool.name} are held by {session.id} and not shown"
        return None
