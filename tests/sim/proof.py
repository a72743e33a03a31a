"""Proves the simulator: with each planted fault, each slip and each removed call some world, or a story, has to fail.

`python -m tests.sim.proof` looks for all of them and prints what caught each, after how many steps; `--write` notes the
seeds in `seeds.json`, so that the tests find them at once; `--only REGEX` takes those in whose names it is found."""

from __future__ import annotations

import argparse
import json
import re
import sys
from itertools import chain
from pathlib import Path

from tests.sim.faults import FAULTS
from tests.sim.faults_of_copies import FAULTS_OF_COPIES
from tests.sim.faults_of_grammars import FAULTS_OF_GRAMMARS
from tests.sim.faults_of_kinds import FAULTS_OF_KINDS
from tests.sim.faults_of_schedule import FAULTS_OF_SCHEDULE
from tests.sim.faults_of_sharing import FAULTS_OF_SHARING
from tests.sim.mutants import find_mutants
from tests.sim.planted import Job, Planted, is_caught, look_for_all
from tests.sim.slips import SLIPS

SEEDS = Path(__file__).with_name("seeds.json")
MAX_STEPS = 100_000
"""Something planted has to show within so many steps."""
JUSTIFIED: dict[str, str] = {
    "a_row_cut_back_keeps_its_alternate_position": "it is where the row is cut back to, until its next step",
    "a_resting_draft_is_never_evictable": "it has its place since it got its row; the note makes it the latest there",
    "limbo_of_the_second_step_is_merged": "nothing is released between its submission and the end of the first",
    "memory.pool: gone = self._limbo[-1] if": "as above: what is released finds one step in flight",
    "engine.parking taken.release()": "admission has counted the units, so nothing that was taken is given back",
    "memory.turn_memory: if live > began:": "the source's position can be resumed anyway",
    "memory.rows: self.mark[row] = FAR": "a row gets its mark when it is taken",
    "sched.batch: self._sampling.pop(row, None)": "the next turn of the row that samples brings its own options",
    "sched.batch: if len(turn.output) < params.min_new_tokens": "nothing is masked from the last such position on",
    "session.registry: and session.key not in self._watched": "the later entry takes the place of the earlier",
}
"""What may be planted without the simulator noticing, by part of its name, and why that is right."""
STORIES: dict[str, str] = {
    "fault a_move_that_another_waits_for_is_cancelled": "tests/engine/test_restores.py::"
    "test_two_sessions_that_share_what_comes_back_move_it_once",
    "call tenuto.session.session self.memory.truncate(self._last())": "tests/engine/test_prefixes.py::"
    "test_an_aborted_turn_leaves_its_session_as_it_was",
    "slip memory.checkpoint_cache: self._evict(heads[0])  ->  self._evict(heads[-1])": "tests/memory/test_thinning.py::"
    "test_of_two_that_are_as_old_the_one_with_the_smaller_gap_goes_first",
    "slip memory.thinning: max(checkpoint.needed_at, checkpoint.reached)  ->  checkpoint.reached": "tests/memory/"
    "test_thinning.py::test_one_that_has_been_needed_again_is_as_new",
    "slip memory.thinning: below.branches += checkpoint.branches - 1  ->  below.branches += checkpoint.branches": ""
    "tests/memory/test_thinning.py::test_a_checkpoint_that_a_turn_gave_up_leaves_no_trace_in_the_gaps",
    "call tenuto.memory.turn_memory session.truncate(position)": "tests/memory/test_sequence.py::"
    "test_a_turn_that_takes_the_end_of_a_history_back_and_adds_nothing_leaves_its_session_cut",
    "call tenuto.memory.turn_memory self.checkpoints.relax()": "tests/sched/test_admission.py::"
    "test_a_checkpoint_that_only_saves_work_keeps_nobody_from_starting",
    "call tenuto.engine.lifecycle self.sharing.share(turn)": "tests/engine/test_prefixes.py::"
    "test_two_requests_with_a_common_prompt_compute_it_once",
    "call tenuto.engine.session_states lease.release()": "tests/engine/test_session_states.py::"
    "test_copies_that_fail_cost_only_time",
    "call tenuto.engine.sharing self._cannot_share(turn) #2": "tests/engine/test_running_prefixes.py::"
    "test_a_turn_whose_input_is_scored_waits_for_nobody",
    "call tenuto.memory.turn_memory child.checkpoints.refer_to(self.session.checkpoints, self.start + 1)": "tests/"
    "engine/test_running_prefixes.py::test_who_begins_with_what_a_running_turn_has_can_go_back_as_far_as_it",
    "call tenuto.memory.turn_memory child.checkpoints.refer_to(self.checkpoints, position)": "tests/engine/"
    "test_running_prefixes.py::test_who_begins_with_what_a_running_turn_has_can_go_back_as_far_as_it",
    "call tenuto.engine.engine self._occupation.release(parts)": "tests/engine/test_memory_release.py::"
    "test_memory_is_released_only_while_nothing_runs",
    "call tenuto.engine.occupation self._executor.release(wanted)": "tests/engine/test_memory_release.py::"
    "test_memory_is_released_only_while_nothing_runs",
    "call tenuto.sched.admission self._share(turn)": "tests/engine/test_prefixes.py::"
    "test_two_requests_with_a_common_prompt_compute_it_once",
    "call tenuto.session.journal self._cut(number, 0)": "tests/session/test_journal.py::"
    "test_a_fork_stores_no_token_again_and_nothing_is_left_of_closed_sessions",
    "call tenuto.session.journal self._cut(number, change.kept)": "tests/session/test_journal.py::"
    "test_a_fork_stores_no_token_again_and_nothing_is_left_of_closed_sessions",
    "call tenuto.session.journal self._share(change, change.parent, number)": "tests/session/test_journal.py::"
    "test_a_fork_stores_no_token_again_and_nothing_is_left_of_closed_sessions",
    "slip sched.admission: self._passes // RECONSIDERED_AFTER  ->  0": "tests/sched/test_admission.py::"
    "test_room_that_nobody_could_make_is_made_once_a_window_has_passed_though_nobody_leaves_a_row",
    "slip sched.pressure: units[~held[group][units]]  ->  units": "tests/sched/test_pressure.py::"
    "test_those_who_share_with_a_running_turn_alone_are_passed_over",
    "slip sched.suspects: failures += int(alone)  ->  failures += 1": "tests/engine/test_failed_steps.py::"
    "test_a_step_that_failed_with_turns_that_have_left_says_little_of_the_one_that_is_left",
}
"""What random worlds have not shown, by name, and the test that does."""


def everything() -> dict[str, Planted]:
    """Everything that can be planted, by name."""
    planted: dict[str, Planted] = {}
    kinds = (FAULTS, FAULTS_OF_COPIES, FAULTS_OF_GRAMMARS, FAULTS_OF_KINDS, FAULTS_OF_SCHEDULE, FAULTS_OF_SHARING)
    for fault in chain(*kinds):
        planted[f"fault {fault.__name__}"] = fault
    for slip in SLIPS:
        planted[f"slip {slip}"] = slip
    seen: dict[str, int] = {}
    for mutant in find_mutants():
        text = f"call {mutant.module} {mutant.text}"
        seen[text] = seen.get(text, 0) + 1
        planted[text if seen[text] == 1 else f"{text} #{seen[text]}"] = mutant
    return planted


def is_justified(name: str) -> bool:
    """Whether it may go unnoticed."""
    return any(part in name for part in JUSTIFIED)


def known_seeds() -> dict[str, int]:
    """Seeds of worlds that showed what was planted, by name."""
    found: dict[str, int] = json.loads(SEEDS.read_text()) if SEEDS.exists() else {}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.proof", description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--unknown", action="store_true", help="only what no seed is known of")
    parser.add_argument("--steps", type=int, default=MAX_STEPS)
    parser.add_argument("--past", nargs="*", default=(), help="rules that may be broken")
    arguments = parser.parse_args()
    every, seeds = everything(), known_seeds()
    chosen = [name for name in every if re.search(arguments.only, name) and not is_justified(name)]
    if arguments.unknown:
        chosen = [name for name in chosen if name not in seeds and name not in STORIES]
    known = {name: [seeds[name]] if name in seeds else [] for name in chosen}
    jobs = [Job(every[name], arguments.steps, known[name], arguments.past, STORIES.get(name)) for name in chosen]
    survivors = 0
    for name, outcome in zip(chosen, look_for_all(jobs), strict=True):
        print(f"{outcome:<40}  {name}", flush=True)
        if not is_caught(outcome):
            survivors += 1
        elif arguments.write and name not in STORIES:
            seeds[name] = int(outcome.split()[0])
            SEEDS.write_text(json.dumps(dict(sorted(seeds.items())), indent=0) + "\n")
    print(f"{len(chosen) - survivors} of {len(chosen)} were caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
