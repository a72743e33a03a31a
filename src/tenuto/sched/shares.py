"""Sharing of rows and tokens between tenants by weight; unused shares go to other tenants."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

from tenuto.session.turn import Turn

REMEMBERED_TENANTS = 4096
"""Number of tenants whose last start is remembered; the others count as having started before them."""


class Shares:
    """Counts the rows of each tenant. Shares are proportional to the tenants' weights, by default 1."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        self._rows: Counter[str] = Counter()  # by tenant; only tenants with rows
        self._started: OrderedDict[str, int] = OrderedDict()  # by tenant, the number of its last start
        self._starts = 0

    def weight(self, turn: Turn) -> float:
        return self._weights.get(turn.session.policy.tenant, 1.0)

    @property
    def single(self) -> bool:
        """Whether at most one tenant has rows."""
        return len(self._rows) < 2

    def started(self, turn: Turn) -> None:
        """Records that the turn got a row."""
        tenant = turn.session.policy.tenant
        self._rows[tenant] += 1
        self._starts += 1
        self._started[tenant] = self._starts
        self._started.move_to_end(tenant)
        if len(self._started) > REMEMBERED_TENANTS:
            self._started.popitem(last=False)

    def left(self, turn: Turn) -> None:
        """Records that the turn left its row."""
        tenant = turn.session.policy.tenant
        self._rows[tenant] -= 1
        if not self._rows[tenant]:
            del self._rows[tenant]

    def load(self, turn: Turn) -> float:
        """Returns the load, i.e. rows divided by weight, of the turn's tenant."""
        return self._rows[turn.session.policy.tenant] / self.weight(turn)

    def next_load(self, turn: Turn) -> float:
        """Returns the load of the turn's tenant after the turn also gets a row."""
        return (self._rows[turn.session.policy.tenant] + 1) / self.weight(turn)

    def last_start(self, turn: Turn) -> int:
        """Returns the number of the last start of the turn's tenant; starts are numbered in order, and 0 means
        unknown."""
        return self._started.get(turn.session.policy.tenant, 0)


def places(turns: Sequence[Turn], shares: Shares) -> list[tuple[bool, float]]:
    """Returns the sort keys of running `turns`, given in the order of their ranks. A key is a pair: whether the turn is
    a draft, and the load of its tenant's turns up to this one. Sorted by it, tenants alternate in proportion to their
    weights."""
    seen: Counter[str] = Counter()
    found = []
    for turn in turns:
        tenant = turn.session.policy.tenant
        seen[tenant] += 1
        found.append((turn.drafting, seen[tenant] / shares.weight(turn)))
    return found


def divide(budget: int, wishes: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, int]:
    """Divides `budget` tokens among tenants by weight. No tenant gets more than it wishes for, and all tokens are given
    out while a tenant wishes for more."""
    given: dict[str, int] = {}
    left, weight_left = budget, sum(weights[tenant] for tenant in wishes)
    for tenant in sorted(wishes, key=lambda tenant: wishes[tenant] / weights[tenant]):
        share = -(-left * weights[tenant] // weight_left) if weight_left else left
        given[tenant] = min(wishes[tenant], left, int(share))
        left -= given[tenant]
        weight_left -= weights[tenant]
    return given
