"""Kept closed sessions and parked memory: private parts of the engine that the simulator reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from tenuto.engine.engine import Engine
from tenuto.memory.tiers.parked import Parked
from tenuto.session.session import Session


def kept_in_vain(engine: Engine) -> str | None:
    """Finds a kept closed session all of whose full pages another kept session has."""
    if engine.memory.needs_checkpoints:
        return None  # of two sessions with the same pages, one may be resumable further
    size, pages = engine.memory.page_size, {}
    for session in engine.registry.prefixes:
        full = session.memory.computed // size * size
        pages[session] = session.policy.scope, session.history[:full].tobytes()
    for session, (scope, tokens) in pages.items():
        for other, (its, longer) in pages.items():
            if other is not session and scope == its and longer.startswith(tokens):
                return f"{session!r} is kept, and {other!r} has all its {len(tokens)} bytes of full pages"
    return None


def parked_of(engine: Engine, session: Session) -> Parked | None:
    """Returns the session's parked memory."""
    parked = engine.idle_memory._sessions.get(session)
    return parked if parked in engine.idle_memory.tiers else None


def stays_on_disk(engine: Engine, session: Session) -> bool:
    """Returns whether the session's memory has left host memory for files that may be deleted."""
    parked = parked_of(engine, session)
    left = parked is not None and parked in engine.idle_memory.tiers._on_disk
    return parked is not None and left and parked.on_disk and not parked.pinned


def freed_without(engine: Engine, sessions: Collection[Session]) -> int:
    """Returns the size of the files that only these sessions' memory on disk needs, parked or saved."""
    theirs = [parked_of(engine, session) for session in sessions]
    theirs += [engine.idle_memory.saves.record(session.key) for session in sessions]
    held = Counter(unit for parked in theirs if parked is not None and not parked.pinned for unit in parked)
    uses = Counter(unit.file for unit, n in held.items() if n == unit.references)
    uses.update(file for parked in theirs if parked is not None for file in parked.unread)
    return sum(file.size for file, n in uses.items() if file is not None and n == file.wanted)


def is_leaving(engine: Engine) -> bool:
    """Returns whether some memory is on its way to disk."""
    return any(unit.leaving for parked in engine.idle_memory._sessions.values() for unit in parked)


def is_worth_disk(engine: Engine, size: int, tokens: int) -> bool:
    """Returns whether reading `size` bytes from disk is faster than computing `tokens`, according to measurements so
    far."""
    return engine.idle_memory.tiers.rates.worth("disk", size, tokens)
