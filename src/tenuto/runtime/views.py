"""What a service's answers show of the engine, made in the engine's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypeVar

import msgspec

from tenuto.base.views import SessionInfo
from tenuto.engine.engine import Engine
from tenuto.session.session import Session

T = TypeVar("T")


def first_page(found: Iterable[T], limit: int, most: int, weight: Callable[[T], int]) -> list[T]:
    """At most `limit` items of at most `most` weight in all, but always at least one if there is one."""
    page: list[T] = []
    total = 0
    for one in islice(found, limit):
        total += weight(one)
        if page and total > most:
            break
        page.append(one)
    return page


def bytes_of(view: SessionInfo) -> int:
    """Of a view as it is sent."""
    return len(msgspec.msgpack.encode(view))


def held(engine: Engine, session: Session) -> dict[str, int]:
    """Units of each group that the session and its turn hold; those that several leases name count once."""
    units: dict[str, set[int]] = {pool.name: set() for pool in engine.memory.pools}
    for holder in session.memory.holders():
        for lease in holder.leases():
            units[lease.pool.name].update(lease.units)
    return {name: len(of_group) for name, of_group in units.items()}


def session_info(engine: Engine, session: Session) -> SessionInfo:
    """A session as it is now."""
    return SessionInfo(
        session_id=session.id,
        state=session.state,
        turn=session.turn.state if session.turn is not None else None,
        version=session.version,
        turns=len(session.records),
        tokens=len(session.history),
        computed=session.memory.computed,
        context_left=session.context_left,
        limit=session.limit,
        priority=session.policy.priority,
        ttl=session.policy.ttl,
        idle_seconds=0.0 if session.turn is not None else engine.now() - session.last_turn_end,
        memory=held(engine, session),
        metadata=dict(session.policy.metadata),
    )


def turn_state(session: Session) -> str:
    """Of the open turn, or idle."""
    return session.turn.state.value if session.turn is not None else "idle"
