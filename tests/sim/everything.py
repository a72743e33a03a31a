"""Everything that can be planted, and what is known to catch it."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

from tests.sim.faults import FAULTS
from tests.sim.faults_of_adapters import FAULTS_OF_ADAPTERS
from tests.sim.faults_of_copies import FAULTS_OF_COPIES
from tests.sim.faults_of_erasing import FAULTS_OF_ERASING
from tests.sim.faults_of_grammars import FAULTS_OF_GRAMMARS
from tests.sim.faults_of_journals import FAULTS_OF_JOURNALS
from tests.sim.faults_of_kinds import FAULTS_OF_KINDS
from tests.sim.faults_of_limits import FAULTS_OF_LIMITS
from tests.sim.faults_of_schedule import FAULTS_OF_SCHEDULE
from tests.sim.faults_of_sharing import FAULTS_OF_SHARING
from tests.sim.mutants import find_mutants
from tests.sim.planted import Catcher, Planted
from tests.sim.slips import SLIPS
from tests.sim.slips_by_area import BY_AREA
from tests.sim.slips_of_kernels import INT8, RECURRENT
from tests.sim.slips_of_training import OF_TRAINING

CATCHERS = Path(__file__).with_name("catchers.json")
JUSTIFIED: dict[str, str] = {
    "a_resting_draft_is_never_evictable": "it is listed since it got its row; the note only moves it to the end",
    "limbo_of_the_second_step_is_merged": "nothing is released between its submission and the end of the first step",
    "memory.pool: gone = self._limbo[-1] if": "as above: at each release one step is in flight",
    "engine.parking taken.release()": "admission has counted the units, so no unit that was taken is returned",
    "memory.turn_memory: if live > began:": "the source's position can be resumed anyway",
    "memory.rows: self.mark[row] = FAR": "a row gets its mark when it is taken",
    "sched.batch: self._sampling.pop(row, None)": "the next turn that samples in the row sets its own options",
    "sched.batch: if len(turn.output) < params.min_new_tokens": "nothing is masked at or after the last such position",
    "session.registry: and session.key not in self._watched": "the later entry replaces the earlier one",
    "memory.tiers.copies: unit.place = ELSEWHERE": "the units of a move that failed are released with it",
    "memory.tiers.copies: return number if there and": "no holder has the units of a move that is not usable",
    "memory.tiers.copies: if self._last.get((unit.group": "a copy without references is never used",
    "sched.pressure: if self._drop_one(short, set()": "each closed session that is kept has units that no other has",
    "memory.session_memory: if needed is None or needed": "units shared with others are not counted as its own",
}
"""Changes that the simulator need not catch, by part of their names, with the reason."""


def everything() -> dict[str, Planted]:
    """Returns everything that can be planted, by name."""
    planted: dict[str, Planted] = {}
    kinds = (FAULTS, FAULTS_OF_COPIES, FAULTS_OF_GRAMMARS, FAULTS_OF_JOURNALS, FAULTS_OF_KINDS, FAULTS_OF_SCHEDULE)
    for fault in chain(*kinds, FAULTS_OF_SHARING, FAULTS_OF_ADAPTERS, FAULTS_OF_LIMITS, FAULTS_OF_ERASING):
        planted[f"fault {fault.__name__}"] = fault
    for slip in chain(SLIPS, *BY_AREA.values(), OF_TRAINING):
        planted[f"slip {slip}"] = slip
    for native in (*INT8, *RECURRENT):
        planted[f"native {native}"] = native
    seen: dict[str, int] = {}
    for mutant in find_mutants():
        text = f"call {mutant.module} {mutant.text}"
        seen[text] = seen.get(text, 0) + 1
        planted[text if seen[text] == 1 else f"{text} #{seen[text]}"] = mutant
    return planted


def is_justified(name: str) -> bool:
    """Returns whether the simulator need not catch it."""
    return any(part in name for part in JUSTIFIED)


def known_catchers() -> dict[str, Catcher]:
    """Returns what has caught each planted change, by name."""
    found: dict[str, Catcher] = json.loads(CATCHERS.read_text())
    return found
