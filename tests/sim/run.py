"""Runs many seeded worlds in several processes and counts their transitions."""

from __future__ import annotations

import logging
import os
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tests.sim.actions import RandomWorld
from tests.sim.found import Found
from tests.sim.scenarios import Scenario, is_scenario, scenario_world
from tests.sim.setting import MIXES, PRESSURES, WorldConfig, large_world, small_world

Cell = tuple[str, str]

PREFIXED = 10**6
"""The first seed of worlds with a prefix cache."""

GRAMMARS = 2 * 10**6
"""The first seed of worlds whose turns have grammars."""

OVERTAKING = 3 * 10**6
"""The first seed of worlds whose sessions start from memory of running turns and go back in shared pages."""

PINNED = 4 * 10**6
"""The first seed of worlds in which some sessions are pinned."""

ADAPTED = 5 * 10**6
"""The first seed of worlds in which most sessions have adapters."""

LIMITED = 6 * 10**6
"""The first seed of worlds in which many turns limit or name tokens."""

DRAFTED = 7 * 10**6
"""The first seed of worlds in which a draft model guesses."""

ERASING = 8 * 10**6
"""The first seed of worlds in which sessions are erased."""

REPLACING = 9 * 10**6
"""The first seed of worlds whose sessions take over the history and memory of others."""

EXPECTING = 10**7
"""The first seed of worlds in which the next turns of sessions are expected."""

TRAINED = 11 * 10**6
"""The first seed of worlds whose weights are replaced."""

HEADED = 20 * 10**6
"""The first seed of worlds in which the model's head for multi-token prediction guesses."""

TRANSITIONS = (
    "open",
    "close",
    "closing",
    "expire",
    "submit",
    "draft",
    "redraft",
    "submit draft",
    "regenerate",
    "start",
    "preempt",
    "resume",
    "commit",
    "barge-in running",
    "barge-in preempted",
    "abort drafting",
    "abort queued",
    "abort running",
    "abort preempted",
    "deadline drafting",
    "deadline queued",
    "deadline running",
    "deadline preempted",
    "fork",
    "fork running",
    "rewind",
    "drop idle",
    "drop drafting",
    "drop queued",
    "drop preempted",
    "step failed",
)
"""The transitions of sessions and turns that the engine counts in every kind of world."""


@dataclass
class Summary:
    """The totals of a run: steps, failures by seed, and transitions by (pressure, mix)."""

    steps: int = 0
    failures: dict[int, str] = field(default_factory=dict)
    counts: dict[Cell, Counter[str]] = field(default_factory=dict)

    def add(self, other: Summary) -> None:
        self.steps += other.steps
        self.failures.update(other.failures)
        for cell, counter in other.counts.items():
            self.counts.setdefault(cell, Counter()).update(counter)

    def rarest(self) -> tuple[int, str, Cell]:
        """Returns the rarest transition of any cell, with its count."""
        cells = [(pressure, "+".join(kind.value for kind in mix)) for pressure in PRESSURES for mix in MIXES]
        return min((self.counts.get(cell, Counter())[name], name, cell) for cell in cells for name in TRANSITIONS)

    def table(self) -> str:
        """Formats the transitions by pressure level and group mix."""
        mixes = ["+".join(kind.value for kind in mix) for mix in MIXES]
        lines = []
        for pressure in PRESSURES:
            lines.append(f"{pressure:<20}" + "".join(f"{mix.replace('sliding', 'slide'):>18}" for mix in mixes))
            for name in TRANSITIONS:
                row = [self.counts.get((pressure, mix), Counter())[name] for mix in mixes]
                lines.append(f"  {name:<18}" + "".join(f"{count:>18,}" for count in row))
        return "\n".join(lines)


def run_world(config: WorldConfig, steps: int, ignored: Collection[str] = ()) -> Summary:
    """Runs one world from its seed to its end; rules in `ignored` may be broken."""
    summary = Summary()
    world = Scenario(config, ignored) if config.story else RandomWorld(config, ignored)
    try:
        world.run(steps)
        world.finish()
    except Exception as error:  # noqa: BLE001 - whatever goes wrong in a world is a report on its seed
        rule = error.rule if isinstance(error, Found) else type(error).__name__
        summary.failures[config.seed] = f"{rule} after {world.steps} steps\n{traceback.format_exc()}"
    summary.steps = world.steps
    if not config.story:
        summary.counts[config.label] = Counter({str(each): count for each, count in world.engine.transitions.items()})
    return summary


def any_world(seed: int) -> WorldConfig:
    """Returns a small random world or, for every fourth seed below `PREFIXED`, a scenario. From `PREFIXED` on, all
    worlds have a prefix cache, and every other one has tiers. From `GRAMMARS` on, all have grammars, and every third
    has a prefix cache. From `OVERTAKING` on, sessions start from memory of running turns, all worlds have a prefix
    cache, and every third has tiers. From `PINNED` on, all have pinned sessions, every other one a prefix cache, every
    third tiers. From `ADAPTED` on, most sessions have adapters, all worlds have a prefix cache, every other one tiers,
    and in every third sessions start from memory of running turns. From `LIMITED` on, many turns limit or name tokens;
    every other world has grammars, every third a prefix cache, and every sixth tiers. From `DRAFTED` on, a draft model
    guesses; every other world has a prefix cache, every fourth tiers, every fifth grammars, and in every third sessions
    start from memory of running turns. From `ERASING` on, sessions are erased; every other world has a prefix cache,
    two of three tiers, every fourth a draft model, and in every third sessions start from memory of running turns. From
    `REPLACING` on, sessions take over others; every other world has tiers, every third a prefix cache, and every fifth
    adapters. From `EXPECTING` on, all worlds have tiers, and the next turns of sessions are expected; every other world
    has a prefix cache, in every third sessions are erased, and in every fifth they have adapters. From `TRAINED` on,
    weights are replaced, two of three worlds have tiers, every other one a prefix cache, in every third sessions start
    from memory of running turns, every fourth has grammars, and in every fifth sessions take over others. From `HEADED`
    on, the model's head guesses; every other world has a prefix cache, every fourth tiers, every fifth grammars, and in
    every third sessions start from memory of running turns."""
    return next(make(seed) for first, make in _KINDS if seed >= first)


def _of_any_kind(seed: int) -> WorldConfig:
    return scenario_world(seed) if is_scenario(seed) else small_world(seed)


def _kind(
    prefixes: int = 1,
    tiers: int = 0,
    grammars: int = 0,
    overtaking: int = 0,
    drafted: int = 0,
    headed: int = 0,
    adapters: int = 0,
    **same: Any,
) -> Callable[[int], WorldConfig]:
    """Returns a function that makes worlds of one kind. The numbers say in which worlds something occurs: with n in
    every n-th, with 0 in none. `same`: fields that all have."""

    def every(seed: int, number: int) -> bool:
        return number > 0 and seed % number == 0

    def make(seed: int) -> WorldConfig:
        world = small_world(
            seed,
            grammars=every(seed, grammars),
            overtaking=every(seed, overtaking),
            drafted=every(seed, drafted),
            headed=every(seed, headed),
        )
        chosen = {"prefixes": every(seed, prefixes), "tiers": every(seed, tiers), "adapters": every(seed, adapters)}
        return replace(world, **{**chosen, **same})

    return make


def _erasing(seed: int) -> WorldConfig:
    return replace(_kind(prefixes=2, overtaking=3, drafted=4, erases=True)(seed), tiers=seed % 3 > 0)


def _trained(seed: int) -> WorldConfig:
    world = _kind(prefixes=2, overtaking=3, grammars=4, trains=True)(seed)
    return replace(world, tiers=seed % 3 > 0, replacing=seed % 5 == 0)


def _expecting(seed: int) -> WorldConfig:
    return replace(_kind(prefixes=2, tiers=1, adapters=5, expects=True)(seed), erases=seed % 3 == 0)


_KINDS = (
    (HEADED, _kind(prefixes=2, tiers=4, grammars=5, overtaking=3, headed=1)),
    (TRAINED, _trained),
    (EXPECTING, _expecting),
    (REPLACING, _kind(prefixes=3, tiers=2, adapters=5, replacing=True)),
    (ERASING, _erasing),
    (DRAFTED, _kind(prefixes=2, tiers=4, grammars=5, overtaking=3, drafted=1)),
    (LIMITED, _kind(prefixes=3, tiers=6, grammars=2, limits=True)),
    (ADAPTED, _kind(tiers=2, overtaking=3, adapters=True)),
    (PINNED, _kind(prefixes=2, tiers=3, pins=True)),
    (OVERTAKING, _kind(tiers=3, overtaking=1)),
    (GRAMMARS, _kind(prefixes=3, tiers=6, grammars=1)),
    (PREFIXED, _kind(tiers=2)),
    (0, _of_any_kind),
)
"""The first seeds of the kinds of worlds, the last first, with functions that make them."""


def _run_seeds(seeds: list[int], steps: int, large: bool, ignored: Collection[str]) -> Summary:
    logging.getLogger("tenuto").setLevel(logging.ERROR)  # steps fail by the thousand
    summary = Summary()
    for seed in seeds:
        summary.add(run_world(large_world(seed) if large else any_world(seed), steps, ignored))
    return summary


def run_worlds(
    seeds: Iterable[int],
    steps: int,
    *,
    large: bool = False,
    processes: int | None = None,
    ignored: Collection[str] = (),
) -> Summary:
    """Runs the worlds of all `seeds` for `steps` steps each, in `processes` processes (default: one for each core)."""
    seeds = list(seeds)
    processes = processes or os.cpu_count() or 1
    chunk = max(1, min(21, len(seeds) // processes))
    chunks = [seeds[i : i + chunk] for i in range(0, len(seeds), chunk)]
    summary = Summary()
    with ProcessPoolExecutor(processes) as pool:
        run = partial(_run_seeds, steps=steps, large=large, ignored=ignored)
        for part in pool.map(run, chunks):
            summary.add(part)
    return summary
