"""Sessions and memory are right in random worlds, and the simulator that says so is itself proved.

These runs are short; `make sim` runs as many worlds as it is told to, and `python -m tests.sim.proof` plants everything
there is. Of the removed calls every `CALLS`th is planted here."""

from tests.sim.planted import Job, is_caught, look_for_all
from tests.sim.proof import STORIES, everything, is_justified, known_seeds
from tests.sim.run import GRAMMARS, PREFIXED, run_worlds

STEPS = 12_000
PREFIX_STEPS = 4_000
"""Of worlds with a prefix cache."""
GRAMMAR_STEPS = 4_000
"""Of worlds whose turns have grammars."""
WORLD_STEPS = 150

CALLS = 3
LOOKED_FOR = 6_000
"""Steps in which a known seed, or one of the first others, has to show what is planted, or the seeds are stale."""


def test_small_worlds_stay_right():
    summary = run_worlds(range(STEPS // WORLD_STEPS), WORLD_STEPS)
    print(summary.table())
    assert not summary.failures, "\n".join(f"seed {seed}: {report}" for seed, report in summary.failures.items())
    assert summary.steps >= STEPS


def test_worlds_with_a_prefix_cache_stay_right():
    summary = run_worlds(range(PREFIXED, PREFIXED + PREFIX_STEPS // WORLD_STEPS + 1), WORLD_STEPS)
    assert not summary.failures, "\n".join(f"seed {seed}: {report}" for seed, report in summary.failures.items())
    assert summary.steps >= PREFIX_STEPS


def test_worlds_with_grammars_stay_right():
    summary = run_worlds(range(GRAMMARS, GRAMMARS + GRAMMAR_STEPS // WORLD_STEPS + 1), WORLD_STEPS)
    assert not summary.failures, "\n".join(f"seed {seed}: {report}" for seed, report in summary.failures.items())
    assert summary.steps >= GRAMMAR_STEPS


def test_large_worlds_stay_right():
    summary = run_worlds(range(7), 150, large=True)
    assert not summary.failures, "\n".join(f"seed {seed}: {report}" for seed, report in summary.failures.items())


def test_planted_faults_slips_and_removed_calls_are_caught():
    """Those for which a world or a story is known that shows them; `python -m tests.sim.proof` plants all others."""
    seeds = known_seeds()
    planted = {
        name: Job(what, LOOKED_FOR, [seeds[name]] if name in seeds else [], story=STORIES.get(name))
        for number, (name, what) in enumerate(everything().items())
        if name in STORIES or (name in seeds and not is_justified(name))
        if name in STORIES or not name.startswith("call ") or number % CALLS == 0
    }
    assert len(planted) > 100
    assert STORIES.keys() <= planted.keys(), "a story has nothing to notice"
    outcomes = dict(zip(planted, look_for_all(planted.values()), strict=True))
    for name, outcome in outcomes.items():
        print(f"{outcome:<40}  {name}")
    survivors = [f"{name}: {outcome}" for name, outcome in outcomes.items() if not is_caught(outcome)]
    assert not survivors, f"{len(survivors)} went unnoticed: {survivors}"
