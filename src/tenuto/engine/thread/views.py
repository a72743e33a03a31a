"""Views of an engine for answers, made in its thread. Texts are left out; other threads add them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypeVar

import msgspec

from tenuto.base.tokens import ForkedAt, PackedTokens, PackedTurn, StateSpan
from tenuto.base.views import PoolReport, Record, SessionInfo, SharedTierView, Stats, Ticket
from tenuto.engine.engine import Engine
from tenuto.memory.pool import Lease
from tenuto.session.records import Origin, TurnRecord
from tenuto.session.session import Session
from tenuto.session.turn import Turn

T = TypeVar("T")

PAGE_BYTES = 2**20
"""The size at which a page of sessions ends."""
PAGE_TOKENS = 2**16
"""The number of tokens at which a page of turns ends."""


def first_page(found: Iterable[T], limit: int, most: int, weight: Callable[[T], int]) -> list[T]:
    """Returns the first items: at most `limit`, with a total weight of at most `most`, but at least one if there are
    any."""
    page: list[T] = []
    total = 0
    for one in islice(found, limit):
        total += weight(one)
        if page and total > most:
            break
        page.append(one)
    return page


def bytes_of(view: SessionInfo) -> int:
    """Returns the size of a view when it is sent."""
    return len(msgspec.msgpack.encode(view))


def held(engine: Engine, session: Session) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the units of each group that the session and its turn need, and those that they only hold for cached
    checkpoints. A unit with several leases counts once."""
    needed: dict[str, list[Lease]] = {pool.name: [] for pool in engine.memory.pools}
    every: dict[str, list[Lease]] = {pool.name: [] for pool in engine.memory.pools}
    for holder in session.memory.holders():
        for lease in holder.leases():
            every[lease.pool.name].append(lease)
            if holder.holder_kind != "cached":
                needed[lease.pool.name].append(lease)
    counts = {name: _distinct(of_group) for name, of_group in needed.items()}
    return counts, {name: _distinct(of_group) - counts[name] for name, of_group in every.items()}


def _distinct(leases: list[Lease]) -> int:
    """Returns the number of distinct units of these leases, each of which lists a unit at most once."""
    if len(leases) == 1:
        return len(leases[0])
    return len(set().union(*(lease.units for lease in leases)))


def session_info(engine: Engine, session: Session) -> SessionInfo:
    """Returns the view of a session."""
    memory, cached = held(engine, session)
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
        idle_seconds=0.0 if session.turn is not None else round(engine.now() - session.last_turn_end, 3),
        memory=memory,
        cached=cached,
        adapter=session.policy.adapter.name if session.policy.adapter is not None else None,
        pinned=session.policy.pinned,
        metadata=dict(session.policy.metadata),
        expected_in=round(session.expected - engine.now(), 3) if session.expected is not None else None,
    )


def records(session: Session, first: int, limit: int) -> list[Record]:
    """Returns a page of up to `limit` committed turns from number `first` on, without their texts."""
    page = first_page(
        session.records[first - 1 : first - 1 + limit], limit, PAGE_TOKENS, lambda record: record.end - record.start
    )
    return [
        Record(
            number=first + i,
            start=record.start,
            resume_cost=session.resume_cost(record.end),
            input_tokens=session.history[record.start : record.input_end].tolist(),
            output_tokens=session.history[record.input_end : record.end].tolist(),
            input_text=None,
            output_text=None,
        )
        for i, record in enumerate(page)
    ]


def tokens(engine: Engine, session: Session) -> PackedTokens:
    """Returns the session's committed tokens and who made them. Hidden sessions are not part of the tree of forks."""
    memory, origin, parent = session.memory, session.origin, session.parent
    return PackedTokens(
        session=session.id,
        version=session.version,
        weight_version=engine.memory.weights.name,
        computed_tokens=memory.computed,
        state=[StateSpan(start=stamp.start, weight_version=stamp.weights.name) for stamp in memory.lineage],
        turns=[_turn(number, record) for number, record in enumerate(session.records, 1)],
        parent=_forked(origin.parent, origin, is_open=parent is not None) if origin is not None else None,
        children=[
            _forked(child.id, child.origin, is_open=True)
            for child in session.forks
            if child.origin is not None and not child.policy.hidden
        ],
        tokens=session.history.tobytes(),
    )


def _forked(other: str, at: Origin, *, is_open: bool) -> ForkedAt:
    return ForkedAt(session=other, turn=at.turns, position=at.position, open=is_open)


def _turn(number: int, record: TurnRecord) -> PackedTurn:
    made = record.made
    return PackedTurn(
        turn=number,
        input_tokens=record.input_end - record.start,
        output_tokens=record.end - record.input_end,
        logprobs=made.logprobs if made is not None and made.logprobs else None,
        seed=made.seed if made is not None else None,
        weight_versions=list(made.versions) if made is not None else [],
    )


def ticket(turn: Turn, *, echo: bool) -> Ticket:
    """Returns the ticket of an accepted turn; with `echo` it has the prompt's tokens, without their text."""
    return Ticket(
        turn=turn.number,
        session=turn.session.id,
        history=turn.base_length,
        prompt_tokens=turn.prompt_length,
        max_new_tokens=turn.max_new_tokens,
        version=turn.session.version,
        prompt=turn.tokens(0, turn.prompt_length).tolist() if echo else [],
        birth=turn.session.birth,
    )


def stats(engine: Engine, shared: SharedTierView) -> Stats:
    """Returns the engine's counters, with those of the fleet's `shared` tier."""
    counts, totals, tiers = engine.counts, engine.totals, engine.idle_memory.tiers
    return Stats(
        sessions=len(engine.registry),
        running=len(engine.batch),
        queued=engine.queued,
        steps=engine.steps,
        transitions=dict(engine.transitions),
        pools=[PoolReport(pool.name, pool.capacity, pool.free, pool.limbo, pool.leased) for pool in engine.pools],
        prompt_tokens=totals["prompt"],
        cached_tokens=totals["cached"],
        generated_tokens=totals["generated"],
        computed_tokens=totals["computed"],
        accepted_tokens=dict(engine.accepted),
        rejected_tokens=dict(engine.guessed - engine.accepted),
        recomputed=dict(counts.recomputed),
        replayed=dict(counts.replayed),
        prefix_lookups=dict(counts.prefix_lookups),
        prefix_tokens=dict(counts.prefix_tokens),
        parked=len(engine.idle_memory),
        restored=engine.restores.restored,
        tiers=engine.idle_memory.used,
        tier_moves=dict(tiers.moved),
        tier_failures=dict(tiers.failures),
        snapshots={**engine.snapshots.counts, **counts.imports},
        saved=len(engine.idle_memory.saves),
        unsaved=len(engine.idle_memory.unsaved),
        saved_bytes=engine.idle_memory.saves.saved_bytes,
        held_tokens=engine.registry.held(),
        shared=shared,
    )
