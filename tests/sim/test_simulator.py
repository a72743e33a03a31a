"""Sessions and memory are right in random worlds, and the simulator that says so is itself proved.

These runs are short; `make sim` runs as many worlds as it is told to, and `python -m tests.sim.proof` plants everything
there is. Of the removed calls every `CALLS`th is planted here."""

import os
from concurrent.futures import ThreadPoolExecutor

from tests.sim.proof import known_seeds, look, names
from tests.sim.run import run_worlds

STEPS = 24_000
WORLD_STEPS = 150

CALLS = 3
LOOKED_FOR = 6_000
"""Steps in which a known seed, or one of the first others, has to show what is planted, or the seeds are stale."""

JUSTIFIED: dict[str, str] = {
    "a_row_cut_back_keeps_its_alternate_position": "it is where the row is cut back to, until its next step",
    "a_resting_draft_is_never_evictable": "it has its place since it got its row; the note makes it the latest there",
    "limbo_of_the_second_step_is_merged": "nothing is released between its submission and the end of the first",
    "memory.pool: gone = self._limbo[-1] if": "as above: what is released finds one step in flight",
    "memory.turn_memory: if live > began:": "the source's position can be resumed anyway",
    "memory.rows: self.mark[row] = FAR": "a row gets its mark when it is taken",
    "sched.batch: self._sampling.pop(row, None)": "the next turn of the row that samples brings its own options",
    "sched.batch: if len(turn.output) < params.min_new_tokens": "nothing is masked from the last such position on",
    "session.registry: and session.id not in self._watched": "the later entry takes the place of the earlier",
}
"""What may be planted without the simulator noticing, by part of its name, and why that is right."""


def test_small_worlds_stay_right():
    summary = run_worlds(range(STEPS // WORLD_STEPS), WORLD_STEPS)
    print(summary.table())
    assert not summary.failures, "\n".join(f"seed {seed}: {report}" for seed, report in summary.failures.items())
    assert summary.steps >= STEPS


def test_large_worlds_stay_right():
    summary = run_worlds(range(7), 150, large=True)
    assert not summary.failures, "\n".join(f"seed {seed}: {report}" for seed, report in summary.failures.items())


def test_planted_faults_slips_and_removed_calls_are_caught():
    """Those for which a world is known that shows them; `python -m tests.sim.proof` looks for the others too."""
    seeds = known_seeds()
    planted = [
        (number, name)
        for number, name in enumerate(names())
        if name in seeds and not any(part in name for part in JUSTIFIED)
        if not name.startswith("call ") or number % CALLS == 0
    ]
    assert len(planted) > 100
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = list(pool.map(lambda job: look(job[0], LOOKED_FOR, [seeds[job[1]]], ()), planted))
    for (_, name), outcome in zip(planted, outcomes, strict=True):
        print(f"{outcome:<40}  {name}")
    survivors = [
        f"{name}: {outcome}" for (_, name), outcome in zip(planted, outcomes, strict=True) if not outcome[:1].isdigit()
    ]
    assert not survivors, f"{len(survivors)} went unnoticed: {survivors}"
