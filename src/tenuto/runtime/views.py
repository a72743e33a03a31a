"""What a service's answers show of the engine, made in the engine's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypeVar

import msgspec

from tenuto.base.messages import AuditView, PoolView, ResultView, SessionView
from tenuto.engine.engine import Engine
from tenuto.memory.audit import AuditReport
from tenuto.session.session import Session
from tenuto.session.turn import TurnResult

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


def bytes_of(view: SessionView) -> int:
    """Of a view as it is sent."""
    return len(msgspec.msgpack.encode(view))


def held(engine: Engine, session: Session) -> dict[str, int]:
    """Units of each group that the session and its turn hold; those that several leases name count once."""
    units: dict[str, set[int]] = {pool.name: set() for pool in engine.memory.pools}
    for holder in session.memory.holders():
        for lease in holder.leases():
            units[lease.pool.name].update(lease.units)
    return {name: len(of_group) for name, of_group in units.items()}


def result_view(result: TurnResult) -> ResultView:
    """How a turn ended."""
    usage = result.usage
    return ResultView(
        reason=result.reason.value,
        committed=result.committed,
        version=result.version,
        kept=result.kept,
        prompt=usage.prompt,
        cached=usage.cached,
        generated=usage.generated,
        computed=usage.computed,
        max_new_tokens=result.max_new_tokens,
        context_left=result.context_left,
        stop=result.stop,
    )


def audit_view(report: AuditReport) -> AuditView:
    """What an audit found."""
    return AuditView(
        summary=str(report),
        pools=[
            PoolView(
                name=pool.name,
                capacity=pool.capacity,
                free=pool.free,
                in_flight=pool.limbo,
                leased=pool.leased,
                by_holder=dict(pool.by_holder),
            )
            for pool in report.pools
        ],
        holders=report.holders,
        leases=report.leases,
    )


def turn_state(session: Session) -> str:
    """Of the open turn, or idle."""
    return session.turn.state.value if session.turn is not None else "idle"
