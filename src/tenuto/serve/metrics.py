"""Prometheus metrics, in the habits of the field."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from tenuto.serve.turns import LiveTurn


class Metrics:
    """What the edge counts by itself."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def turn_started(self, turn: LiveTurn) -> None:
        """A turn was accepted."""

    def turn_ended(self, turn: LiveTurn) -> None:
        """An accepted turn has ended."""
