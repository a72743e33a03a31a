"""Counters of an engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field

from tenuto.base.turns import Usage
from tenuto.base.views import Transition


@dataclass(slots=True)
class Counts:
    """Counters of an engine.

    - `transitions`: operations and transitions.
    - `totals`: tokens of all ended turns, by field of `Usage`.
    - `recomputed`: tokens that must be computed again, by reason.
    - `replayed`: tokens in memory that forks and rewinds lost because a checkpoint was missing, by operation.
    - `prefix_lookups`: turns that lacked at least a page, by `HITS` and `MISSES`.
    - `prefix_tokens`: tokens found, by `HITS`.
    - `imports`: sessions that came with state, by its outcome: "imported", "taken over" (from a replica that is gone),
      or "no room" and "copy failed", after which it is computed from the tokens.
    """

    transitions: Counter[Transition] = field(default_factory=Counter)
    totals: Counter[str] = field(default_factory=Counter)
    recomputed: Counter[str] = field(default_factory=Counter)
    replayed: Counter[str] = field(default_factory=Counter)
    prefix_lookups: Counter[str] = field(default_factory=Counter)
    prefix_tokens: Counter[str] = field(default_factory=Counter)
    imports: Counter[str] = field(default_factory=Counter)

    def note(self, operation: str, state: str | None = None) -> None:
        """Counts an operation or a transition; for `state` see `Transition`."""
        self.transitions[Transition(operation, state)] += 1

    def add(self, usage: Usage) -> None:
        """Adds the tokens of a turn that has ended."""
        self.totals.update({name: count for name, count in asdict(usage).items() if name != "recomputed"})
