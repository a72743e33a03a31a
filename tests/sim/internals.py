"""Everything the simulator reads of the core's internals, except transitions: adapt this file when they change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from tenuto.base.errors import InvariantError
from tenuto.engine.engine import Engine
from tenuto.memory.checkpoints.checkpoint import Checkpoint
from tenuto.memory.kinds.full import FullTable
from tenuto.memory.kinds.paged import PagedTable
from tenuto.memory.kinds.sliding import SlidingTable
from tenuto.memory.kinds.state import StateGroup, StateTable
from tenuto.memory.session_memory import SessionMemory
from tenuto.memory.turn_memory import TurnMemory
from tenuto.session.session import Session
from tenuto.session.turn import Turn
from tenuto.text.constraint import Constraint


@dataclass(frozen=True, slots=True)
class Pages:
    """Positions [start, stop) are in `pages` of `group`; the first page begins at position `first`."""

    group: int
    pages: Any  # array of units
    first: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Slot:
    """The state after `position` tokens is in `slot` of `group`; if `fixed`, no step may write there."""

    group: int
    slot: int
    position: int
    fixed: bool


def of_closed_sessions(engine: Engine) -> tuple[int, ...]:
    """Returns the number of units of each group held only by closed sessions."""
    pools, closed = engine.memory.pools, list(engine.registry.prefixes)
    holders = [holder for session in closed for holder in session.memory.holders()]
    theirs: list[dict[int, int]] = [{} for _ in pools]
    for holder in dict.fromkeys(holders):
        if isinstance(holder, Checkpoint) and holder.references > holders.count(holder):
            continue  # others refer to it
        for lease in holder.leases():
            counts = theirs[pools.index(lease.pool)]
            for unit in lease.units:
                counts[unit] = counts.get(unit, 0) + 1
    pairs = zip(pools, theirs, strict=True)
    return tuple(sum(pool.counts[unit] == n for unit, n in counts.items()) for pool, counts in pairs)


def reclaimable(engine: Engine) -> list[int]:
    """Returns the number of units of each group held only by closed sessions and by checkpoints no open session
    needs."""
    pools = engine.memory.pools
    theirs: list[Counter[int]] = [Counter() for _ in pools]
    index = {id(pool): group for group, pool in enumerate(pools)}
    needed = set()
    checkpoints: dict[Checkpoint, None] = {}
    for session in engine.registry:
        turn = session.memory.turn
        needed.add(session.memory.checkpoints.needed)
        needed.update((turn.source, turn.checkpoints.needed) if turn is not None else ())
    for session in (*engine.registry, *engine.registry.prefixes):
        checkpoints.update({each: None for each in session.memory.holders() if isinstance(each, Checkpoint)})
    closed = [session.memory.leases() for session in engine.registry.prefixes]
    for leases in (*closed, *(each.leases() for each in checkpoints if each not in needed)):
        for lease in leases:
            theirs[index[id(lease.pool)]].update(lease.units)
    return [sum(pool.counts[u] == n for u, n in units.items()) for pool, units in zip(pools, theirs, strict=True)]


def exclusive(session: Session) -> tuple[int, ...]:
    """Returns the number of units of each group that releasing all the session's memory would free."""
    pools = session.memory.memory.pools
    mine: list[dict[int, int]] = [{} for _ in pools]
    holders = list(session.memory.holders())
    for holder in dict.fromkeys(holders):
        if isinstance(holder, Checkpoint) and holder.references > holders.count(holder):
            continue  # others refer to it
        for lease in holder.leases():
            counted = mine[pools.index(lease.pool)]
            for unit in lease.units:
                counted[unit] = counted.get(unit, 0) + 1
    return tuple(
        sum(pool.counts[unit] == n for unit, n in counted.items()) for pool, counted in zip(pools, mine, strict=True)
    )


def shares(session: Session) -> bool:
    """Returns whether another holder has some unit of the session, or refers to one of its checkpoints."""
    holders = list(session.memory.holders())
    if any(isinstance(each, Checkpoint) and each.references > holders.count(each) for each in holders):
        return True
    mine: dict[tuple[int, int], int] = {}
    for holder in holders:
        for lease in holder.leases():
            for unit in lease.units:
                mine[id(lease.pool), unit] = mine.get((id(lease.pool), unit), 0) + 1
    pools = {id(pool): pool for pool in session.memory.memory.pools}
    return any(pools[pool].counts[unit] != n for (pool, unit), n in mine.items())


def needed_of_session(memory: SessionMemory) -> tuple[list[Pages], list[Slot]]:
    """Returns the pages and slots of the session's history: a turn that resumes there reads every slot of them."""
    pages: list[Pages] = []
    slots: list[Slot] = []
    for group, table in enumerate(memory.tables):
        if isinstance(table, FullTable):
            if memory.computed:
                pages.append(Pages(group, table.base.units, 0, 0, memory.computed))
        else:
            _of_checkpoints(memory.checkpoints, group, table, pages, slots)
    return pages, slots


def _of_checkpoints(checkpoints: Any, group: int, table: Any, pages: list[Pages], slots: list[Slot]) -> None:
    for checkpoint in checkpoints:
        part = checkpoint.parts[group]
        if isinstance(table, StateTable):
            slots.append(Slot(group, part.units[0], checkpoint.position, fixed=True))
        elif len(part):
            first = table.first_entry(checkpoint.position) * table.page_size
            pages.append(Pages(group, part.units, first, first, checkpoint.position))


def needed_of_turn(memory: SessionMemory) -> tuple[list[Pages], list[Slot]]:
    """Returns the pages and slots that an open turn holds in addition, up to the settled position."""
    turn = memory.turn
    pages: list[Pages] = []
    slots: list[Slot] = []
    if turn is None:
        return pages, slots
    computed = turn.computed
    resumable = [*([turn.source] if turn.source is not None else []), *turn.checkpoints]
    own = [c for c in resumable if c.position <= computed]  # the others belong to the step in flight
    for group, table in enumerate(memory.tables):
        if isinstance(table, StateTable):
            _of_checkpoints(own, group, table, pages, slots)
            slot, position = _settled_slot(memory, group, computed)
            if slot >= 0:
                slots.append(Slot(group, slot, position, fixed=False))
            continue
        if isinstance(table, SlidingTable):
            _of_checkpoints(own, group, table, pages, slots)
        assert isinstance(table, PagedTable)
        size, opened = table.page_size, table.opened.units
        first = (table.first + table.released) * size
        if computed > max(first, turn.start) and len(opened):
            pages.append(Pages(group, opened, first, first, computed))
        # Slots filled in place, in the last page of what it started from.
        began = turn.start if isinstance(table, FullTable) or turn.source is None else turn.source.position
        if began % size and table.first * size > began and computed > began and not table.released:
            unit = table.kept_page(began // size)
            pages.append(Pages(group, [unit], began // size * size, began, min(computed, table.first * size)))
    return pages, slots


def _settled_slot(memory: SessionMemory, group: int, computed: int) -> tuple[int, int]:
    """Returns the state slot with the state after `computed` tokens, or before the last of these if their inputs are
    kept, and its position; -1 if unknown."""
    turn, rows, registers = memory.turn, memory.memory.rows, memory.memory.groups[group]
    assert turn is not None
    assert isinstance(registers, StateGroup)
    if turn.row < 0:
        table = memory.tables[group]
        assert isinstance(table, StateTable)
        return table.current, computed
    if rows.scheduled[turn.row] == computed:
        return int(registers.current[turn.row]), computed - int(rows.kept[turn.row])
    if 0 <= (before := int(registers.alternate_at[turn.row])) <= computed:
        return int(registers.alternate[turn.row]), before
    return -1, computed


def cached_units(engine: Engine) -> list[int]:
    """Returns the number of distinct units of each group held by checkpoints that only save work."""
    cache, pools = engine.memory.cache, engine.memory.pools
    found: list[set[int]] = [set() for _ in pools]
    for session in [*engine.registry, *engine.registry.prefixes]:
        turn = session.memory.turn
        for checkpoint in [*session.memory.checkpoints, *(turn.checkpoints if turn is not None else ())]:
            if checkpoint in cache:
                for group, part in enumerate(checkpoint.parts):
                    if part is not None:
                        found[group].update(part.units)
    return [len(units) for units in found]


def trimmed(engine: Engine) -> int:
    """Returns the number of checkpoints evicted so far to keep the budget, not for lack of memory."""
    cache = engine.memory.cache
    return cache.evicted - cache.replaced - engine.pressure.yielded["checkpoint"]


def essential_units(engine: Engine, turn: Turn | None) -> list[int]:
    """Returns the number of distinct units of each group that cannot be taken: those of turns and drafts in rows, of
    their sessions, of the session of `turn`, and what pinned sessions have committed, without checkpoints that only
    save work."""
    cache, pools = engine.memory.cache, engine.memory.pools
    found: list[set[int]] = [set() for _ in pools]
    index = {id(pool): group for group, pool in enumerate(pools)}
    running = engine.batch.running()
    sessions = {t.session.id: t.session for t in ([*running, turn] if turn is not None else running)}
    for session in sessions.values():
        for holder in session.memory.holders():
            if isinstance(holder, Checkpoint) and holder in cache:
                continue
            for lease in holder.leases():
                found[index[id(lease.pool)]].update(lease.units)
    for session in engine.registry:
        for group, lease in session.memory.kept_leases() if session.policy.pinned else ():
            found[group].update(lease.units)
    return [len(units) for units in found]


def held_beyond(engine: Engine, turn: Turn) -> list[int]:
    """Returns the number of units of each group that a turn in memory may write."""
    memory = turn.session.memory.turn
    return memory.own_units() if memory is not None else [0] * len(engine.memory.pools)


def table_entries(turn: Turn, group: int) -> int:
    """Returns the number of page table entries the running turn can write through."""
    table = turn.session.memory.tables[group]
    assert isinstance(table, PagedTable)
    return table.entries


def touched_by(executor: Any, plan: Any) -> list[set[int]]:
    """Returns the units of each group that a plan names."""
    found: list[set[int]] = [set() for _ in executor.spec.groups]
    for group, table, copy in zip(executor._paged, plan.tables, plan.copies, strict=True):
        found[group].update(table.pages.tolist(), copy.sources.tolist(), copy.targets.tolist())
    for group, moves in zip(executor._states, plan.states, strict=True):
        found[group].update(moves.reads.tolist(), moves.writes.tolist())
    return found


def reusable(engine: Engine, group: int) -> list[int]:
    """Returns the units that could be handed out now."""
    return engine.memory.pools[group].unused()[0]


def bookkeeping(engine: Engine) -> dict[str, int]:
    """Returns the lengths of the lists that grow with operations."""
    return {
        "timers": len(engine.timers),
        "expiries": len(engine.registry._expiries),
        "queue": engine.core.queue._listed,
    }


def has_suspects(engine: Engine) -> bool:
    """Returns whether steps may run with only some of the turns."""
    return bool(engine.suspects)


def waits_in_its_row(engine: Engine, turn: Turn) -> bool:
    """Returns whether a running turn waits for another turn's computation or for copies."""
    return turn.session.memory.arriving or (engine.sharing.waits(turn))


def is_parked(engine: Engine, session: Session) -> bool:
    """Returns whether some memory of the session is in a tier."""
    return engine.idle_memory.position(session) > 0


def coming_back(engine: Engine) -> set[Session]:
    """Returns the sessions whose state comes back before their turns."""
    return set(engine.expectations._coming)


def copying(engine: Engine) -> bool:
    """Returns whether copies to the device are under way."""
    return engine.idle_memory.copying


def slow_turns(engine: Engine, were_slow: Collection[Constraint]) -> set[int]:
    """Returns the numbers of running turns that need not be waited for, because their masks are slow or were slow when
    the step was planned."""
    running = [turn for turn in engine.batch.turns.tolist() if turn is not None and turn.constraint is not None]
    return {turn.number for turn in running if turn.constraint.slow or turn.constraint in were_slow}


def in_flight(engine: Engine) -> bool:
    return len(engine._flights) > 0


@contextmanager
def flight_touches_a_free_unit(engine: Engine) -> Iterator[bool]:
    """Makes the plan of the step in flight name a free unit, which the audit must see. Yields False if no such plan or
    unit exists."""
    flight = next(iter(engine._flights), None)
    for group, table in zip(engine.memory.paged, flight.plan.tables if flight is not None else (), strict=False):
        free = reusable(engine, group)
        if len(table.pages) and free:
            kept, table.pages[0] = int(table.pages[0]), free[0]
            try:
                yield True
            finally:
                table.pages[0] = kept
            return
    yield False


def check_tables(engine: Engine, lookahead: int) -> None:  # noqa: C901 - one invariant after the other
    """Checks that sessions and turns hold exactly what their positions need. Raises `InvariantError`."""
    size, cache = engine.memory.page_size, engine.memory.cache

    def require(condition: object, what: str) -> None:
        if not condition:
            raise InvariantError(f"{memory.holder_name}: {what}")

    for session in engine.registry:
        memory = session.memory
        turn = memory.turn
        positions = [c.position for c in memory.checkpoints]
        require(positions == sorted(set(positions)), f"checkpoints at {positions}")
        if engine.memory.needs_checkpoints and memory.computed:
            require(positions and positions[-1] == memory.computed, f"{memory.computed}, checkpoints at {positions}")
            require(memory.checkpoints[-1].pins, f"the checkpoint at {memory.computed} can be evicted")
            require(all(c in cache or c.pins for c in memory.checkpoints), "a checkpoint is neither cached nor needed")
        reached = 0
        if turn is not None:
            reached = turn.scheduled
            held = [c.position for c in turn.checkpoints]
            require(held == sorted(set(held)), f"a turn's checkpoints at {held}")
            require(not held or turn.start < held[0], f"checkpoints at {held} of a turn from {turn.start}")
            require(not held or held[-1] <= reached, f"checkpoints at {held} of a turn at {reached}")
            end = session.turn.resume_position if session.turn is not None else 0
            require(all(p % size == 0 or p == end for p in held), f"checkpoints at {held}, page size {size}")
        for table in memory.tables:
            if isinstance(table, FullTable):
                require(len(table.base) == -(-memory.computed // size), f"{len(table.base)} pages")
            if turn is None:
                require(table.own is None, "units of a turn without a turn")
            elif isinstance(table, PagedTable):
                guessed = max(reached + (lookahead + 1 if turn.row >= 0 else 0), turn.start)  # guesses leave pages
                require(table.entries <= -(-guessed // size), f"{table.entries} entries for {reached}")
                if isinstance(table, SlidingTable):
                    needed = min(table.first_entry(_lowest(turn)), table.entries)
                    require(table.first + table.released >= needed, "pages outside the window are held")


def _lowest(turn: TurnMemory) -> int:
    """Returns the lowest position at which the turn may go on, except at a checkpoint."""
    row, memory = turn.row, turn.memory
    if row < 0:
        return turn.computed
    before = [int(group.alternate_at[row]) for group in memory.groups if isinstance(group, StateGroup)]
    return min(int(memory.rows.stands(row)), *(position for position in before if position >= 0), turn.computed)


def spaced_checkpoints(session: Session) -> list[int]:
    """Returns the positions of the checkpoints that the open turn has made."""
    turn = session.memory.turn
    return [c.position for c in turn.checkpoints] if turn is not None else []


def positions_kept(session: Session) -> list[int]:
    """Returns the positions of the session's checkpoints."""
    return [c.position for c in session.memory.checkpoints]


def stamp(session: Session) -> tuple[int, int, int, tuple[bytes, ...]]:
    """Returns a value that changes when the units of a session at rest change, except after evictions of checkpoints
    and for new units with the same numbers. A session that left the device and came back has other units."""
    memory = session.memory
    units = tuple(bytes(each) for each in memory.kept()) if memory.computed else ()
    return memory.computed, len(memory.checkpoints), session.version, units


def slots_of(pages: Pages, size: int) -> np.ndarray:
    """Returns the token slots of the positions."""
    units = np.array(pages.pages, np.int64)
    positions = np.arange(pages.start, pages.stop)
    return units[(positions - pages.first) // size] * size + positions % size
