"""The number of replicas that a fleet needs for its load: a policy for Ray Serve's autoscaler."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

TARGET = 0.8
"""The load of a replica at which the fleet stays as it is."""
ROWS, UNITS, QUEUE = "rows", "units", "queue"
"""The figures of a replica: the share of rows that run a turn, the largest share of a memory group's units that turns
hold, and the turns that wait, in multiples of all rows."""

_SAMPLE = re.compile(r"^(tenuto_\w+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def load_of(metrics: str, rows: int) -> dict[str, float]:
    """Returns a server's load from its `metrics` in Prometheus's format. `rows`: the most turns that run at once."""
    running = waiting = 0.0
    total: dict[str, float] = {}
    held: dict[str, float] = {}
    for name, labels, text in _SAMPLE.findall(metrics):
        value, named = float(text), dict(_LABEL.findall(labels))
        if name == "tenuto_turns_running":
            running = value
        elif name in ("tenuto_turns_queued", "tenuto_turns_waiting"):
            waiting += value
        elif name == "tenuto_memory_units" and named["tier"] == "device":
            total[named["group"]] = total.get(named["group"], 0.0) + value
        elif name == "tenuto_memory_leased_units" and named["tier"] == "device" and named["holder"] == "turn":
            held[named["group"]] = value
    units = max((held.get(group, 0.0) / count for group, count in total.items() if count), default=0.0)
    return {ROWS: running / rows, UNITS: units, QUEUE: waiting / rows}


def by_load(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Implements an autoscaling policy of Ray Serve: returns the number of replicas that brings their mean load to
    `TARGET`. A replica's load is the larger of its shares of rows and units, plus its queue. Ray applies bounds,
    factors and delays."""
    figures: dict[str, dict[Any, float]] = context.aggregated_metrics or {}
    replicas = set().union(*(figures.get(name, {}) for name in (ROWS, UNITS, QUEUE)))
    if not replicas:
        return float(context.target_num_replicas), {}

    def of(name: str, replica: Any) -> float:
        return figures.get(name, {}).get(replica, 0.0)

    loads = [max(of(ROWS, each), of(UNITS, each)) + of(QUEUE, each) for each in replicas]
    mean = sum(loads) / len(loads)  # of those that have reported
    current: int = context.current_num_replicas
    return current * mean / TARGET, {}
