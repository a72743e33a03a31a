"""How tenants share rows and tokens: by weight, and what one does not use goes to the others."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

from tenuto.session.session import Turn

REMEMBERED_TENANTS = 4096
"""How many tenants' last starts are remembered; all others started longer ago."""


class Shares:
    """Counts the rows of each tenant. A tenant's weight, 1 by default, is its share relative to the others'."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        self._rows: Counter[str] = Counter()  # by tenant; only those with rows
        self._started: OrderedDict[str, int] = OrderedDict()  # by tenant, the number of its last start
        self._starts = 0

    def weight(self, turn: Turn) -> float:
        return self._weights.get(turn.session.policy.tenant, 1.0)

    @property
    def single(self) -> bool:
        """Whether at most one tenant has rows."""
        return len(self._rows) < 2

    def started(self, turn: Turn) -> None:
        """The turn has got a row."""
        tenant = turn.session.policy.tenant
        self._rows[tenant] += 1
        self._starts += 1
        self._started[tenant] = self._starts
        self._started.move_to_end(tenant)
        if len(self._started) > REMEMBERED_TENANTS:
            self._started.popitem(last=False)

    def left(self, turn: Turn) -> None:
        """The turn has left its row."""
        tenant = turn.session.policy.tenant
        self._rows[tenant] -= 1
        if not self._rows[tenant]:
            del self._rows[tenant]

    def load(self, turn: Turn) -> float:
        """Rows for its weight that the turn's tenant has now."""
        return self._rows[turn.session.policy.tenant] / self.weight(turn)

    def next_load(self, turn: Turn) -> float:
        """Rows for its weight that the turn's tenant has once the turn has one too."""
        return (self._rows[turn.session.policy.tenant] + 1) / self.weight(turn)

    def last_start(self, turn: Turn) -> int:
        """The number of its tenant's last start; the lowest has waited longest."""
        return self._started.get(turn.session.policy.tenant, 0)


def places(turns: Sequence[Turn], shares: Shares) -> list[tuple[bool, float]]:
    """For each of the running `turns`, which are in the order of their ranks: whether it is a draft, and how many rows
    for its weight its tenant has up to this turn. Sorting by this lets tenants take turns in proportion to weight."""
    seen: Counter[str] = Counter()
    found = []
    for turn in turns:
        tenant = turn.session.policy.tenant
        seen[tenant] += 1
        found.append((turn.drafting, seen[tenant] / shares.weight(turn)))
    return found


def divide(budget: int, wishes: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, int]:
    """Divide `budget` tokens among tenants by weight: nobody gets more than it wishes, and none are left while anybody
    wishes for more."""
    given: dict[str, int] = {}
    left, weight_left = budget, sum(weights[tenant] for tenant in wishes)
    for tenant in sorted(wishes, key=lambda tenant: wishes[tenant] / weights[tenant]):
        share = -(-left * weights[tenant] // weight_left) if weight_left else left
        given[tenant] = min(wishes[tenant], left, int(share))
        left -= given[tenant]
        weight_left -= weights[tenant]
    return given
