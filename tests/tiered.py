"""The parking of engines that have tiers."""

from __future__ import annotations

from pathlib import Path

from tenuto.engine.engine import Engine
from tenuto.engine.parking import Parking
from tests.present import present


def parking_in(engine: Engine) -> Parking:
    """Returns the engine's parking, where a story needs one."""
    assert engine.idle_memory.restores
    return engine.idle_memory


def unit_files_in(engine: Engine, tier: Path) -> list[Path]:
    """Returns the files in the engine's disk tier, none of which another thread is about to remove."""
    return sorted(tier / name for name in present(parking_in(engine).tiers.disk).files())
