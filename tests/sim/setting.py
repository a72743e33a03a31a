"""The settings that a seed decides: memory groups, pressure, sizes, faults."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from tenuto.base.config import EngineConfig
from tenuto.base.groups import GroupSpec, Kind, MemorySpec
from tenuto.memory.memory import session_units, turn_units
from tenuto.memory.shape import Shape

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
    """The settings that a seed decides. `recount_every`: the average number of steps between full recounts. `look`: the
    share of steps after which memory is compared slot by slot."""

    seed: int
    groups: tuple[GroupSpec, ...]
    pressure: str
    overlap: int
    lookahead: int
    page_size: int
    context: int
    budget: int
    running: int
    sessions: int
    queued: int
    units: tuple[int, ...]
    checkpoint_share: float
    interval: int
    aging: float
    fail_rate: float
    recount_every: int
    look: float
    text: bool = False
    story: str = ""  # of a scenario
    weights: tuple[tuple[str, float], ...] = ()  # of tenants
    tiers: bool = False  # sessions that yield move to host memory and disk; copies, writes and reads fail
    grammars: bool = False  # most turns have one
    limits: bool = False  # many turns limit the tokens of their output, or name tokens to be scored
    prefixes: bool = False  # memory of closed sessions is kept, and inputs share prefixes
    pins: bool = False  # some sessions are pinned
    erases: bool = False  # sessions are erased
    adapters: bool = False  # most sessions have one of two adapters
    replacing: bool = False  # sessions take over the history and memory of others
    overtaking: bool = False  # sessions start from memory that running turns compute, and are rewound into shared pages
    drafted: bool = False  # a draft model guesses
    expects: bool = False  # the next turns of sessions are expected
    headed: bool = False  # the model's head for multi-token prediction guesses, where there is a group with pages
    trains: bool = False  # weights are replaced, and sessions may keep their state

    @property
    def guesses(self) -> str:
        """The kind of proposer; see `tests.sim.guesses`."""
        if self.drafted:
            return ("right draft", "right draft", "wrong draft")[self.seed % 3]
        if self.headed and any(group.paged for group in self.groups):
            return "head"
        return ("mixed", "right", "mixed", "hostile", "suffixes")[self.seed // 2 % 5] if self.lookahead else ""

    @property
    def copy_fail_rate(self) -> float:
        """The probability that a copy between device and host fails."""
        return 0.05 if self.tiers else 0.0

    @property
    def label(self) -> tuple[str, str]:
        kinds = dict.fromkeys(group.kind for group in self.groups)
        return self.pressure, "+".join(kind.value for kind in kinds)


def small_world(
    seed: int,
    *,
    grammars: bool = False,
    overtaking: bool = False,
    drafted: bool = False,
    headed: bool = False,
) -> WorldConfig:
    """Returns a world of up to 32 sessions, recounted and compared after every other step or so. Consecutive seeds go
    through all mixes, pressure levels and overlaps; every third is drawn from wider ranges. With `overtaking` several
    turns can run at once, and pages have several slots."""
    rng = Random(seed)
    mix, pressure = MIXES[seed % 7], PRESSURES[(seed // 7) % 3]
    wide = seed % 3 == 1
    running = rng.choice((1, 2, 3, 5, 8))
    page_size = rng.choice((1, 2, 3, 4, 8)) if not wide else rng.choice((1, 2, 5, 7, 16, 32, 64, rng.randint(1, 64)))
    window = rng.choice((2, 3, 5, 9, 16)) if not wide else rng.randint(2, 100)
    if overtaking:
        running, page_size = max(2, running), max(3, page_size)
    context = rng.choice((24, 48, 90)) if not wide else rng.choice((12, 60, 130, 260))
    groups = [GroupSpec(kind, 1, window if kind is Kind.SLIDING else 0) for kind in mix]
    if wide and rng.random() < 0.4:
        kind = rng.choice(mix)  # a second group of one kind; windows differ
        groups.append(GroupSpec(kind, 1, rng.randint(2, 40) if kind is Kind.SLIDING else 0))
    return _sized(
        WorldConfig(
            seed=seed,
            groups=tuple(groups),
            pressure=pressure,
            overlap=(seed // 7) % 2,
            lookahead=rng.choice((2, 5)) if drafted or headed else rng.choice((0, 3) if grammars else (0, 0, 3)),
            page_size=page_size,
            context=context,
            budget=running + rng.choice((1, 3, 8, 24, *((64, 150) if wide else ()))),
            running=running,
            sessions=rng.choice((8, 16, 32) if overtaking else (3, 8, 16, 32)),
            queued=rng.choice((1, 3, 50, 50, 50)),
            units=(),
            checkpoint_share=rng.choice((0.0, 0.2, 0.5, 1.0)),
            interval=rng.choice((4, 8, 16, 512, rng.randint(1, 60))),
            aging=rng.choice((5.0, 5.0, 0.5, 1e9)) if wide else 5.0,
            fail_rate=rng.choice((0.0, 0.0, 0.02, 0.06)),
            recount_every=3,
            look=0.6 if context <= 100 else 0.4,
            text=rng.random() < 0.3,
            grammars=grammars,
            overtaking=overtaking,
            drafted=drafted,
            headed=headed,
        ),
        most=256,
        rng=rng,
    )


def large_world(seed: int) -> WorldConfig:
    """Returns a world of hundreds of sessions and thousands of units, recounted every 100 steps."""
    rng = Random(seed)
    window = rng.choice((20, 64))
    return _sized(
        WorldConfig(
            seed=seed,
            groups=tuple(GroupSpec(kind, 1, window if kind is Kind.SLIDING else 0) for kind in MIXES[seed % 7]),
            pressure=PRESSURES[(seed // 7) % 2],
            overlap=seed % 2,
            lookahead=rng.choice((0, 3)),
            page_size=rng.choice((4, 16)),
            context=800,
            budget=128,
            running=32,
            sessions=300,
            queued=302,
            units=(),
            checkpoint_share=0.4,
            interval=64,
            aging=5.0,
            fail_rate=0.005,
            recount_every=100,
            look=0.02,
        ),
        most=20_000,
        rng=rng,
    )


def least_units(group: GroupSpec, page_size: int, context: int, shape: Shape) -> int:
    """Returns the fewest units a pool of the group may have."""
    return turn_units(group, page_size, shape, context, generates=True)


def _sized(config: WorldConfig, most: int, rng: Random) -> WorldConfig:
    """Sizes the pools for about all sessions, a few turns, or barely one; sometimes a full attention pool is so small
    that it shortens the context, down to a single page."""
    shape = Shape.of(engine_config(config), config.page_size)
    turns = {"ample": config.sessions + config.running, "tight": 3, "barely": 1}[config.pressure]
    beside = config.pressure == "barely" and config.seed % 4 > 0  # sessions beside the one turn may stay in memory
    tiny = config.pressure == "barely" and config.seed % 5 == 0
    units = []
    for group in config.groups:
        one = turn_units(group, config.page_size, shape, config.context, generates=True)
        kept = 6 * session_units(group, config.page_size, config.context // 2) if beside else 0
        enough = max(one, min(most, one * turns + kept))
        units.append(rng.randint(1, one) if tiny and group.kind is Kind.FULL else enough)
    return replace(config, units=tuple(units))


def spec_of(config: WorldConfig) -> MemorySpec:
    return MemorySpec(config.page_size, config.groups)


def engine_config(config: WorldConfig) -> EngineConfig:
    return EngineConfig(
        context_length=config.context,
        max_running=config.running,
        max_sessions=config.sessions,
        max_queued=config.queued,
        token_budget=config.budget,
        overlap=config.overlap,
        lookahead=config.lookahead,
        aging_seconds=config.aging,
        checkpoint_interval=config.interval,
        checkpoint_share=config.checkpoint_share,
        tenant_weights=config.weights,
        prefix_cache=config.prefixes,
        host_tier=(0, 500, 3000, 10**6)[config.seed % 4] if config.tiers else 0,
        checkpoint_rate=(0, 100, 10**6)[config.seed // 4 % 3],
        draft_timeout=40.0,
        audit_every=0,
    )
