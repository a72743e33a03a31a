"""How tenants share rows and tokens: each by its weight, and what one leaves the others take."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

from tenuto.session.session import Turn

REMEMBERED_TENANTS = 4096
"""Tenants of whom it is known when they last started a turn; the others did so longer ago."""


class Shares:
    """Counts the rows of each tenant. A tenant's weight, 1 if it was given none, is its share against the others'."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        self._rows: Counter[str] = Counter()  # by tenant; those without rows are not there
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
        """Rows by weight that the turn's tenant has now."""
        return self._rows[turn.session.policy.tenant] / self.weight(turn)

    def next_load(self, turn: Turn) -> float:
        """Rows by weight that the turn's tenant has once the turn has one too."""
        return (self._rows[turn.session.policy.tenant] + 1) / self.weight(turn)

    def last_start(self, turn: Turn) -> int:
        """The number of its tenant's last start; the lowest has waited longest for one."""
        return self._started.get(turn.session.policy.tenant, 0)


def places(turns: Sequence[Turn], shares: Shares) -> list[tuple[bool, float]]:
    """For running turns, each tenant's in the order of their ranks: whether it is a draft, and how many rows by weight
    its tenant has up to and with this one. Sorted by it, tenants take turns in proportion to their weights."""
    seen: Counter[str] = Counter()
    found = []
    for turn in turns:
        tenant = turn.session.policy.tenant
        seen[tenant] += 1
        found.append((turn.drafting, seen[tenant] / shares.weight(turn)))
    return found


def divide(budget: int, wishes: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, int]:
    """Divide `budget` tokens among tenants who wish for some: by weight, nobody more than its wish, none left over
    while anybody wishes for more."""
    given: dict[str, int] = {}
    left, weight_left = budget, sum(weights[tenant] for tenant in wishes)
    for tenant in sorted(wishes, key=lambda tenant: wishes[tenant] / weights[tenant]):
        share = -(-left * weights[tenant] // weight_left) if weight_left else left
        given[tenant] = min(wishes[tenant], left, int(share))
        left -= given[tenant]
        weight_left -= weights[tenant]
    return given
