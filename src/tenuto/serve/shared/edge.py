"""The server's state, shared by all interfaces: callers and their rights, the model, and the open turns."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers

from tenuto.base.errors import (
    ConfigError,
    Disconnected,
    Draining,
    EngineStopped,
    Forbidden,
    LimitReached,
    Misdirected,
    ModelNotFound,
    NotAcknowledged,
    Overloaded,
    TenutoError,
    Unauthorized,
)
from tenuto.base.options import Policy, SessionAdapter
from tenuto.base.views import Listing, ModelView, SessionKey
from tenuto.base.wire.link import Link
from tenuto.base.wire.messages import Expect, ListSessions, OpenSession, StartTurn
from tenuto.base.wire.request import Request as Message
from tenuto.serve.shared.idempotency import RequestKey
from tenuto.serve.shared.live_turn import LiveTurn
from tenuto.serve.shared.local_objects import LocalObjects
from tenuto.serve.shared.settings import EVERYONE, ServeSettings, Tenant
from tenuto.serve.shared.tasks import Background
from tenuto.serve.shared.tenant_objects import Ask, TenantObjects
from tenuto.serve.shared.turns import Turns

T = TypeVar("T")

ABORTING_SECONDS = 5.0
"""Time the engine has, at shutdown, to abort the remaining turns."""
DRAIN_CHECK_SECONDS = 0.02
SHUTTING_DOWN = "the server is shutting down; try again later"
ENDING = "this replica is ending, and another one takes the session over; ask again"
Start = Callable[[StartTurn], Awaitable[LiveTurn]]
"""Starts a turn and returns it when the engine has accepted it."""
DEFAULT_MODEL = "default"
"""A name that always means the served model."""


async def _never(_: SessionKey) -> bool:
    """Whether another replica owns a session. This server has no others."""
    return False


async def _stays(_: SessionKey) -> None:
    """Brings a session here, where it already is."""


async def _erases_nothing(_: SessionKey) -> list[str]:
    """Has other replicas overwrite what they have of an erased session. This server has no others."""
    return []


async def _nobody(_: str, __: str) -> bytes | None:
    """Asks another replica about a response. This server has no others."""
    return None


async def _nothing(_: ListSessions) -> list[Listing]:
    """Returns the sessions of other replicas. This server has no others."""
    return []


class ServedWeights:
    """The weights in use: a `version` for clients, and their `path` if they are not those the server began with."""

    def __init__(self) -> None:
        self.version = "default"
        self.path: str | None = None

    def updated(self, path: str | None, version: str) -> None:
        """Records a switch to the weights at `path`, or to tensors in place of some of them."""
        self.path, self.version = path or self.path, version


class Edge:
    """The server's state: its link to the engine, and its turns."""

    def __init__(self, link: Link, model: ModelView, settings: ServeSettings) -> None:
        self.link = link
        self.model = model
        self.settings = settings
        self.adapters = {adapter.name: adapter for adapter in model.adapters}  # those loaded, by name
        if taken := sorted(self.adapters.keys() & {*self.served_names, DEFAULT_MODEL}):
            raise ConfigError(f"an adapter is named {taken[0]!r}, which is a name of the model; allowed: other names")
        self.turns = Turns(link)
        self.weights = ServedWeights()
        self.started = time.time()  # seconds since the epoch
        self.in_fleet = False  # set by its fleet, like the next
        self.is_elsewhere: Callable[[SessionKey], Awaitable[bool]] = _never
        self.listed_elsewhere: Callable[[ListSessions], Awaitable[list[Listing]]] = _nothing
        self.erase_elsewhere: Callable[[SessionKey], Awaitable[list[str]]] = _erases_nothing
        self.elsewhere_knows: Callable[[str, str], Awaitable[bytes | None]] = _nobody
        self.bring: Callable[[SessionKey], Awaitable[None]] = _stays
        self.knows: Callable[[str, str], Awaitable[bytes]]  # see `Fate`; set by the application
        self.ask_objects: Ask = LocalObjects().ask
        self.replica = 0  # its number
        # By kind of object: continues the work on an abandoned one.
        self.resumes: dict[str, Callable[[str, str], Awaitable[None]]] = {}
        self.draining = False  # whether new turns are refused; set once, by `drain`
        self.leaving = False  # whether new sessions go to other replicas; set once, by its fleet
        self.hurried = False  # whether `drain` stops waiting for turns
        self.body_bytes = 0  # bytes of all open requests' bodies; written by their readers, like the next
        self.spooled_bytes = 0  # bytes of bodies that are kept in files
        self._reserved: Counter[str] = Counter()  # places of turns that requests are about to start, by tenant
        self._background = Background()
        self.spawn = self._background.spawn
        self._parts: dict[tuple[object, str | None], Any] = {}  # objects of the interfaces
        self.turns.on_end.append(self._expect_tools)

    @property
    def served_name(self) -> str:
        """Name of the model in answers."""
        return self.served_names[0]

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names that clients may give the model, at least one."""
        return self.settings.served_model_name or (self.model.model,)

    @property
    def fingerprint(self) -> str:
        """A name that changes with everything besides the request that determines answers: the server's version, the
        model, its weights and the code that computes."""
        facts = (version("tenuto"), self.model.path, self.model.compute, self.weights.version)
        return f"fp_{sha256(repr(facts).encode()).hexdigest()[:12]}"

    def adapter(self, model: str | None) -> str | None:
        """Returns the adapter that a request for `model` asks for, as in `StartTurn.adapter`. Adapters are asked for by
        their names. Raises `ModelNotFound` unless `model` is `None`, an adapter, a name of the served model, or any
        name is accepted."""
        if model in (None, DEFAULT_MODEL):
            return None
        if model in self.adapters:
            return model
        if model in self.served_names:
            return ""
        if self.settings.any_model_name:
            return None
        names = ", ".join(map(repr, (*self.served_names, *self.adapters)))
        raise ModelNotFound(
            f"there is no model {str(model)[:200]!r}; allowed: {names}, or {DEFAULT_MODEL!r} for the first",
            param="model",
        )

    def name_of(self, adapter: str | None) -> str:
        """Returns the name that answers give to an adapter, or without one to the model."""
        return adapter or self.served_name

    def tenant(self, headers: Headers) -> Tenant:
        """Returns the tenant whose key is in the headers. Raises `Unauthorized`."""
        keys = self.settings.tenants
        if not keys:
            return EVERYONE
        scheme, _, key = headers.get("authorization", "").partition(" ")
        tenant = keys.tenant(key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key"))
        if tenant is None:
            raise Unauthorized("no valid API key; give one as Authorization: Bearer KEY")
        return tenant

    def _expect_tools(self, turn: LiveTurn) -> None:
        """Tells the engine which tools a turn has called, so that it expects the session's next turn when these have
        usually ended."""
        reading, key = turn.reading, turn.request.key
        if reading is None or not reading.names or key is None or turn.result is None or not turn.result.committed:
            return
        said = turn.said()
        if said is not None and said.calls:
            calls, (tenant, session) = tuple(call.name for call in said.calls), key
            expect = Expect(tenant=tenant, session=session, calls=calls, version=turn.result.version)
            self.spawn(self._tell(expect))

    async def _tell(self, request: Message[Any]) -> None:
        """Sends a request that may be refused: its session may have ended or gone on meanwhile."""
        with suppress(TenutoError):
            await self.link.call(request)

    def part(self, kind: Callable[..., T], *arguments: Any, tenant: str | None = None) -> T:
        """Returns the object of this kind that the whole server shares, or that of one tenant. The first call makes it,
        from `arguments`; it ends with the process."""
        if (kind, tenant) not in self._parts:
            self._parts[kind, tenant] = kind(*arguments)
        part: T = self._parts[kind, tenant]
        return part

    def objects(self, tenant: Tenant, kind: str) -> TenantObjects:
        """Returns a tenant's objects of one kind. In a fleet, all replicas share them."""
        return TenantObjects(self.ask_objects, tenant.name, kind, self.replica)

    def may_go_on_elsewhere(self, turn: LiveTurn) -> bool:
        """Whether a turn that is lost here may go on, or be committed, at another replica."""
        unknown = turn.elsewhere is not None or isinstance(turn.error, NotAcknowledged | EngineStopped | Disconnected)
        return self.in_fleet and turn.result is None and unknown

    @property
    def healthy(self) -> bool:
        """Whether requests are accepted."""
        return not (self.draining or self.leaving) and self.link.stopped is None

    def require_engine(self) -> None:
        """Raises `EngineStopped` if the engine has stopped."""
        if self.link.stopped is not None:
            raise self.link.stopped.error()

    async def start(
        self,
        tenant: Tenant,
        request: StartTurn,
        *,
        queue: bool = False,
        continues: bool = False,
        request_key: RequestKey | None = None,
        take_place: Callable[[], None] | None = None,
    ) -> LiveTurn:
        """Calls `Turns.start` within the limits of the tenant and the server. `take_place`: see `places`. Raises
        `LimitReached`, `Overloaded`, `Draining`, `EngineStopped`."""
        self.require_engine()
        if self.draining:
            raise self._ending(request)
        return await self.turns.start(
            msgspec.structs.replace(request, resumable=self.in_fleet and continues and request.session is not None),
            queue=queue,
            continues=continues,
            request_key=request_key,
            check=take_place or (lambda: self._require_places(tenant, 1)),
        )

    def _ending(self, request: StartTurn) -> TenutoError:
        """Returns the refusal of a turn that comes while the server ends. Another replica takes its session over, if it
        is in a fleet with others."""
        elsewhere = self.leaving and request.session is not None
        return Misdirected(ENDING) if elsewhere else Draining(SHUTTING_DOWN)

    @contextmanager
    def places(self, tenant: Tenant, turns: int) -> Iterator[Start]:
        """Reserves places for the turns of one request, so that it does not start some of a thousand turns only to roll
        them back. The given function calls `start` and uses up a place; unused ones are given back. Raises
        `LimitReached` or `Overloaded`."""
        self._require_places(tenant, turns)
        self._reserved[tenant.name] += turns
        left = turns

        def take_place() -> None:
            nonlocal left
            if left == 0:
                self._require_places(tenant, 1)
            else:
                left -= 1
                self._reserved[tenant.name] -= 1

        try:
            yield partial(self.start, tenant, take_place=take_place)
        finally:
            self._reserved[tenant.name] -= left

    def _require_places(self, tenant: Tenant, turns: int) -> None:
        """Raises `LimitReached` or `Overloaded` unless so many more turns may be open."""
        limit, most = tenant.limits.turns, self.settings.max_turns
        count = self.turns_of(tenant.name) + self.turns.queues.elsewhere(tenant.name).turns
        if limit is not None and count + turns > limit:
            raise LimitReached(f"{count} turns are open, and {turns} asked for; allowed: {limit}; wait for one to end")
        count = self.turns.open.total() + self._reserved.total()
        if count + turns > most:
            raise Overloaded(f"{count} turns are open, and {turns} asked for; allowed: {most}; try again later")

    def turns_of(self, tenant: str) -> int:
        """Returns how many turns a tenant has here, without those that other replicas count."""
        return self.turns.open[tenant] - self.turns.spared.counts[tenant] + self._reserved[tenant]

    async def listed(self, request: ListSessions) -> Listing:
        """Returns sessions that are in this server's memory."""
        page = await self.link.call(request)
        of = {each.session_id: self.turns.queues.open_turn((request.tenant, each.session_id)) for each in page.sessions}
        turns = {session: turn.id for session, turn in of.items() if turn is not None and turn.id is not None}
        return Listing(sessions=page.sessions, turns=turns, more=page.more)

    async def drain(self, seconds: float) -> None:
        """Refuses new turns, gives open ones `seconds` to end, then aborts the rest."""
        self.draining = True
        refusal = Draining(SHUTTING_DOWN)
        self.turns.queues.refuse_all(Misdirected(ENDING) if self.leaving else refusal)
        deadline = time.monotonic() + seconds
        while (
            self.turns.open_turns() and not self.hurried and time.monotonic() < deadline and self.link.stopped is None
        ):
            await asyncio.sleep(DRAIN_CHECK_SECONDS)
        # others go on elsewhere
        ending = [turn for turn in self.turns.open_turns() if not (turn.request.resumable or turn.elsewhere)]
        aborting = [asyncio.ensure_future(self.turns.abort(turn, refusal=refusal)) for turn in ending]
        with suppress(TimeoutError):  # an engine that hangs is killed later
            async with asyncio.timeout(ABORTING_SECONDS):
                await asyncio.gather(*aborting, return_exceptions=True)


# -- dependencies of routes: coroutines, since FastAPI runs functions in threads

_bearer = HTTPBearer(auto_error=False, description="An API key; needed if the server has keys.")


async def _edge(request: Request) -> Edge:
    edge: Edge = request.app.state.edge
    return edge


async def _caller(
    request: Request, edge: Annotated[Edge, Depends(_edge)], _: Annotated[Any, Depends(_bearer)]
) -> Tenant:
    tenant = edge.tenant(request.headers)
    request.state.tenant = tenant.name
    return tenant


async def _admin(tenant: Annotated[Tenant, Depends(_caller)]) -> Tenant:
    if not tenant.admin:
        raise Forbidden("this needs an admin key")
    return tenant


async def _scraper(
    request: Request, edge: Annotated[Edge, Depends(_edge)], bearer: Annotated[Any, Depends(_bearer)]
) -> None:
    if not edge.settings.public_metrics:
        await _admin(await _caller(request, edge, bearer))


def of_tenant(kind: Callable[[], T]) -> Any:
    """Returns a dependency: the caller's object of this kind; see `Edge.part`."""

    async def find(edge: Annotated[Edge, Depends(_edge)], tenant: Annotated[Tenant, Depends(_caller)]) -> T:
        return edge.part(kind, tenant=tenant.name)

    return Depends(find)


EdgeOf = Annotated[Edge, Depends(_edge)]
Caller = Annotated[Tenant, Depends(_caller)]
Admin = Annotated[Tenant, Depends(_admin)]
Scraper = Annotated[None, Depends(_scraper)]


def open_message(
    tenant: Tenant, session: str, *, ttl: float | None, adapter: str | None, system: str | None = None, **policy: Any
) -> OpenSession:
    """Returns the message that opens a session for the tenant. `adapter`: its name. `policy`: other fields of
    `Policy`."""
    options = Policy(ttl=ttl, tenant=tenant.name, adapter=SessionAdapter.named(adapter), **policy)
    return OpenSession(session=session, policy=options, system=system, limits=tenant.limits)
