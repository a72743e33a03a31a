"""Sessions that take over the history and the memory of others, as in a compaction."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tests.sim import internals
from tests.sim.mirror import Codes

if TYPE_CHECKING:
    from tests.sim.actions import RandomWorld


def replacing(world: RandomWorld) -> list[Callable[[], None]]:
    """Returns the operations."""
    return [partial(_compact, world), partial(_replace_any, world)]


def _compact(world: RandomWorld) -> None:
    """Replaces turns of a session by another turn: on a fork, which computes it, and usually what follows, before the
    session takes it over. Meanwhile anything may happen to both."""
    rng = world.rng
    sid = world._pick(lambda s: s.turn is None and len(s.records) > 0)
    if sid is None:
        return
    records, tokens = list(world.naive[sid].records), list(world.naive[sid].tokens)
    first = rng.randint(1, len(records))
    last = rng.randint(first, len(records))
    child = world.fork(sid, turn=first - 1)
    if child is None:
        return
    world.append(child, world._tokens()[:8])
    _wait(world, child, rng.choice((0, 2, 9)))
    for start, input_end, end in records[last:]:
        if world.is_open(child):
            world.adopt(child, tokens[start:input_end], tokens[input_end:end])
    if world.is_open(child) and rng.random() < 0.7:
        world.append(child, [])
        _wait(world, child, rng.choice((0, 2, 9, 30)))
    if world.is_open(child) and world.is_open(sid):
        replace_history(world, sid, child)
    if world.is_open(child) and rng.random() < 0.8:
        world.close(child, finish=rng.random() < 0.2)


def _wait(world: RandomWorld, sid: str, steps: int) -> None:
    """Steps until the session has no open turn, but not more often than this."""
    for _ in range(steps):
        if not world.is_open(sid) or world.session_of(sid).turn is None:
            return
        world.step()


def _replace_any(world: RandomWorld) -> None:
    """Lets any session take over any other, also in states in which this is refused."""
    idle = world.rng.random() < 0.8
    sid = world._pick(lambda s: s.turn is None or not idle)
    if sid is None:
        return
    tenant = world.own(sid)["tenant"]
    source = world.rng.choice([s.id for s in world.engine.registry if s.policy.tenant == tenant])
    replace_history(world, sid, source)


def replace_history(world: RandomWorld, sid: str, source_id: str) -> None:
    """Lets a session take over another of its tenant, and checks what it keeps."""
    naive, its = world.naive[sid], world.naive[source_id]
    session, source = world.session_of(sid), world.session_of(source_id)
    reasons: Codes = world._busy(naive) | ({"session_closed"} if its.closing else set())
    if session.scope != source.scope:
        reasons.add("invalid_request")
    if len(its.tokens) > naive.limit:
        reasons.add("context_exceeded")
    last = max(0, len(its.tokens) - 1)
    shorter = min(len(naive.tokens), len(its.tokens))
    kept = next((i for i in range(shorter) if naive.tokens[i] != its.tokens[i]), shorter)
    own, shared = session.memory.computed, source.memory.computed
    held = [p for p in internals.positions_kept(session) if p <= kept]
    held += [p for p in internals.positions_kept(source) if p <= last and not source.memory.arriving]
    before = list(source.history), source.version, source.memory.computed, source.turn
    if (
        world.attempt("replace", reasons, lambda: world.engine.sessions.replace(sid, source_id, **world.own(sid)), sid)
        is None
    ):
        return
    naive.replace(its)
    if session.history != naive.tokens:
        world.found("history", f"{sid} has another history than {source_id}, which it took over")
    if session is not source and before != (list(source.history), source.version, source.memory.computed, source.turn):
        world.found("history", f"{source_id} changed when {sid} took it over")
    least = min(last, max(min(own, kept), 0 if source.memory.arriving else shared))
    if not world._full_only:
        least = max((p for p in held if p <= last), default=0)
    if not least <= session.memory.computed <= last:
        world.found(
            "kept memory", f"{sid} took over {source_id}, and has {session.memory.computed}, not {least} tokens"
        )
