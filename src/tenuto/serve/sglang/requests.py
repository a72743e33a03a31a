"""SGLang-compatible requests that are open, by id, and the sessions that they continue."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from fastapi import Depends
from msgspec.structs import replace

from tenuto.base.checks import shown
from tenuto.base.errors import (
    AlreadyExists,
    InvalidRequest,
    LimitReached,
    NotFound,
    Overloaded,
    SessionBusy,
    SessionClosed,
)
from tenuto.base.turns import Transcript
from tenuto.base.wire.messages import GetSession, StartTurn
from tenuto.serve.sglang.branches import Branches, RequestPlace
from tenuto.serve.sglang.schemas import Item, OpenSessionRequest, SessionParams
from tenuto.serve.sglang.scores import OutputScores
from tenuto.serve.shared.edge import Edge, EdgeOf, Start, open_message
from tenuto.serve.shared.live_turn import LiveTurn
from tenuto.serve.shared.samples import Samples
from tenuto.serve.shared.schemas import ID_LENGTH, ID_PATTERN
from tenuto.serve.shared.settings import Tenant, new_session_id
from tenuto.serve.shared.tasks import all_of

ID = re.compile(ID_PATTERN)
MAX_SESSIONS = 100_000
"""Maximum number of sessions with branches, of all tenants together."""


@dataclass(slots=True, eq=False)
class Running:
    """One answer in progress. `sample`: its index among the answers to one prompt. `started`, `ended`: by
    `time.perf_counter`. `reply`: the turn's output in the answer so far. `turn`: set once the engine has accepted it.
    `prompt`: the turn that computed the prompt for several samples. `prompt_scores`: complete lists of the prompt's
    log-probabilities. `output_scores`: those of the output so far."""

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
    prompt_scores: dict[str, msgspec.Raw] | None = None
    output_scores: OutputScores = field(default_factory=OutputScores)
    samples: Samples | None = None
    branches: Branches | None = None
    place: RequestPlace | None = None

    @property
    def accepted(self) -> LiveTurn:
        """The turn, once the engine has accepted it."""
        assert self.turn is not None
        return self.turn


class Requests:
    """All open requests by tenant and id, and all sessions with branches.

    Invariant: a request is in `_running` until its turn has ended, or has failed to start.
    """

    def __init__(self, edge: Edge) -> None:
        self.probe: asyncio.Task[bool] | None = None  # the last check of `/health_generate`
        self._edge = edge
        self._running: dict[tuple[str, str], Running] = {}
        self._by_turn: dict[str, Running] = {}  # by turn id
        self._sessions: dict[tuple[str, str], Branches] = {}
        edge.turns.on_end.append(self._turn_ended)

    # -- sessions

    async def open(self, tenant: Tenant, body: OpenSessionRequest) -> str:
        """Opens a session and returns its id. Raises `InvalidRequest` if the id is in use."""
        name = body.session_id or new_session_id()
        taken = InvalidRequest(f"session {name!r} is open already")
        if (tenant.name, name) in self._sessions:
            raise taken
        timeout = self._edge.settings.ttl(body.timeout, named=body.session_id is not None)
        if not body.streaming:
            with suppress(NotFound):
                await self._edge.link.call(GetSession(tenant=tenant.name, session=name))
                raise taken
            self._add_branches(tenant, name, timeout)
            return name
        metadata = (("capacity_of_str_len", str(body.capacity_of_str_len)),)
        opening = open_message(tenant, name, ttl=timeout, adapter=body.lora_path, metadata=metadata)
        try:
            await self._edge.link.call(opening)
        except AlreadyExists:
            raise taken from None
        return name

    def _add_branches(self, tenant: Tenant, name: str, timeout: float | None) -> None:
        key = tenant.name, name
        if key in self._sessions:
            raise InvalidRequest(f"session {name!r} is open already")
        if len(self._sessions) >= MAX_SESSIONS:
            raise Overloaded(f"{MAX_SESSIONS} sessions are open, the most allowed; close some first")
        limit, count = tenant.limits.sessions, sum(owner == tenant.name for owner, _ in self._sessions)
        if limit is not None and count >= limit:
            raise LimitReached(f"{count} sessions are open; allowed: {limit}; close some first")
        self._sessions[key] = Branches(self._edge, tenant, name, timeout, lambda: self._sessions.pop(key, None))

    async def close(self, tenant: Tenant, name: str) -> None:
        """Closes a session if it exists. Its open turn may end first."""
        branches = self._sessions.pop((tenant.name, name), None)
        if branches is not None:
            await branches.close()
            return
        with suppress(NotFound, SessionClosed):
            await self._edge.turns.close_session((tenant.name, name), finish=True)

    # -- requests

    async def start(self, tenant: Tenant, items: Sequence[Item]) -> list[Running]:
        """Starts the turns of a request and returns when the engine has accepted all. If one cannot start, the others
        are rolled back."""
        with self._edge.places(tenant, sum(item.n for item in items)) as start:
            groups = [_answers(tenant, item) for item in items]
            begun = [running for group in groups for running in group]
            try:
                for running in begun:
                    self._enter(running)
                await all_of(self._begin(tenant, group, start) for group in groups)
            except BaseException:
                self.leave(begun)
                raise
        return begun

    def leave(self, begun: Iterable[Running]) -> None:
        """Ends a client's wait for its requests. Open turns are rolled back unless others read them."""
        for running in begun:
            if running.turn is None:
                self._end(running)
            else:
                self._edge.turns.abandon(running.turn)
            if running.samples is not None:
                running.samples.close()

    async def abort(self, tenant: Tenant, rid: str) -> None:
        """Ends the requests with this id, if any."""
        found = [
            running
            for (owner, _), running in self._running.items()
            if owner == tenant.name and rid in (running.rid, running.item.family)
        ]
        for running in found:
            running.aborted = True
            if running.turn is not None:
                await self._edge.turns.abort_quietly(running.turn)

    async def abort_all(self, tenant: Tenant) -> None:
        """Ends all turns of a tenant, from all interfaces."""
        for running in self._running.values():
            running.aborted |= running.tenant == tenant.name
        await all_of(self._edge.turns.abort_quietly(turn) for turn in self._edge.turns.open_turns(tenant.name))

    def _enter(self, running: Running) -> None:
        key = running.tenant, running.rid
        if key in self._running:
            raise InvalidRequest(f"request id {running.rid!r} is in use; give another")
        self._running[key] = running

    async def _begin(self, tenant: Tenant, group: list[Running], start: Start) -> None:
        """Starts the answers to one prompt."""
        item = group[0].item
        request = StartTurn(
            kind="turn",
            tenant=tenant.name,
            input=item.input,
            params=item.params,
            keep_bos=False,
            echo=item.params.scores_input,
            limits=tenant.limits,
            markup=True,
            adapter=item.adapter,
        )
        if item.session is not None and item.session.id is not None:
            await self._begin_in_session(tenant, group[0], request, item.session, item.session.id, start)
        elif item.n == 1:
            self._began(group[0], await start(request))
        else:
            samples = Samples(self._edge, tenant, start)
            for running in group:
                running.samples = samples
            await samples.start(request, item.n)
            for running, turn in zip(group, samples.turns, strict=True):
                running.prompt = samples.prompt
                self._began(running, turn)

    async def _begin_in_session(
        self, tenant: Tenant, running: Running, request: StartTurn, params: SessionParams, name: str, start: Start
    ) -> None:
        branches = self._sessions.get((tenant.name, name))
        if branches is None:
            try:
                self._began(running, await start(_appending(request, params, name)))
            except (NotFound, SessionClosed):
                raise InvalidRequest(f"there is no session {name!r}; open it first") from None
            except SessionBusy:
                raise self._busy(tenant, running, name) from None
            return
        running.branches = branches
        running.place = place = await branches.place(running.rid, params, request.adapter)
        if 0 <= running.item.output.logprob_start < place.session.tokens:
            raise InvalidRequest(
                f"logprob_start_len is {running.item.output.logprob_start}; allowed here: -1, or at least "
                f"{place.session.tokens}, the number of tokens before the input"
            )
        try:
            turn = await start(replace(request, session=place.session.id))
        except SessionBusy:
            raise self._busy(tenant, running, name) from None
        branches.accepted(place, turn)
        self._began(running, turn)

    def _busy(self, tenant: Tenant, refused: Running, name: str) -> SessionBusy:
        """Returns an error that names the request a session is busy with, and a way out for clients of `/generate`."""
        others = [
            running.rid
            for (owner, _), running in self._running.items()
            if owner == tenant.name
            and running is not refused
            and running.item.session is not None
            and running.item.session.id == name
        ]
        if not others:
            return SessionBusy(f"session {name} has an open turn of another interface; allowed: wait for its end")
        advice = "wait for its end, or end it by /abort_request with this rid"
        return SessionBusy(f"session {name} answers request {others[0]!r}; allowed: {advice}")

    def _began(self, running: Running, turn: LiveTurn) -> None:
        running.turn = turn
        if turn.ended:
            self._end(running)
            return
        self._by_turn[turn.id] = running
        if running.aborted:
            self._edge.spawn(self._edge.turns.abort_quietly(turn))

    def _turn_ended(self, turn: LiveTurn) -> None:
        running = self._by_turn.pop(turn.id, None)
        if running is not None:
            self._end(running)

    def _end(self, running: Running) -> None:
        """Frees the request's id, and lets its session be continued after it."""
        running.ended = time.perf_counter()
        key = running.tenant, running.rid
        if self._running.get(key) is running:
            del self._running[key]
        if running.branches is not None and running.place is not None:
            running.branches.leave(running.place)


def _answers(tenant: Tenant, item: Item) -> list[Running]:
    if item.n == 1:
        return [Running(tenant.name, item.rid, item)]
    return [Running(tenant.name, f"{item.rid}_{i}", item, sample=i) for i in range(item.n)]


def _appending(request: StartTurn, params: SessionParams, name: str) -> StartTurn:
    """Returns the request for a streaming session, which allows only appending. Raises `InvalidRequest` if the request
    asks for more."""
    if len(name) > ID_LENGTH or not ID.fullmatch(name):
        raise InvalidRequest(f"there is no session {shown(name)}; open it first")
    asked = {"replace": params.replace, "offset": params.offset, "drop_previous_output": params.drop_previous_output}
    for field_name, value in asked.items():
        if value:
            raise InvalidRequest(f"{field_name} is {value}; a streaming session allows only appending; leave it out")
    return replace(request, session=name, params=request.params.output_alone, echo=False)


async def _requests(edge: EdgeOf) -> Requests:
    return edge.part(Requests, edge)


RequestsOf = Annotated[Requests, Depends(_requests)]
