"""Histories of turns for the witness, and a check of each plan's writes against the slots that sequences read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np

from tenuto.base.plan import Ints, Plan
from tenuto.engine.engine import Engine
from tenuto.memory.kinds.paged import PagedTable
from tenuto.memory.session_memory import SessionMemory
from tests.sim.internals import needed_of_session, needed_of_turn


class SlotWritten(AssertionError):
    """Raised when a plan writes a slot that a sequence reads."""


def known_histories(engine: Engine, plan: Plan) -> list[Ints]:
    """Returns, for each row of a submitted plan, the known tokens below its start; see the witness."""
    found: list[Ints] = []
    for row, start in zip(plan.rows.tolist(), plan.starts.tolist(), strict=True):
        turn = engine.batch.turns[row]
        assert turn is not None, f"row {row} has no turn"
        found.append(np.array(turn.tokens(0, start), np.int32))
    return found


def check_writes(engine: Engine, plan: Plan) -> None:
    """Compares all slots that `plan`, about to be submitted, writes with those that sessions, checkpoints and open
    turns read, as far as they are settled. Raises `SlotWritten`."""
    for row, start, count in zip(plan.rows.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True):
        turn = engine.batch.turns[row]
        assert turn is not None, f"row {row} has no turn"
        for group, table in enumerate(turn.session.memory.tables):
            if isinstance(table, PagedTable):
                for page, first, stop in _written(table, start, start + count):
                    _check(engine, f"step {plan.step}, for {turn.name}", group, page, first, stop)
    for group, moves in zip(engine.memory.states, plan.states, strict=True):
        shared = [slot for slot in moves.writes.tolist() if engine.memory.pools[group].counts[slot] != 1]
        if shared:
            raise SlotWritten(
                f"step {plan.step} writes state slots {shared} of group {group}, which have several holders"
            )


def _written(table: PagedTable, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yields pages that a turn writes at positions [start, stop) and others may read: (page, first slot, last slot +
    1)."""
    size = table.page_size
    for index in range(start // size, -(-stop // size)):
        own = index - table.first - table.released
        page = table.opened.units[own] if own >= 0 else table.kept_page(index)
        if own < 0 or table.pool.counts[page] > 1:
            yield page, max(start - index * size, 0), min(stop - index * size, size)


def _check(engine: Engine, what: str, group: int, page: int, first: int, stop: int) -> None:
    size = engine.memory.page_size
    for session in chain(engine.registry, engine.registry.prefixes):
        for begin, end in _read(session.memory, group, page, size):
            if max(begin, first) < min(end, stop):
                raise SlotWritten(
                    f"{what}, writes slots [{first}, {stop}) of page {page} of group {group}; "
                    f"session {session.id} reads [{begin}, {end})"
                )


def _read(memory: SessionMemory, group: int, page: int, size: int) -> Iterator[tuple[int, int]]:
    """Yields the slots of `page` that a session and its open turn read, as (first, last + 1)."""
    for part in chain(needed_of_session(memory)[0], needed_of_turn(memory)[0]):
        if part.group != group:
            continue
        for index in np.flatnonzero(np.array(part.pages) == page).tolist():
            begin = part.first + index * size
            if max(part.start, begin) < min(part.stop, begin + size):
                yield max(part.start - begin, 0), min(part.stop - begin, size)
