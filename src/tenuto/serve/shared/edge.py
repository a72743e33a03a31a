"""What every interface of the server stands on: who asks, what they may, and the turns that are under way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers

from tenuto.base.errors import Draining, EngineStopped, Forbidden, LimitReached, Overloaded, TenutoError, Unauthorized
from tenuto.base.link import Link
from tenuto.base.messages import StartTurn
from tenuto.base.views import ModelView
from tenuto.serve.metrics import Metrics
from tenuto.serve.shared.settings import ServeSettings, Tenant
from tenuto.serve.shared.turns import LiveTurn, TurnDesk

RETRY_SECONDS = 1
"""In `Retry-After`, where nothing better is known."""
ABORTING_SECONDS = 5.0
"""How long the engine may take, at the end, to abort all that is left."""


class Edge:
    """The server's state: its link to the engine, its turns, its counts."""

    def __init__(self, link: Link, model: ModelView, settings: ServeSettings, metrics: Metrics) -> None:
        self.link = link
        self.model = model
        self.settings = settings
        self.desk = TurnDesk(link)
        self.metrics = metrics
        self.draining = False
        self.hurried = False  # turns are not waited for when draining
        self.body_bytes = 0  # of all requests that are not over; written by the envelope
        self.started = time.time()
        self.desk.on_update.append(metrics.turn_updated)
        self.desk.on_end.append(metrics.turn_ended)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def served_name(self) -> str:
        """What clients call the model."""
        return self.settings.served_name or self.model.model

    def tenant(self, headers: Headers) -> Tenant:
        """Whose key is in the headers. Raises `Unauthorized`."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        tenant = self.settings.keys.tenant(key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key"))
        if tenant is None:
            raise Unauthorized("no valid API key; give one as Authorization: Bearer KEY")
        return tenant

    def require_engine(self) -> None:
        """Raises `EngineStopped` if there is none."""
        if self.link.stopped is not None:
            raise EngineStopped(self.link.stopped)

    async def start(
        self,
        tenant: Tenant,
        request: StartTurn,
        *,
        queue: bool = False,
        continues: bool = False,
        key: str | None = None,
        body: bytes = b"",
    ) -> LiveTurn:
        """See `TurnDesk.start`; what the tenant may not is refused."""
        self.require_engine()
        if self.draining:
            raise Draining("the server is about to end; try again later")
        return await self.desk.start(
            request,
            queue=queue,
            continues=continues,
            key=key,
            body=body,
            check=lambda: self._check_open(tenant),
            most_in_line=tenant.limits.queued,
        )

    def _check_open(self, tenant: Tenant) -> None:
        """Whether one more turn may be open. Raises `LimitReached`, `Overloaded`."""
        most, has = tenant.limits.turns, self.desk.open[tenant.name]
        if most is not None and has >= most:
            raise LimitReached(f"{has} turns are open; allowed: {most}; wait for one to end")
        if self.desk.open.total() >= self.settings.max_turns:
            raise Overloaded(f"{self.settings.max_turns} turns are open, the most allowed; try again later")

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Have something done that nobody waits for. It must not raise."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self) -> None:
        """Begin nothing new, let turns end for a while, then abort those that are left."""
        self.draining = True
        self.desk.refuse_lines(Draining("the server is about to end; try again later"))
        deadline = time.monotonic() + self.settings.drain_seconds
        while self.desk.open_turns() and not self.hurried and time.monotonic() < deadline and self.link.stopped is None:
            await asyncio.sleep(0.02)
        aborting = [asyncio.ensure_future(self.desk.abort(turn)) for turn in self.desk.open_turns()]  # lines and all
        with suppress(TimeoutError):  # an engine that hangs is killed later
            async with asyncio.timeout(ABORTING_SECONDS):
                await asyncio.gather(*aborting, return_exceptions=True)


async def digest_of(request: Request) -> bytes:
    """What tells a request from others with the same idempotency key: its path and body."""
    return sha256(request.url.path.encode() + b"\n" + await request.body()).digest()


# -- dependencies of routes

_bearer = HTTPBearer(auto_error=False, description="An API key; needed if the server has keys.")


def _edge(request: Request) -> Edge:
    edge: Edge = request.app.state.edge
    return edge


def _caller(request: Request, edge: Annotated[Edge, Depends(_edge)], _: Annotated[Any, Depends(_bearer)]) -> Tenant:
    tenant = edge.tenant(request.headers)
    request.state.tenant = tenant.name
    return tenant


def _admin(tenant: Annotated[Tenant, Depends(_caller)]) -> Tenant:
    if not tenant.admin:
        raise Forbidden("this needs an admin key")
    return tenant


def _scraper(request: Request, edge: Annotated[Edge, Depends(_edge)], bearer: Annotated[Any, Depends(_bearer)]) -> None:
    if not edge.settings.public_metrics:
        _admin(_caller(request, edge, bearer))


EdgeOf = Annotated[Edge, Depends(_edge)]
Caller = Annotated[Tenant, Depends(_caller)]
Admin = Annotated[Tenant, Depends(_admin)]
Scraper = Annotated[None, Depends(_scraper)]


@dataclass(frozen=True, slots=True)
class Failure:
    """How an error is written in an answer: in the manner of OpenAI, for all interfaces alike."""

    status: int
    code: str
    message: str
    param: str | None = None

    @staticmethod
    def of(error: TenutoError) -> Failure:
        """What stopped the engine, or is our mistake, is for the log: it may name anyone's sessions."""
        message = str(error)
        if isinstance(error, EngineStopped):
            message = message.partition(":")[0]
        elif error.status == 500:
            message = BROKEN
        return Failure(error.status, error.code, message, error.param)

    @property
    def kind(self) -> str:
        """OpenAI's word for the class of error."""
        return _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        if self.status in (429, 503):
            return {"retry-after": str(RETRY_SECONDS)}
        if self.status == 408:
            return {"connection": "close"}  # the rest may come at any time
        return {"www-authenticate": "Bearer"} if self.status == 401 else {}


BROKEN = "the server failed; its log says why"
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
