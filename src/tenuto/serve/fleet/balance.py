"""The rule by which replicas move sessions to spread load. Each replica has the same view of the fleet, plans what all
of them should do, and does its own part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from tenuto.base.fleet_views import OwnedSession, ReplicaView
from tenuto.base.turns import TurnState
from tenuto.base.views import SessionKey
from tenuto.base.wire.moves import Surplus

MORE_TURNS = 2
"""By how many turns a replica must exceed another, at least, to move some there."""
MORE_OF_ALL = 0.25
"""And by which share of its own."""
FULL = 0.8
"""The share of a replica's memory from which on idle sessions move elsewhere."""
MORE_MEMORY = 0.25
"""By how much that must exceed another's share."""
MOST = 16
"""The most sessions that a replica moves before it looks again."""


@dataclass(frozen=True, slots=True)
class Shift:
    """A share of its load that a replica should move to another: so many `turns`, or a share of `memory`. Replicas are
    named by their numbers."""

    source: int
    target: int
    turns: int = 0
    memory: float = 0.0

    @property
    def surplus(self) -> Surplus:
        """The kind of load."""
        return "turns" if self.turns else "memory"


def shifts(replicas: Sequence[ReplicaView]) -> list[Shift]:
    """Returns what should move between replicas that take sessions; nothing if none has much more than another."""
    turns = level_turns({each.replica: each.running + each.waiting for each in replicas})
    return turns + level_memory({each.replica: each.used for each in replicas})


def level_turns(turns: Mapping[int, int]) -> list[Shift]:
    """Returns moves after which no replica has two turns more than another, if one now has `MORE_TURNS` and
    `MORE_OF_ALL` more than another."""
    left, moved = dict(turns), Counter[tuple[int, int]]()
    most, least = _ends(left)
    if left.get(most, 0) - left.get(least, 0) < max(MORE_TURNS, MORE_OF_ALL * left.get(most, 0)):
        return []
    while left[most] - left[least] >= MORE_TURNS:
        left[most] -= 1
        left[least] += 1
        moved[most, least] += 1
        most, least = _ends(left)
    return [Shift(source, target, turns=count) for (source, target), count in moved.items()]


def level_memory(used: Mapping[int, float]) -> list[Shift]:
    """Returns moves after which no replica uses `FULL` of its memory and `MORE_MEMORY` more than another."""
    left, moved = dict(used), dict[tuple[int, int], float]()
    most, least = _ends(left)
    while left and left[most] >= FULL and left[most] - left[least] >= MORE_MEMORY:
        share = (left[most] - left[least]) / 2
        left[most] -= share
        left[least] += share
        moved[most, least] = moved.get((most, least), 0.0) + share
        most, least = _ends(left)
    return [Shift(source, target, memory=share) for (source, target), share in moved.items()]


def _ends(loads: Mapping[int, float]) -> tuple[int, int]:
    """Returns the replicas with most and with least load; of equal ones, those with the lowest numbers."""
    order = sorted(loads)
    return max(order, key=loads.__getitem__, default=0), min(order, key=loads.__getitem__, default=0)


def chosen(owned: Sequence[OwnedSession], shift: Shift, staying: AbstractSet[SessionKey]) -> list[OwnedSession]:
    """Returns the sessions of a shift's source that move, without those that are `staying` or pinned. To spread turns,
    sessions with waiting turns move first, then those with least state. To spread memory, idle sessions move, least
    recently used first, and together not more than the shift's share."""
    free = [each for each in owned if each.key not in staying and not each.pinned]
    if shift.turns:
        busy = [each for each in free if each.turn not in (None, TurnState.DRAFTING)]
        busy.sort(key=lambda each: (each.turn is TurnState.RUNNING, each.units, each.key))
        return busy[: min(shift.turns, MOST)]
    left, found = shift.memory, list[OwnedSession]()
    for each in sorted(free, key=lambda each: (-each.rested, each.key)):
        if each.idle and 0 < each.share <= left and len(found) < MOST:
            left -= each.share
            found.append(each)
    return found
