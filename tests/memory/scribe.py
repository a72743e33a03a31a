"""Plays planner and executor for the memory package: writes computed tokens into imagined units and reads them back.

Every token is a new number, so a slot that holds it identifies the whole history before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from tenuto.base.groups import GroupSpec, Kind, MemorySpec
from tenuto.base.plan import NO_SLOT
from tenuto.base.views import AuditReport
from tenuto.memory.audit import recount
from tenuto.memory.kinds.full import FullTable
from tenuto.memory.kinds.group import Growth, Table
from tenuto.memory.kinds.sliding import SlidingTable
from tenuto.memory.memory import KINDS, Memory, Reservation
from tenuto.memory.pool import Holder, HolderKind, Lease, Pool
from tenuto.memory.rows import Rows
from tenuto.memory.session_memory import SessionMemory, all_holders
from tenuto.memory.shape import Shape
from tenuto.memory.turn_memory import TurnMemory

FULL, SLIDING, STATE = Kind.FULL, Kind.SLIDING, Kind.STATE


class Someone:
    """A holder with a name."""

    def __init__(self, name: str, kind: HolderKind = "session") -> None:
        self.holder_name = name
        self.holder_kind = kind
        self.held: list[Lease] = []

    def leases(self) -> list[Lease]:
        return self.held


def make_shape(**changes: Any) -> Shape:
    usual = {
        "context_length": 60,
        "max_running": 4,
        "max_step_tokens": 8,
        "overlap": False,
        "lookahead": 0,
        "checkpoint_interval": 512,
        "checkpoint_share": 1.0,
    }
    return Shape(**{**usual, **changes})


def make_table(spec: GroupSpec, pool: Pool, page_size: int = 4) -> Table:
    """Makes a table with its own group."""
    group = KINDS[spec.kind](0, spec, pool, page_size, make_shape(), Rows(4))
    return group.table(Someone("session"))


def make_spec(kinds: Sequence[Kind], page_size: int = 4, window: int = 6) -> MemorySpec:
    return MemorySpec(page_size, tuple(GroupSpec(kind, 1, window if kind is SLIDING else 0) for kind in kinds))


@dataclass
class Script:
    """A session: its memory, and the tokens it should hold."""

    memory: SessionMemory
    history: list[int] = field(default_factory=list)
    writing: Writing | None = None


@dataclass
class Writing:
    """An open turn: the sequence it sees, and the page tables an executor would keep for it."""

    script: Script
    memory: TurnMemory
    base: int
    tokens: list[int]
    tables: list[dict[int, int]]
    least: int = 0  # tokens of history and input, which a commit keeps
    begun_with: int = 0  # tokens that others started with, which it keeps until it ends
    kept: list[int] = field(default_factory=list)  # tokens whose inputs an executor would keep for its row
    kept_from: int = 0  # the position of the first
    guessed: bool = False  # whether its last step had guesses

    @property
    def computed(self) -> int:
        return self.memory.computed


class Scribe:
    """One memory, its sessions, and the contents of every unit."""

    def __init__(
        self, kinds: Sequence[Kind], *, units: int = 80, page_size: int = 4, window: int = 6, **shape: Any
    ) -> None:
        self.memory = Memory(make_spec(kinds, page_size, window), [units] * len(kinds), make_shape(**shape))
        self.scripts: list[Script] = []
        self.copies: list[tuple[int, int]] = []  # group and slots of every page copy
        self._fresh = count(1)
        self._slots: list[dict[tuple[int, int], int]] = [{} for _ in kinds]  # (unit, slot or position) -> token

    # -- sessions

    def session(self) -> Script:
        script = Script(SessionMemory(self.memory, f"session {len(self.scripts)}"))
        self.scripts.append(script)
        return script

    def committed(self, tokens: int) -> Script:
        """Makes a session with `tokens` tokens of history, all but the last computed."""
        script = self.session()
        self.compute(self.open(script), tokens - 1)
        self.commit(script, tokens)
        return script

    def fork(self, parent: Script, at: int | None = None) -> Script:
        child = self.session()
        child.history = parent.history[: len(parent.history) if at is None else at]
        parent.memory.fork(child.memory, max(0, len(child.history) - 1))
        return child

    def fork_turn(self, writing: Writing, target: int) -> Script | None:
        """Makes a session that starts with the open turn's computed tokens below `target`, if possible; the turn then
        keeps them."""
        position = writing.memory.shareable(target)
        if not position:
            return None
        child = self.session()
        child.history = writing.tokens[: position + 1]
        writing.memory.fork(child.memory, position)
        writing.begun_with = max(writing.begun_with, position)
        writing.least = max(writing.least, position + 1)
        return child

    def rewind(self, script: Script, at: int) -> None:
        del script.history[at:]
        script.memory.truncate(max(0, at - 1))

    # -- turns

    def open(self, script: Script, base: int | None = None, target: int | None = None) -> Writing:
        """Opens a turn that builds on the first `base` tokens and starts at `target` at the latest."""
        base = len(script.history) if base is None else base
        with self.memory.reserve(1, Someone("admission")) as reserved:
            memory = script.memory.begin("turn", base if target is None else target, reserved_all(reserved))
        script.writing = Writing(script, memory, base, script.history[:base], [])
        self.attach(script.writing)
        return script.writing

    def attach(self, writing: Writing) -> None:
        row = self.memory.rows.take()
        writing.tables = [{} for _ in self.memory.paged]
        writing.guessed = False
        for growth in writing.memory.attach(row):
            self._learn(writing, growth)

    def compute(self, writing: Writing, tokens: int, accepted: int | None = None) -> None:
        """Runs one step that settles at once: reads everything below, then writes `tokens` more. Unless `accepted` is
        None, the step has guesses, and only so many of its tokens are accepted."""
        rows, row = self.memory.rows, writing.memory.row
        start = int(rows.scheduled[row])
        end = start + tokens
        while len(writing.tokens) <= end:
            writing.tokens.append(next(self._fresh))
        for growth in self.memory.grow([(writing.memory.session.tables, end)]):
            self._learn(writing, growth)
        self._read(writing, start)
        uncertain = np.array([0 if accepted is None else tokens])
        moves = self.memory.advance(np.array([row]), np.array([start]), uncertain, [])
        if moves.left:
            writing.memory.left_checkpoint()
        for group, move in zip(self.memory.states, moves.states, strict=True):
            absorbed = int(move.absorbs[0])
            self._check_state(group, int(move.reads[0]), writing.tokens, start - absorbed)
            if absorbed:
                assert (writing.kept_from, writing.kept[:absorbed]) == (
                    start - absorbed,
                    writing.tokens[start - absorbed : start],
                )
            unit, at = int(move.writes[0]), start if move.keeps[0] else end
            self._slots[group] = {key: token for key, token in self._slots[group].items() if key[0] != unit}
            self._slots[group][unit, at] = writing.tokens[at - 1] if at else 0
        writing.kept, writing.kept_from, writing.guessed = writing.tokens[start:end], start, accepted is not None
        for i, group in enumerate(self.memory.paged):
            for position in range(start, end):
                page = writing.tables[i][position // self.memory.page_size]
                self._slots[group][page, position % self.memory.page_size] = writing.tokens[position]
        rows.scheduled[row] = rows.computed[row] = end
        if accepted is not None and accepted < tokens:
            self.memory.reject(row, start + accepted)
            del writing.tokens[start + accepted :]
        if self.memory.needs_checkpoints:
            writing.memory.slide()

    def mark(self, writing: Writing) -> bool:
        """Makes a checkpoint at the turn's position; returns False if no state slot is free."""
        if not writing.memory.spare_slot():
            return False
        writing.memory.mark(writing.computed)
        return True

    def commit(self, script: Script, length: int) -> None:
        """Ends the turn with the first `length` tokens of its sequence as history."""
        writing = script.writing
        assert writing is not None
        while len(writing.tokens) < length:
            writing.tokens.append(next(self._fresh))
        script.history = writing.tokens[:length]
        script.writing = None
        writing.memory.commit(max(0, length - 1), writing.base)

    def abort(self, script: Script) -> None:
        assert script.writing is not None
        script.writing.memory.abort()
        script.writing = None

    def redraft(self, writing: Writing, common: int) -> None:
        """Changes the draft's tokens from `common` on: cuts the turn, or gives up its computed tokens."""
        position = writing.memory.cut_to(common)
        if position <= writing.memory.start:
            self.abort(writing.script)
            return
        writing.memory.truncate(position)
        del writing.tokens[common:]
        self.attach(writing)

    # -- checks

    def holders(self) -> Iterator[Holder]:
        return all_holders(script.memory for script in self.scripts)

    def audit(self) -> AuditReport:
        """Checks that every unit is held as counted, and that every session's memory matches its history."""
        for script in self.scripts:
            self._check_session(script)
        return recount(self.memory, self.holders())

    def free(self) -> list[int]:
        return self.memory.free().tolist()

    def _check_session(self, script: Script) -> None:
        memory = script.memory
        assert memory.computed <= max(0, len(script.history) - 1)
        if self.memory.needs_checkpoints and memory.computed:
            assert memory.checkpoints[-1].position == memory.computed
        for group, table in enumerate(memory.tables):
            if isinstance(table, FullTable):
                self._check_pages(group, dict(enumerate(table.base.units)), script.history, 0, memory.computed)
                continue
            for checkpoint in memory.checkpoints:
                part, position = checkpoint.parts[group], checkpoint.position
                assert part is not None
                if isinstance(table, SlidingTable):
                    first = table.first_entry(position)
                    pages = dict(enumerate(part.units, first))
                    self._check_pages(group, pages, script.history, max(0, position - table.window + 1), position)
                else:
                    self._check_state(group, part.units[0], script.history, position)

    def _learn(self, writing: Writing, growth: Growth) -> None:
        group = growth.group
        for offset, page in enumerate(growth.pages):
            writing.tables[self.memory.paged.index(group)][growth.index + offset] = page
        if growth.copy_from >= 0:
            self.copies.append((group, growth.copy_slots))
            slots = self._slots[group]
            for slot in range(growth.copy_slots):
                if (growth.copy_from, slot) in slots:
                    slots[growth.pages[0], slot] = slots[growth.copy_from, slot]

    def _read(self, writing: Writing, start: int) -> None:
        for i, group in enumerate(self.memory.paged):
            window = self.memory.spec.groups[group].window
            first = max(0, start - window + 1) if window else 0
            self._check_pages(group, writing.tables[i], writing.tokens, first, start)

    def _check_pages(self, group: int, pages: dict[int, int], tokens: list[int], first: int, stop: int) -> None:
        size = self.memory.page_size
        found = [self._slots[group].get((pages[p // size], p % size)) for p in range(first, stop)]
        assert found == tokens[first:stop], f"{self.memory.pools[group].name} holds {found}, not {tokens[first:stop]}"

    def _check_state(self, group: int, unit: int, tokens: list[int], position: int) -> None:
        if unit == NO_SLOT:
            assert position == 0, f"the zero state at {position}"
        else:
            token = tokens[position - 1] if position else 0
            assert self._slots[group].get((unit, position)) == token, f"slot {unit} is not at {position}"


def reserved_all(reserved: Reservation) -> tuple[Lease, ...]:
    """Takes everything out of a reservation."""
    return reserved.take(reserved.available())
