"""Faults of state slots and sliding windows, planted like those in `faults`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tenuto.memory.checkpoints.checkpoint import Checkpoint
from tenuto.memory.kinds.sliding import SlidingTable
from tenuto.memory.kinds.state import StateGroup
from tenuto.memory.turn_memory import TurnMemory
from tests.sim.faults import replaced


def rows_read_each_others_state_slots() -> Any:
    """A step reads state slots in a different order from its rows."""

    def make(original: Any) -> Any:
        def advance(self: StateGroup, rows: Any, starts: Any, keeps: Any, grown: Any, moves: Any) -> None:
            original(self, rows, starts, keeps, grown, moves)
            made = moves.states[-1]
            moves.states[-1] = replace(made, reads=made.reads[::-1].copy())

        return advance

    return replaced(StateGroup, "advance", make)


def pages_of_the_sessions_window_are_released_before_the_turn_commits() -> Any:
    """Pages that the turn has moved past are released although its session still stands there until the commit."""

    def make(original: Any) -> Any:
        def slide(self: SlidingTable, computed: int) -> None:
            original(self, computed)
            if self.released and self._source is not None and len(self._source):
                self._source.drop_front(1)

        return slide

    return replaced(SlidingTable, "slide", make)


def a_checkpoints_state_is_past_its_position() -> Any:
    """Its recorded position is one token short of the tokens in its slot."""

    def make(original: Any) -> Any:
        def checkpoint(self: TurnMemory, position: int) -> Checkpoint:
            made: Checkpoint = original(self, position)
            made.position = max(1, position - 1)
            return made

        return checkpoint

    return replaced(TurnMemory, "checkpoint", make)


FAULTS_OF_KINDS = (
    rows_read_each_others_state_slots,
    pages_of_the_sessions_window_are_released_before_the_turn_commits,
    a_checkpoints_state_is_past_its_position,
)
