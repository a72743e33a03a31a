"""Everything that can be planted, and what is known to catch it."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

from tests.sim.faults import FAULTS
from tests.sim.faults_of_copies import FAULTS_OF_COPIES
from tests.sim.faults_of_grammars import FAULTS_OF_GRAMMARS
from tests.sim.faults_of_journals import FAULTS_OF_JOURNALS
from tests.sim.faults_of_kinds import FAULTS_OF_KINDS
from tests.sim.faults_of_schedule import FAULTS_OF_SCHEDULE
from tests.sim.faults_of_sharing import FAULTS_OF_SHARING
from tests.sim.mutants import find_mutants
from tests.sim.planted import Catcher, Planted
from tests.sim.slips import SLIPS
from tests.sim.slips_by_area import BY_AREA
from tests.sim.slips_of_kernels import INT8

CATCHERS = Path(__file__).with_name("catchers.json")
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
    "memory.tiers: unit.place = ELSEWHERE": "the units of a move that failed are released with it",
    "memory.tiers: return number if there and": "likewise: nobody has the units of a move that is not usable",
    "memory.tiers: if self._copies.get((unit.group": "a copy that nobody refers to is not taken for one",
    "sched.pressure: if self._drop_one(short, set()": "closed sessions that are kept each have something of their own",
    "memory.session_memory: if needed is None or needed": "the units that others have, too, are not counted as its own",
}
"""What may be planted without the simulator noticing, by part of its name, and why that is right."""


def everything() -> dict[str, Planted]:
    """Everything that can be planted, by name."""
    planted: dict[str, Planted] = {}
    kinds = (FAULTS, FAULTS_OF_COPIES, FAULTS_OF_GRAMMARS, FAULTS_OF_JOURNALS, FAULTS_OF_KINDS, FAULTS_OF_SCHEDULE)
    for fault in chain(*kinds, FAULTS_OF_SHARING):
        planted[f"fault {fault.__name__}"] = fault
    for slip in chain(SLIPS, *BY_AREA.values()):
        planted[f"slip {slip}"] = slip
    for native in INT8:
        planted[f"native {native}"] = native
    seen: dict[str, int] = {}
    for mutant in find_mutants():
        text = f"call {mutant.module} {mutant.text}"
        seen[text] = seen.get(text, 0) + 1
        planted[text if seen[text] == 1 else f"{text} #{seen[text]}"] = mutant
    return planted


def is_justified(name: str) -> bool:
    """Whether it may go unnoticed."""
    return any(part in name for part in JUSTIFIED)


def known_catchers() -> dict[str, Catcher]:
    """What has caught each, by name."""
    found: dict[str, Catcher] = json.loads(CATCHERS.read_text())
    return found
