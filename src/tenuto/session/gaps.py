"""The times that tools took, by tenant, to guess when a session's next turn comes."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

KEPT = 8
"""The number of times that are remembered of each set of tools."""
SETS = 64
"""The number of sets of tools that are remembered of a tenant."""
TENANTS = 1024
"""The number of tenants whose tools are remembered."""
Names = tuple[str, ...]
"""The names of the tools that are called together, in order, each once."""


class ToolGaps:
    """Remembers how long after a turn that called tools the next turn came, in seconds, by the names of these tools.
    Tools and tenants that called nothing for longest are forgotten. No tenant's times have an effect on another's
    guesses."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, OrderedDict[Names, deque[float]]] = OrderedDict()

    def note(self, tenant: str, names: Names, seconds: float) -> None:
        """Records that tools which were called together took `seconds`."""
        tools = self._tenants.setdefault(tenant, OrderedDict())
        tools.setdefault(names, deque(maxlen=KEPT)).append(seconds)
        tools.move_to_end(names)
        self._tenants.move_to_end(tenant)
        if len(tools) > SETS:
            tools.popitem(last=False)
        if len(self._tenants) > TENANTS:
            self._tenants.popitem(last=False)

    def guess(self, tenant: str, names: Names) -> float | None:
        """Returns how many seconds the tools will take: the lower quartile of their last times, since it is better to
        be early. Of tools that were never called together, the one that takes longest decides. `None`: not known."""
        tools = self._tenants.get(tenant)
        if tools is None:
            return None
        known = [names] if names in tools else [(name,) for name in names if (name,) in tools]
        return max((_quartile(tools[each]) for each in known), default=None)


def _quartile(times: Iterable[float]) -> float:
    """Returns the lower quartile."""
    ordered = sorted(times)
    return ordered[(len(ordered) - 1) // 4]
