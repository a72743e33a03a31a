"""The parking of engines that have tiers."""

from __future__ import annotations

from tenuto.engine.engine import Engine
from tenuto.engine.parking import Parking


def parking_in(engine: Engine) -> Parking:
    """Returns the engine's parking, where a story needs one."""
    assert engine.idle_memory.restores
    return engine.idle_memory
