"""Sessions and memory are right in random worlds, and the simulator that says so is itself proved."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.sim.faults import FAULTS
from tests.sim.mutants import find_mutants
from tests.sim.run import run_world, run_worlds
from tests.sim.setting import small_world

STEPS = 200_000
WORLD_STEPS = 500
SHORT_WORLD = 150
MOST_STEPS = 60_000
"""A fault or a removed call must show within this many steps."""

JUSTIFIED: dict[str, str] = {}
"""Calls that may be removed without the simulator noticing, and why that is right."""


def test_small_worlds_stay_right_with_a_full_recount_after_every_step():
    summary = run_worlds(range(STEPS // WORLD_STEPS), WORLD_STEPS)
    print(summary.table())
    assert not summary.failures, "\n".join(f"seed {seed}: {report}" for seed, report in summary.failures.items())
    assert summary.steps >= STEPS
    count, name, cell = summary.rarest()
    assert count > 0, f"{name} never happened under {cell}"


def test_large_worlds_stay_right():
    summary = run_worlds(range(14), 300, large=True)
    assert not summary.failures, "\n".join(f"seed {seed}: {report}" for seed, report in summary.failures.items())


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_caught(fault):
    steps = seed = 0
    with fault():
        while steps < MOST_STEPS:
            summary = run_world(small_world(seed), SHORT_WORLD)
            steps, seed = steps + summary.steps, seed + 1
            if summary.failures:
                return
    pytest.fail(f"{steps} steps did not show that {fault.__doc__}")


def _steps_without(number: int) -> str:
    command = [sys.executable, "-m", "tests.sim.mutants", "--run", str(number), "--steps", str(MOST_STEPS)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    return finished.stdout.strip() if finished.returncode == 0 else finished.stderr


def test_every_removed_release_share_transfer_or_truncate_is_missed():
    mutants = find_mutants()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = list(pool.map(_steps_without, range(len(mutants))))
    for mutant, outcome in zip(mutants, outcomes, strict=True):
        print(f"{outcome:>9}  {mutant}")
    survivors = [str(m) for m, outcome in zip(mutants, outcomes, strict=True) if not outcome.isdigit()]
    unjustified = [survivor for survivor in survivors if survivor.split(" ", 1)[1] not in JUSTIFIED]
    assert not unjustified, f"{len(unjustified)} calls can be removed unnoticed: {unjustified}"
