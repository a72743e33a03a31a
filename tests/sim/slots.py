"""Compares memory slot by slot with the naive histories, and checks that no step writes a slot that others need.

A session at rest needs every slot its checkpoints and pages promise; an open turn needs the slots it started from and
those it has settled. Sessions at rest are compared again when they change, and from time to time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tenuto.engine.engine import Engine
from tenuto.memory.lineage import Lineage
from tests.sim import internals
from tests.sim.found import Found
from tests.sim.internals import Pages, Slot
from tests.sim.naive import Marks, NaiveSession, NaiveTurn, TokenRun

Array = np.ndarray
REFRESH = 64
"""The number of steps after which all sessions at rest are read again."""


@dataclass(slots=True)
class _OwnerSlots:
    """The slots that one session or turn needs in each group, with the hashes and tokens (or positions) they should
    hold."""

    stamp: object
    owner: str
    slots: list[list[Array]]
    hashes: list[list[Array]]
    tokens: list[list[Array]]
    fixed: list[list[Array]]


@dataclass(slots=True)
class _Whole:
    slots: list[Array] = field(default_factory=list)
    hashes: list[Array] = field(default_factory=list)
    tokens: list[Array] = field(default_factory=list)


class SlotChecker:
    """Compares the witness's slots with the histories."""

    def __init__(self, page_size: int, groups: int, marks: Callable[[Lineage], Marks], refresh: int = REFRESH) -> None:
        """Sessions at rest are read again every `refresh` times, otherwise only if their stamp is new. `marks`: see
        `Training`."""
        self._marks = marks
        self._refresh = refresh
        self._size = page_size
        self._groups = groups
        self._parts: dict[str, _OwnerSlots] = {}
        empty = [np.zeros(0, np.int64) for _ in range(groups)]
        self._resting = _Whole(empty, [np.zeros(0, np.uint64) for _ in range(groups)], empty)
        self._looked = 0

    def _build(
        self, stamp: object, owner: str, pages: list[Pages], slots: list[Slot], sequence: TokenRun
    ) -> _OwnerSlots:
        part = _OwnerSlots(stamp, owner, *([[] for _ in range(self._groups)] for _ in range(4)))  # type: ignore[arg-type]
        for entry in pages:
            if entry.stop <= entry.start:
                continue
            if entry.stop > len(sequence):
                raise Found("slots", f"{owner} has {entry.stop} tokens in memory, but only {len(sequence)}")
            where = internals.slots_of(entry, self._size)
            hashes, tokens = sequence.stored(entry.start, entry.stop)
            part.slots[entry.group].append(where)
            part.fixed[entry.group].append(where)
            part.hashes[entry.group].append(hashes)
            part.tokens[entry.group].append(tokens)
        for slot in slots:
            if slot.position > len(sequence):
                raise Found("slots", f"{owner} has the state of {slot.position} tokens, but only {len(sequence)}")
            where = np.array((slot.slot,), np.int64)
            part.slots[slot.group].append(where)
            if slot.fixed:
                part.fixed[slot.group].append(where)
            part.hashes[slot.group].append(np.array((sequence.hashes[slot.position],), np.uint64))
            part.tokens[slot.group].append(np.array((slot.position,), np.int64))
        return part

    def _gather(self, engine: Engine, naive: dict[str, NaiveSession], turns: dict[int, NaiveTurn]) -> list[_OwnerSlots]:
        """Updates the parts of sessions at rest; returns the settled parts of open turns."""
        self._looked += 1
        fresh: dict[str, _OwnerSlots] = {}
        moving = []
        changed = self._looked % self._refresh == 0
        for session in engine.registry:
            sid, memory = session.id, session.memory
            if session.version != naive[sid].version:
                continue  # a turn with nothing to compute has committed within this step
            if memory.arriving:
                continue  # it is not read before it has arrived
            stamp = (session, internals.stamp(session), memory.lineage)
            part = self._parts.get(sid)
            if part is None or changed or part.stamp != stamp:
                sequence = naive[sid].history
                if memory.computed > len(sequence) and session.turn is not None:  # found elsewhere for the turn's input
                    sequence = turns[session.turn.number].sequence
                sequence = sequence.weighed(self._marks(memory.lineage))
                part = self._build(stamp, sid, *internals.needed_of_session(memory), sequence)
            fresh[sid] = part
            if memory.turn is not None and session.turn is not None:
                turn = turns[session.turn.number]
                needed = internals.needed_of_turn(memory)
                sequence = turn.sequence.weighed(self._marks(memory.turn.lineage))
                moving.append(self._build(None, f"turn {turn.number} of {sid}", *needed, sequence))
        if changed or len(fresh) != len(self._parts) or any(fresh[sid] is not self._parts.get(sid) for sid in fresh):
            parts, whole = list(fresh.values()), _Whole()
            for group in range(self._groups):
                whole.slots.append(_joined([a for part in parts for a in part.slots[group]], np.int64))
                whole.hashes.append(_joined([a for part in parts for a in part.hashes[group]], np.uint64))
                whole.tokens.append(_joined([a for part in parts for a in part.tokens[group]], np.int64))
            self._resting = whole
        self._parts = fresh
        return moving

    def compare(
        self,
        stored: list[tuple[Array, Array]],
        engine: Engine,
        naive: dict[str, NaiveSession],
        turns: dict[int, NaiveTurn],
    ) -> None:
        """Raises `Found` unless the slots hold what the histories require."""
        moving = self._gather(engine, naive, turns)
        rest = self._resting
        for group, (hashes, tokens) in enumerate(stored):
            slots = _joined([rest.slots[group], *(a for part in moving for a in part.slots[group])], np.int64)
            wanted = _joined([rest.hashes[group], *(a for part in moving for a in part.hashes[group])], np.uint64)
            others = _joined([rest.tokens[group], *(a for part in moving for a in part.tokens[group])], np.int64)
            if not (np.array_equal(hashes[slots], wanted) and np.array_equal(tokens[slots], others)):
                wrong = (hashes[slots] != wanted) | (tokens[slots] != others)
                slot = int(slots[np.flatnonzero(wrong)[0]])
                names = [part.owner for part in self._owners(group, slot, moving)]
                raise Found("slots", f"group {group}: slot {slot}, which {names} need, does not match the history")

    def _owners(self, group: int, slot: int, moving: list[_OwnerSlots]) -> list[_OwnerSlots]:
        parts = [*self._parts.values(), *moving]
        return [part for part in parts if any((a == slot).any() for a in part.slots[group])]

    def needed(
        self, sizes: list[int], engine: Engine, naive: dict[str, NaiveSession], turns: dict[int, NaiveTurn]
    ) -> Needed:
        """Returns the slots that no step may write now."""
        moving = self._gather(engine, naive, turns)
        masks = []
        for group, size in enumerate(sizes):
            mask = np.zeros(size, np.bool_)
            mask[self._resting.slots[group]] = True
            for part in moving:
                for slots in part.fixed[group]:
                    mask[slots] = True
            masks.append(mask)
        return Needed(masks, self, moving)


class Needed:
    """Slots that must not change, as one mask for each group."""

    def __init__(self, masks: list[Array], checker: SlotChecker, moving: list[_OwnerSlots]) -> None:
        self._masks = masks
        self._checker = checker
        self._moving = moving

    def written(self, group: int, slots: Array) -> str | None:
        """Describes the first of `slots` that must not be written, with its owners, or returns `None`."""
        hit = self._masks[group][slots]
        if not hit.any():
            return None
        slot = int(slots[np.flatnonzero(hit)[0]])
        names = [part.owner for part in self._checker._owners(group, slot, self._moving)]
        return f"slot {slot}, which {names} need"


def _joined(arrays: list[Array], dtype: type) -> Array:
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)
