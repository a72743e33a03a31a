"""Sessions and memory stay right in random worlds, and the simulator that checks this is itself proved.

These runs are short; `make sim` runs any number of worlds, and `python -m tests.sim.proof` plants every change."""

from pathlib import Path

from tests.sim.everything import everything, is_justified, known_catchers
from tests.sim.planted import Job, look_for_all, needs_pytest
from tests.sim.run import (
    ADAPTED,
    DRAFTED,
    ERASING,
    EXPECTING,
    GRAMMARS,
    HEADED,
    LIMITED,
    OVERTAKING,
    PINNED,
    PREFIXED,
    REPLACING,
    TRAINED,
    run_worlds,
)
from tests.sim.slips import Slip
from tests.sim.slips_of_kernels import NativeSlip

STEPS = 3_000
PREFIX_STEPS = 1_000
"""Seeds of worlds with a prefix cache."""
OVERTAKING_STEPS = 1_000
"""Seeds of worlds whose sessions start from memory that running turns compute."""
PINNED_STEPS = 1_000
"""Seeds of worlds in which some sessions are pinned."""
ADAPTED_STEPS = 1_000
"""Seeds of worlds in which most sessions have adapters."""
GRAMMAR_STEPS = 1_000
"""Seeds of worlds whose turns have grammars."""
LIMITED_STEPS = 1_000
"""Seeds of worlds in which many turns limit or name tokens."""
DRAFTED_STEPS = 1_000
HEADED_STEPS = 1_000
"""Seeds of worlds in which a draft model guesses."""
ERASING_STEPS = 1_000
"""Seeds of worlds in which sessions are erased."""
REPLACING_STEPS = 1_000
"""Seeds of worlds whose sessions take over others."""
EXPECTING_STEPS = 1_000
"""Seeds of worlds in which the next turns of sessions are expected."""
TRAINED_STEPS = 1_000
"""Seeds of worlds whose weights are replaced."""
WORLD_STEPS = 150

LOOKED_FOR = 6_000
"""Steps within which a known seed, or one of the first others, must catch the change; otherwise the seeds are stale."""


def test_small_worlds_stay_right():
    summary = run_worlds(range(STEPS // WORLD_STEPS), WORLD_STEPS)
    print(summary.table())
    assert not summary.failures, "\n".join(f"seed {seed}: {report}" for seed, report in summary.failures.items())
    assert summary.steps >= STEPS


def test_worlds_with_a_prefix_cache_stay_right():
    summary = run_worlds(range(PREFIXED, PREFIXED + PREFIX_STEPS // WORLD_STEPS + 1), WORLD_STEPS)
    assert not summary.failures, "\n".join(f"seed {seed}: {report}" for seed, report in summary.failures.items())
    assert summary.steps >= PREFIX_STEPS


def test_worlds_whose_sessions_start_from_memory_of_running_turns_stay_right():
    summary = run_worlds(range(OVERTAKING, OVERTAKING + OVERTAKING_STEPS // WORLD_STEPS + 1), WORLD_STEPS)
    assert not summary.failures, "\n".join(f"seed {seed}: {report}" for seed, report in summary.failures.items())
    assert summary.steps >= OVERTAKING_STEPS


def test_worlds_with_pinned_sessions_stay_right():
    summary = run_worlds(range(PINNED, PINNED + PINNED_STEPS // WORLD_STEPS + 1), WORLD_STEPS)
    assert not summary.failures, "\n".join(f"seed {seed}: {report}" for seed, report in summary.failures.items())
    assert summary.steps >= PINNED_STEPS


def test_worlds_with_adapters_stay_right():
    summary = run_worlds(range(ADAPTED, ADAPTED + ADAPTED_STEPS // WORLD_STEPS + 1), WORLD_STEPS)
    assert not summary.failures, "\n".join(f"seed {seed}: {report}" for seed, report in summary.failures.items())
    assert summary.steps >= ADAPTED_STEPS


def test_worlds_with_grammars_stay_right():
    summary = run_worlds(range(GRAMMARS, GRAMMARS + GRAMMAR_STEPS // WORLD_STEPS + 1), WORLD_STEPS)
    assert not summary.failures, "\n".join(f"seed {seed}: {report}" for seed, report in summary.failures.items())
    assert summary.steps >= GRAMMAR_STEPS


def test_worlds_whose_turns_limit_or_name_tokens_stay_right():
    summary = run_worlds(range(LIMITED, LIMITED + LIMITED_STEPS // WORLD_STEPS + 1), WORLD_STEPS)
    assert not summary.failures, "\n".join(f"seed {seed}: {report}" for seed, report in summary.failures.items())
    assert summary.steps >= LIMITED_STEPS


def test_worlds_with_a_draft_model_stay_right():
    summary = run_worlds(range(DRAFTED, DRAFTED + DRAFTED_STEPS // WORLD_STEPS + 1), WORLD_STEPS)
    assert not summary.failures, "\n".join(f"seed {seed}: {report}" for seed, report in summary.failures.items())
    assert summary.steps >= DRAFTED_STEPS


def test_worlds_with_a_head_for_multi_token_prediction_stay_right():
    summary = run_worlds(range(HEADED, HEADED + HEADED_STEPS // WORLD_STEPS + 1), WORLD_STEPS)
    assert not summary.failures, "\n".join(f"seed {seed}: {report}" for seed, report in summary.failures.items())
    assert summary.steps >= HEADED_STEPS


def test_worlds_whose_sessions_are_erased_stay_right():
    summary = run_worlds(range(ERASING, ERASING + ERASING_STEPS // WORLD_STEPS + 1), WORLD_STEPS)
    assert not summary.failures, "\n".join(f"seed {seed}: {report}" for seed, report in summary.failures.items())
    assert summary.steps >= ERASING_STEPS
    assert sum(counter["erase"] for counter in summary.counts.values()) > 10


def test_worlds_whose_sessions_take_over_others_stay_right():
    summary = run_worlds(range(REPLACING, REPLACING + REPLACING_STEPS // WORLD_STEPS + 1), WORLD_STEPS)
    assert not summary.failures, "\n".join(f"seed {seed}: {report}" for seed, report in summary.failures.items())
    assert summary.steps >= REPLACING_STEPS


def test_worlds_whose_next_turns_are_expected_stay_right():
    summary = run_worlds(range(EXPECTING, EXPECTING + EXPECTING_STEPS // WORLD_STEPS + 1), WORLD_STEPS)
    assert not summary.failures, "\n".join(f"seed {seed}: {report}" for seed, report in summary.failures.items())
    assert summary.steps >= EXPECTING_STEPS
    assert sum(counter["return"] for counter in summary.counts.values()) > 5


def test_worlds_whose_weights_are_replaced_stay_right():
    summary = run_worlds(range(TRAINED, TRAINED + TRAINED_STEPS // WORLD_STEPS + 1), WORLD_STEPS)
    assert not summary.failures, "\n".join(f"seed {seed}: {report}" for seed, report in summary.failures.items())
    assert summary.steps >= TRAINED_STEPS


def test_large_worlds_stay_right():
    summary = run_worlds(range(2), 150, large=True)
    assert not summary.failures, "\n".join(f"seed {seed}: {report}" for seed, report in summary.failures.items())


def test_every_slip_still_has_its_source_and_every_catcher_its_change_and_test():
    """The next test plants no slip that only a test with a model catches; the source of such a slip may be gone too."""
    every, catchers = everything(), known_catchers()
    slips = [each for each in every.values() if isinstance(each, Slip | NativeSlip)]
    gone = [str(each) for each in slips if not each.path.exists() or each.old not in each.path.read_text()]
    assert not gone, f"the sources of these slips are gone: {gone}"
    assert not catchers.keys() - every.keys(), "these catchers have nothing to catch"
    for path, _, test in {each.partition("::") for each in catchers.values() if isinstance(each, str)}:
        assert f"def {test.partition('[')[0]}(" in Path(__file__).parents[2].joinpath(path).read_text(), (path, test)


def test_stories_that_catch_faults_pass_without_them():
    stories = {each for each in known_catchers().values() if isinstance(each, str) and not needs_pytest(each)}
    outcomes = look_for_all(Job(None, LOOKED_FOR, story) for story in stories)
    failed = [f"{story}: {outcome.how}" for story, outcome in zip(stories, outcomes, strict=True) if outcome.catcher]
    assert not failed, failed


def test_planted_faults_slips_and_removed_calls_are_caught():
    """Plants the changes whose catchers are known, most of which notice at once; `python -m tests.sim.proof` plants all
    others."""
    catchers = {name: catcher for name, catcher in known_catchers().items() if not needs_pytest(catcher)}
    planted = {
        name: Job(what, LOOKED_FOR, catchers[name])
        for name, what in everything().items()
        if name in catchers and not is_justified(name)
    }
    assert len(planted) > 100
    gone = [name for name, catcher in catchers.items() if name not in planted and isinstance(catcher, str)]
    assert not gone, f"these catchers have nothing to catch: {gone}"
    outcomes = dict(zip(planted, look_for_all(planted.values()), strict=True))
    for name, outcome in outcomes.items():
        print(f"{outcome}  {name}")
    survivors = [f"{name}: {outcome.how}" for name, outcome in outcomes.items() if outcome.catcher is None]
    assert not survivors, f"{len(survivors)} went unnoticed: {survivors}"
