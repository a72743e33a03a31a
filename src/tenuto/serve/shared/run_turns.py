"""Turns of runs: in the session that has the beginning of a request's messages, in a fork of it, or in a new one."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from tenuto.base.errors import (
    Draining,
    EngineStopped,
    NotFound,
    SessionClosed,
    TenutoError,
    VersionMismatch,
)
from tenuto.base.tools.answers import Reading
from tenuto.base.turns import Message, TurnResult
from tenuto.base.wire.messages import Fork, StartTurn
from tenuto.serve.shared.answer_headers import CACHED, RECOMPUTED, SESSION, answer_headers
from tenuto.serve.shared.edge import Edge, open_message
from tenuto.serve.shared.live_turn import LiveTurn
from tenuto.serve.shared.runs import UNREPEATABLE, Branch, Place, Runs, after, chain_of
from tenuto.serve.shared.settings import Tenant

MAX_SESSIONS = 256
"""Maximum number of sessions of a tenant's runs."""
SHARE = 4
"""Runs take at most one in so many of the sessions and tokens that a tenant may have."""
ATTEMPTS = 4
"""Maximum number of places tried, since sessions may have closed or changed meanwhile."""


@dataclass(frozen=True, slots=True)
class Named:
    """The session of a request that others may name later: its id and metadata. It stays when the run ends."""

    session: str
    metadata: tuple[tuple[str, str], ...] = ()


async def start_in_run(
    edge: Edge,
    tenant: Tenant,
    names: Sequence[bytes],
    start: StartTurn,
    reading: Reading,
    *,
    named: Named | None = None,
    continues: bool = False,
) -> LiveTurn | None:
    """Starts a turn in the run of these `names` and returns it once the engine has accepted it. Returns `None`, having
    changed nothing, if that is not possible: then the caller starts it without a run, so that no request is refused
    because of one. `start`: with the whole conversation as messages. `reading`: how the answer is parsed."""
    if not names or not edge.settings.find_runs or not start.input:
        return None
    messages = cast("Sequence[Message]", start.input)
    chain = chain_of(start, messages, "kept" if named is not None else "own")
    runs = edge.part(Runs, tenant=tenant.name)
    reason = ""
    for _ in range(ATTEMPTS):
        place = runs.find(names, chain)
        branch = _taken(runs, names[0], place, chain, named)
        try:
            if branch is not place.branch:
                await _open(edge, tenant, branch, place, start, named)
            given = {"session": branch.session, "input": messages[place.messages :], "version": branch.version}
            going = msgspec.structs.replace(start, **given)
            turn = await edge.start(tenant, going, queue=True, continues=continues)
        except BaseException as error:
            lost = isinstance(error, NotFound | SessionClosed | VersionMismatch)
            _give_back(runs, branch, place, lost=lost)
            if branch is not place.branch:
                closing = edge.turns.close_if_open((tenant.name, branch.session))
                if not isinstance(error, TenutoError):
                    edge.spawn(closing)
                    raise
                await closing  # its name may be used again
            if lost:
                reason = "the session was closed or changed"
                continue
            if not isinstance(error, TenutoError) or isinstance(error, EngineStopped | Draining):
                raise
            return None
        _tell(turn, branch, reason or place.reason)
        _follow(edge, tenant, runs, branch, turn, chain, reading, frozenset(start.params.stop_ids))
        _make_room(edge, tenant, runs, branch.run)
        return turn
    return None


def _taken(runs: Runs, run: bytes, place: Place, chain: list[bytes], named: Named | None) -> Branch:
    """Returns the branch that goes on from `place`, marked as busy: the one there, or a new one."""
    if place.branch is not None and place.at_end and named is None:
        branch = place.branch
        branch.busy = branch.continued = True
    else:
        session = named.session if named is not None else f"run-{secrets.token_hex(16)}"
        ends = place.branch.ends[: place.turns] if place.branch is not None else []
        branch = Branch(run, session, chain[: place.messages + 1], ends, owned=named is None)
    if place.branch is not None:
        place.branch.continued = True
    runs.add(branch)
    return branch


async def _open(
    edge: Edge, tenant: Tenant, branch: Branch, place: Place, start: StartTurn, named: Named | None
) -> None:
    """Opens the session of a new branch. Raises the engine's refusals."""
    metadata = named.metadata if named is not None else ()
    if place.branch is not None:
        fork = Fork(
            tenant=tenant.name,
            session=place.branch.session,
            child=branch.session,
            turn=place.turns,
            metadata=metadata,
            version=None if place.branch.busy else place.branch.version,
            limits=tenant.limits,
        )
        branch.version = (await edge.link.call(fork)).version
        return
    ttl = edge.settings.ttl(None, named=named is not None)
    opening = open_message(
        tenant, branch.session, ttl=ttl, adapter=start.adapter, hidden=named is None, metadata=metadata
    )
    await edge.link.call(opening)


def _give_back(runs: Runs, branch: Branch, place: Place, *, lost: bool) -> None:
    """Handles a turn that has not started. `lost`: the session of the place is not what the run took it for."""
    branch.busy = False
    if branch is not place.branch:
        runs.forget(branch)
    if lost and place.branch is not None:
        runs.forget(place.branch)


def _tell(turn: LiveTurn, branch: Branch, reason: str) -> None:
    headers, ticket = answer_headers(), turn.ticket
    headers[SESSION] = branch.session
    headers[CACHED] = str(ticket.history if ticket is not None else 0)
    if reason:
        headers[RECOMPUTED] = reason


def _follow(
    edge: Edge,
    tenant: Tenant,
    runs: Runs,
    branch: Branch,
    turn: LiveTurn,
    chain: list[bytes],
    reading: Reading,
    asked: frozenset[int],
) -> None:
    """Keeps the branch up to date at the end of its turn. `asked`: the stop tokens that the client asked for."""
    headers, ends = answer_headers(), frozenset(edge.model.eos_ids)

    def ended() -> None:
        if not turn.ended or not branch.busy:
            return
        branch.busy = False
        result = turn.result
        if result is None or not result.committed:
            if not branch.ends:
                runs.forget(branch)
                if branch.owned:
                    edge.spawn(edge.turns.close_if_open((tenant.name, branch.session)))
            return
        said = reading.reader(turn.id).read(turn.reply().text, ended=True)
        answer = Message("assistant", said.text, tuple(said.calls))
        branch.chain = [*chain, after(chain[-1], answer) if _is_whole(turn, result, asked, ends) else UNREPEATABLE]
        branch.ends.append(len(chain))
        branch.version = result.version
        branch.tokens = result.usage.prompt + result.usage.generated
        headers[CACHED] = str(result.usage.cached)  # too late for a stream, like the next
        if result.usage.recomputed:
            headers.setdefault(RECOMPUTED, ", ".join(sorted(result.usage.recomputed)))

    turn.listeners.append(ended)
    ended()


def _is_whole(turn: LiveTurn, result: TurnResult, asked: frozenset[int], ends: frozenset[int]) -> bool:
    """Whether the answer of a committed turn has the text of all its tokens. A stop is cut from the text, with the rest
    of its last token, but not from the history, and a stop token that the client `asked` for may have no text. The
    model's own `ends` have none: the template writes the last one, but none that was ignored before."""
    if not ends.isdisjoint(turn.reply().tokens[:-1]):
        return False
    if isinstance(result.stop, str):
        return turn.delivered == result.kept
    return result.stop not in asked - ends


def _make_room(edge: Edge, tenant: Tenant, runs: Runs, run: bytes) -> None:
    """Closes sessions that are too many."""
    limits, most = tenant.limits, min(MAX_SESSIONS, max(1, edge.model.config.max_sessions // SHARE))
    if limits.sessions is not None:
        most = min(most, limits.sessions // SHARE)
    tokens = limits.tokens // SHARE if limits.tokens is not None else None
    for branch in runs.excess(run, most, tokens):
        if branch.owned:
            edge.spawn(edge.turns.close_if_open((tenant.name, branch.session)))
