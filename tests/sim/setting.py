"""What a seed decides about its world: memory groups, pressure, sizes, faults."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from tenuto.base.config import EngineConfig
from tenuto.base.groups import GroupSpec, Kind, MemorySpec
from tenuto.memory.memory import Shape, session_units, turn_units

MIXES: tuple[tuple[Kind, ...], ...] = (
    (Kind.FULL,),
    (Kind.SLIDING,),
    (Kind.STATE,),
    (Kind.FULL, Kind.SLIDING),
    (Kind.FULL, Kind.STATE),
    (Kind.SLIDING, Kind.STATE),
    (Kind.FULL, Kind.SLIDING, Kind.STATE),
)
PRESSURES = ("ample", "tight", "barely")


@dataclass(frozen=True)
class WorldConfig:
    """What a seed decides about its world."""

    seed: int
    mix: tuple[Kind, ...]
    pressure: str
    overlap: int
    lookahead: int
    page_size: int
    window: int
    context: int
    budget: int
    running: int
    sessions: int
    units: tuple[int, ...]
    checkpoint_share: float
    interval: int
    fail_rate: float
    recount_every: int

    @property
    def label(self) -> tuple[str, str]:
        return self.pressure, "+".join(kind.value for kind in self.mix)


def small_world(seed: int) -> WorldConfig:
    """A world of up to 32 sessions and 256 units, recounted after every step. Consecutive seeds go through all mixes,
    pressure levels and overlaps."""
    rng = Random(seed)
    mix, pressure = MIXES[seed % 7], PRESSURES[(seed // 7) % 3]
    running = rng.choice((1, 2, 3, 5, 8))
    lookahead = rng.choice((0, 0, 3))
    page_size = rng.choice((1, 2, 3, 4, 8))
    context = rng.choice((24, 48, 90))
    return _sized(
        WorldConfig(
            seed=seed,
            mix=mix,
            pressure=pressure,
            overlap=(seed // 21) % 2,
            lookahead=lookahead,
            page_size=page_size,
            window=rng.choice((2, 3, 5, 9, 16)),
            context=context,
            budget=running + rng.choice((1, 3, 8, 24)),
            running=running,
            sessions=rng.choice((3, 8, 16, 32)),
            units=(),
            checkpoint_share=rng.choice((0.0, 0.2, 0.5, 1.0)),
            interval=rng.choice((4, 8, 16, 512)),
            fail_rate=rng.choice((0.0, 0.02, 0.06)),
            recount_every=1,
        ),
        most=256,
    )


def large_world(seed: int) -> WorldConfig:
    """Hundreds of sessions and thousands of units, recounted every 100 steps."""
    rng = Random(seed)
    return _sized(
        WorldConfig(
            seed=seed,
            mix=MIXES[seed % 7],
            pressure=PRESSURES[(seed // 7) % 2],
            overlap=seed % 2,
            lookahead=rng.choice((0, 3)),
            page_size=rng.choice((4, 16)),
            window=rng.choice((20, 64)),
            context=800,
            budget=128,
            running=32,
            sessions=300,
            units=(),
            checkpoint_share=0.4,
            interval=64,
            fail_rate=0.005,
            recount_every=100,
        ),
        most=20_000,
    )


def _sized(config: WorldConfig, most: int) -> WorldConfig:
    """Pools that hold about all sessions, a few turns, or barely one."""
    shape = Shape.of(engine_config(config), config.page_size)
    turns = {"ample": config.sessions + config.running, "tight": 3, "barely": 1}[config.pressure]
    beside = config.pressure == "barely" and config.seed % 4 > 0  # sessions beside the one turn may stay in memory
    units = []
    for group in spec_of(config).groups:
        one = turn_units(group, config.page_size, shape, config.context, generates=True)
        kept = 6 * session_units(group, config.page_size, config.context // 2) if beside else 0
        units.append(max(one, min(most, one * turns + kept)))
    return replace(config, units=tuple(units))


def spec_of(config: WorldConfig) -> MemorySpec:
    groups = tuple(GroupSpec(kind, 1, config.window if kind is Kind.SLIDING else 0) for kind in config.mix)
    return MemorySpec(config.page_size, groups)


def engine_config(config: WorldConfig) -> EngineConfig:
    return EngineConfig(
        context_length=config.context,
        max_running=config.running,
        max_sessions=config.sessions,
        max_queued=config.sessions + 2,
        token_budget=config.budget,
        overlap=config.overlap,
        lookahead=config.lookahead,
        aging_seconds=5.0,
        checkpoint_interval=config.interval,
        checkpoint_share=config.checkpoint_share,
        draft_timeout=40.0,
        audit_every=0,
    )
