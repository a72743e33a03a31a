"""The load of a replica, and whether it accepts a session that another one moves away to spread load."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tenuto.base.errors import NoRoom
from tenuto.base.fleet_views import ReplicaLoad
from tenuto.base.wire.moves import Relieved, StateOffer, Surplus
from tenuto.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Burden:
    """A replica's load: its running and waiting `turns`, and the share of its memory that is `used`. `capacities`:
    those of its pools."""

    turns: int
    used: float
    capacities: tuple[int, ...]

    def without(self, leaving: Iterable[StateOffer]) -> Burden:
        """Returns the burden without sessions that are leaving."""
        return self._changed(leaving, -1)

    def plus(self, coming: Iterable[StateOffer]) -> Burden:
        """Returns the burden with sessions that are to come."""
        return self._changed(coming, 1)

    def _changed(self, offers: Iterable[StateOffer], by: int) -> Burden:
        turns, used = self.turns, self.used
        for each in offers:
            turns += by * (each.params is not None)
            used += by * self._share(each)
        return replace(self, turns=turns, used=used)

    def _share(self, offer: StateOffer) -> float:
        return max((units / most for units, most in zip(offer.units, self.capacities, strict=False) if most), default=0)

    def relieved(self, surplus: Surplus | None) -> Relieved | None:
        """Returns the part of the burden that a session is to relieve: `surplus` names what its replica has too much
        of."""
        if surplus is None:
            return None
        return Relieved(turns=self.turns) if surplus == "turns" else Relieved(used=self.used)

    def require_less(self, relieved: Relieved, offer: StateOffer) -> None:
        """Raises `NoRoom` if, after the move, this replica would have more to do than the one that the session
        leaves."""
        share = self._share(offer)
        if relieved.turns is not None and self.turns + 1 > relieved.turns - 1:
            raise NoRoom(f"{self.turns} turns run or wait here; allowed for a session that comes to spread load: fewer")
        if relieved.used is not None and self.used + share > relieved.used - share:
            raise NoRoom(
                f"{self.used:.0%} of the memory is used; allowed for a session that comes to spread load: less"
            )


def burden_of(engine: Engine) -> Burden:
    """Returns the burden of an engine's replica."""
    load = load_of(engine)
    capacities = tuple(pool.capacity for pool in engine.memory.pools)
    return Burden(load.running + load.waiting, load.used, capacities)


def load_of(engine: Engine) -> ReplicaLoad:
    """Returns the load of an engine, without the fields that only its edge can fill."""
    return ReplicaLoad(running=len(engine.batch), waiting=engine.queued, used=round(_used(engine), 4))


def _used(engine: Engine) -> float:
    """Returns the largest share of a pool that is used. Once a pool is more than half full, units that only save work
    do not count. Before that they are few, and finding them takes a look at every unit."""
    pools = engine.memory.pools
    leased = [pool.leased for pool in pools]
    if any(2 * count > pool.capacity for count, pool in zip(leased, pools, strict=True)):
        yielding = engine.pressure.reclaimable().tolist()
        leased = [count - each for count, each in zip(leased, yielding, strict=True)]
    return max((count / pool.capacity for count, pool in zip(leased, pools, strict=True) if pool.capacity), default=0.0)
