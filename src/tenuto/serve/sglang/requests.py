"""Requests in SGLang's manner that are under way, and the sessions they name."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from msgspec.structs import replace

from tenuto.base.checks import shown
from tenuto.base.errors import (
    AlreadyExists,
    InvalidRequest,
    LimitReached,
    NotFound,
    Overloaded,
    SessionClosed,
    TenutoError,
)
from tenuto.base.messages import GetSession, OpenSession, StartTurn
from tenuto.base.options import Policy
from tenuto.base.turns import Transcript
from tenuto.serve.native.schemas import ID_LENGTH, ID_PATTERN
from tenuto.serve.sglang.branches import Branches, Place
from tenuto.serve.sglang.schemas import Item, NewSession, SessionParams
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.samples import Samples, all_of
from tenuto.serve.shared.settings import Tenant, new_session_id
from tenuto.serve.shared.turns import LiveTurn

ID = re.compile(ID_PATTERN)
MOST_SESSIONS = 100_000
"""With branches, of all tenants."""


@dataclass(slots=True, eq=False)
class Running:
    """One answer on its way. `turn`: once it was accepted. `sample`: which of the answers to one prompt; `prompt`: the
    turn that has computed the prompt for several. `reply`: what of the turn has been answered. `ended`: when, by the
    clock of `started`."""

    tenant: str
    rid: str
    item: Item
    sample: int = 0
    started: float = field(default_factory=time.perf_counter)
    ended: float | None = None
    aborted: bool = False
    reply: Transcript = field(default_factory=Transcript)
    turn: LiveTurn | None = None
    prompt: LiveTurn | None = None
    samples: Samples | None = None
    branches: Branches | None = None
    place: Place | None = None


class Requests:
    """All requests under way by tenant and id, and sessions with branches.

    Invariant: an entry of `running` leaves it when its turn ends, or did not start.
    """

    def __init__(self, edge: Edge) -> None:
        self.probe: asyncio.Task[bool] | None = None  # the last of whether the engine generates
        self._edge = edge
        self._running: dict[tuple[str, str], Running] = {}
        self._by_turn: dict[str, Running] = {}  # by turn id
        self._sessions: dict[tuple[str, str], Branches] = {}
        edge.desk.on_end.append(self._turn_ended)

    # -- sessions

    async def open(self, tenant: Tenant, body: NewSession) -> str:
        """The id of a new session. Raises `InvalidRequest` if it is taken."""
        name = body.session_id or new_session_id()
        key = tenant.name, name
        taken = InvalidRequest(f"session {name!r} is open already")
        if key in self._sessions:
            raise taken
        timeout = self._edge.settings.ttl(body.timeout, named=body.session_id is not None)
        if not body.streaming:
            with suppress(NotFound):
                await self._edge.link.call(GetSession(tenant=tenant.name, session=name))
                raise taken
            self._add_branches(tenant, name, timeout)
            return name
        metadata = (("capacity_of_str_len", str(body.capacity_of_str_len)),)
        opening = OpenSession(
            session=name,
            policy=Policy(ttl=timeout, tenant=tenant.name, metadata=metadata),
            limits=tenant.limits,
        )
        try:
            await self._edge.link.call(opening)
        except AlreadyExists:
            raise taken from None
        return name

    def _add_branches(self, tenant: Tenant, name: str, timeout: float | None) -> None:
        key = tenant.name, name
        if key in self._sessions:
            raise InvalidRequest(f"session {name!r} is open already")
        if len(self._sessions) >= MOST_SESSIONS:
            raise Overloaded(f"{MOST_SESSIONS} sessions are open, the most allowed; close some first")
        most, own = tenant.limits.sessions, sum(owner == tenant.name for owner, _ in self._sessions)
        if most is not None and own >= most:
            raise LimitReached(f"{own} sessions are open; allowed: {most}; close some first")
        self._sessions[key] = Branches(self._edge, tenant, name, timeout, lambda: self._forget(key))

    def _forget(self, key: tuple[str, str]) -> None:
        self._sessions.pop(key, None)

    async def close(self, tenant: Tenant, name: str) -> None:
        """Close a session, if there is one; a turn that is open may end first."""
        branches = self._sessions.pop((tenant.name, name), None)
        if branches is not None:
            await branches.close()
            return
        with suppress(NotFound, SessionClosed):
            await self._edge.desk.close_session((tenant.name, name), finish=True)

    # -- requests

    async def start(self, tenant: Tenant, items: Sequence[Item]) -> list[Running]:
        """Start the turns of a request; done when the engine has accepted all. If some cannot start, none is left."""
        groups = [_answers(tenant, item) for item in items]
        begun = [running for group in groups for running in group]
        try:
            for running in begun:
                self._enter(running)
            await all_of(self._begin(tenant, group) for group in groups)
        except BaseException:
            self.leave(begun)
            raise
        return begun

    def leave(self, begun: Iterable[Running]) -> None:
        """Nobody waits for these any more: those that have not ended are aborted."""
        for running in begun:
            if running.turn is None:
                self._end(running)
            else:
                self._edge.desk.abandon(running.turn)
            if running.samples is not None:
                running.samples.close()

    async def abort(self, tenant: Tenant, rid: str) -> None:
        """End requests with this id. What does not exist is ended already."""
        found = [
            running
            for (owner, _), running in self._running.items()
            if owner == tenant.name and rid in (running.rid, running.item.family)
        ]
        for running in found:
            running.aborted = True
            if running.turn is not None:
                await self._abort(running.turn)

    async def abort_all(self, tenant: Tenant) -> None:
        """End all turns of a tenant, whatever interface has started them."""
        for running in self._running.values():
            running.aborted |= running.tenant == tenant.name
        await all_of(self._abort(turn) for turn in self._edge.desk.open_turns(tenant.name))

    def _enter(self, running: Running) -> None:
        key = running.tenant, running.rid
        if key in self._running:
            raise InvalidRequest(f"request id {running.rid!r} is in use; give another")
        self._running[key] = running

    async def _begin(self, tenant: Tenant, group: list[Running]) -> None:
        """Start the answers to one prompt."""
        item, edge = group[0].item, self._edge
        request = StartTurn(
            kind="turn",
            tenant=tenant.name,
            input=item.input,
            params=item.params,
            keep_bos=False,
            echo=item.params.input_logprobs is not None,
            limits=tenant.limits,
            markup=True,
        )
        if item.session is not None and item.session.id is not None:
            await self._begin_in_session(tenant, group[0], request, item.session, item.session.id)
        elif item.n == 1:
            self._began(group[0], await edge.start(tenant, request))
        else:
            taken = Samples(edge, tenant)
            for running in group:
                running.samples = taken
            await taken.start(request, item.n)
            for running, turn in zip(group, taken.turns, strict=True):
                running.prompt = taken.prompt
                self._began(running, turn)

    async def _begin_in_session(
        self, tenant: Tenant, running: Running, request: StartTurn, params: SessionParams, name: str
    ) -> None:
        branches = self._sessions.get((tenant.name, name))
        if branches is None:
            request = _appending(request, params, name)
            request = replace(request, session=name)
            try:
                self._began(running, await self._edge.start(tenant, request))
            except (NotFound, SessionClosed):
                raise InvalidRequest(f"there is no session {name!r}; open it first, or again") from None
            return
        running.branches = branches
        running.place = place = await branches.place(running.rid, params)
        if 0 <= running.item.look.start < place.line.tokens:
            raise InvalidRequest(
                f"logprob_start_len is {running.item.look.start}; allowed where a request is continued: "
                f"{place.line.tokens}, where its tokens end, or more, or -1"
            )
        turn = await self._edge.start(tenant, replace(request, session=place.line.id))
        branches.accepted(place, turn)
        self._began(running, turn)

    def _began(self, running: Running, turn: LiveTurn) -> None:
        running.turn = turn
        if turn.ended:
            self._end(running)
            return
        self._by_turn[turn.id] = running
        if running.aborted:
            self._edge.spawn(self._abort(turn))

    def _turn_ended(self, turn: LiveTurn) -> None:
        running = self._by_turn.pop(turn.id, None)
        if running is not None:
            self._end(running)

    def _end(self, running: Running) -> None:
        """The id is free, and what the request has added to its session can be continued."""
        running.ended = time.perf_counter()
        key = running.tenant, running.rid
        if self._running.get(key) is running:
            del self._running[key]
        if running.branches is not None and running.place is not None:
            running.branches.leave(running.place)

    async def _abort(self, turn: LiveTurn) -> None:
        with suppress(TenutoError):  # it has ended meanwhile, with its session or the engine
            await self._edge.desk.abort(turn)


def _answers(tenant: Tenant, item: Item) -> list[Running]:
    if item.n == 1:
        return [Running(tenant.name, item.rid, item)]
    return [Running(tenant.name, f"{item.rid}_{i}", item, sample=i) for i in range(item.n)]


def _appending(request: StartTurn, params: SessionParams, name: str) -> StartTurn:
    """A request to a session that is only appended to. Raises `InvalidRequest` if it asks for something else."""
    if len(name) > ID_LENGTH or not ID.fullmatch(name):
        raise InvalidRequest(f"there is no session {shown(name)}; open it first")
    asked = {"replace": params.replace, "offset": params.offset, "drop_previous_output": params.drop_previous_output}
    for field_name, value in asked.items():
        if value:
            raise InvalidRequest(f"{field_name} is {value}; a streaming session is only appended to, leave it out")
    return replace(request, params=dataclasses.replace(request.params, input_logprobs=None), echo=False)
