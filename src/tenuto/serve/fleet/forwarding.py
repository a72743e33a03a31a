"""Forwards requests for sessions of other replicas to them, so that every replica can serve every request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tenuto.base.errors import (
    AlreadyExists,
    Disconnected,
    Draining,
    InvalidRequest,
    Misdirected,
    Unauthorized,
    Unreachable,
)
from tenuto.base.views import SessionKey
from tenuto.serve.fleet import names
from tenuto.serve.fleet.asking import SECRET
from tenuto.serve.fleet.fleet import Fleet
from tenuto.serve.fleet.peers import Broken, NotSent, Reply
from tenuto.serve.shared.bodies import LARGE, in_parser
from tenuto.serve.shared.client import client_of
from tenuto.serve.shared.edge import SHUTTING_DOWN
from tenuto.serve.shared.session_queue import counted_elsewhere
from tenuto.serve.shared.sse import EVENTS, until_disconnected

PATIENCE_SECONDS = 5.0
"""How long, besides a lease, a request waits for a replica that owns its session and cannot be reached."""
PAUSE_SECONDS = 0.05
COUNTED = "x-tenuto-fleet-counted"
"""The header of a request that is forwarded because its session has moved since it came."""
LEAVING_SECONDS = 1.0
"""How long a request waits for its session to leave a replica that is ending."""
_OF_CONNECTIONS = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"proxy-connection", b"expect")
)
_NOT_SENT = _OF_CONNECTIONS | {
    b"host",
    b"content-length",
    b"origin",
    b"x-request-id",
    SECRET.encode(),
    COUNTED.encode(),
}
_NOT_RETURNED = _OF_CONNECTIONS | {b"date", b"server", b"x-request-id", b"request-id"}


class _Request(NamedTuple):
    """A request for another replica, and the session that it is for. `repeatable`: carried out twice, it has the same
    effect."""

    key: SessionKey | None
    head: bytes
    body: bytes
    bodiless: bool
    repeatable: bool

    def at(self, url: str) -> bytes:
        """Returns its bytes for the replica at `url`."""
        return b"%bhost: %b\r\n\r\n%b" % (self.head, url.removeprefix("http://").encode(), self.body)


class _Body:
    """The body of a request, which can be read before the application reads it."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._read: list[Message] = []  # until `forget`
        self._next = 0  # the message in `_read` that the application reads next
        self._complete = False
        self._forgotten = False

    async def whole(self) -> bytes:
        """Reads the whole body. Raises `ClientDisconnect`."""
        while not self._complete:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            self._read.append(message)
            self._complete = not message.get("more_body", False)
        return b"".join(message.get("body", b"") for message in self._read)

    async def receive(self) -> Message:
        """Implements ASGI's `receive` for the application."""
        if self._next == len(self._read):
            message = await self._receive()
            if self._forgotten or self._complete or message["type"] != "http.request":
                return message
            self._read.append(message)
            self._complete = not message.get("more_body", False)
        self._next += 1
        return self._read[self._next - 1]

    def again(self) -> None:
        """Lets the application read the body again."""
        self._next = 0

    def forget(self) -> None:
        """Drops what the application has read: it has answered."""
        del self._read[: self._next]
        self._next, self._forgotten = 0, True

    async def rest(self) -> Message:
        """Implements ASGI's `receive` for what follows the body."""
        return await self._receive()


class _Trial:
    """An answer of this replica. It is dropped if its status is that of `Misdirected`, since the session has moved
    meanwhile: nothing was done, and the request is forwarded. `gives_up`: do not drop it, since another replica has
    forwarded the request."""

    def __init__(self, body: _Body, send: Send, *, gives_up: bool) -> None:
        self.misdirected = False
        self._body = body
        self._send = send
        self._gives_up = gives_up

    async def send(self, message: Message) -> None:
        """Implements ASGI's `send`."""
        if message["type"] == "http.response.start":
            self.misdirected = message["status"] == Misdirected.status and not self._gives_up
            if not self.misdirected:
                self._body.forget()
        if not self.misdirected:
            await self._send(message)


class Forwarding:
    """Passes requests that name no session, or one of this replica, to the application. Forwards the others, at most
    once: a forwarded request is answered or refused where it arrives, and after a refusal the forwarding replica looks
    for the owner again. While this replica is ending, a request waits for its session to leave."""

    def __init__(self, app: ASGIApp, fleet: Fleet, count: Callable[[], None]) -> None:
        """`count`: called for each request that is forwarded."""
        self._app = app
        self._fleet = fleet
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, body = Headers(scope=scope), _Body(receive)
        came = COUNTED in headers and self._fleet.is_forwarded(headers.get(SECRET))
        ending: float | None = None  # when the replica was first seen to end
        with suppress(ClientDisconnect), counted_elsewhere(came):
            while await self._is_for_here(scope, headers, body, send):
                trial = _Trial(body, send, gives_up=self._fleet.is_forwarded(headers.get(SECRET)))
                await self._app(scope, body.receive, trial.send)
                if not trial.misdirected:
                    return
                body.again()
                scope["state"]["counted"] = True
                if self._fleet.edge.draining:
                    now = asyncio.get_running_loop().time()
                    ending = ending or now
                    if now > ending + LEAVING_SECONDS:
                        raise Draining(SHUTTING_DOWN)
                await asyncio.sleep(PAUSE_SECONDS)

    async def _is_for_here(self, scope: Scope, headers: Headers, body: _Body, send: Send) -> bool:
        """Whether the application should answer; otherwise, the owner of the session has."""
        forwarded = self._fleet.is_forwarded(headers.get(SECRET))
        try:
            tenant = self._fleet.edge.tenant(headers).name
        except Unauthorized:  # the application answers that
            return True
        used, opened = await _names(scope, body)
        for name in opened:
            if await self._fleet.is_elsewhere((tenant, name)):
                raise AlreadyExists(f"session {name!r} is open already")
        keys = [(tenant, name) for name in used]
        await self._fleet.moving.settled(keys)
        if forwarded:
            for key in keys:
                if await self._fleet.is_elsewhere(key):
                    raise Misdirected(f"session {key[1]!r} is another replica's")
            return True
        if not used and self._fleet.drain.begun and names.is_new(scope):
            return not await self._elsewhere_answers(scope, headers, body, send, None)
        if (wanted := await self._elsewhere(keys)) is None:
            return True
        return not await self._elsewhere_answers(scope, headers, body, send, wanted)

    async def _elsewhere_answers(
        self, scope: Scope, headers: Headers, body: _Body, send: Send, wanted: SessionKey | None
    ) -> bool:
        """Forwards a request. Returns whether it was answered, or the client has gone. `wanted`: its session; `None`
        for a request without one, which any replica may answer."""
        self._count()
        whole = await body.whole()
        repeatable = scope["method"] in ("GET", "HEAD") or "idempotency-key" in headers
        head = _head_of(scope, len(whole), self._fleet.secret)
        asked = _Request(wanted, head, whole, scope["method"] == "HEAD", repeatable)
        forward = self._forward if wanted is not None else self._forward_new
        with self._fleet.drain.forwarding():
            return await until_disconnected(scope, body.rest, forward(asked, _Answering(scope, send)))

    async def _forward_new(self, asked: _Request, answering: _Answering) -> bool:
        """Has another replica answer a request without a session. Raises `Draining` if no replica can, `Unreachable`,
        and `Disconnected` if the request may have been carried out."""
        url = await self._fleet.instead()
        try:
            async with self._fleet.peers.ask(url, asked.at(url), bodiless=asked.bodiless) as reply:
                await reply.begun()
                await answering.pass_on(reply)
        except NotSent as error:
            raise Unreachable(f"the replica at {url} cannot answer: {error}") from error
        except Broken as error:
            if not answering.cut():
                raise Disconnected(f"the replica at {url} has not answered; the request may be carried out") from error
        return True

    async def _elsewhere(self, keys: Sequence[SessionKey]) -> SessionKey | None:
        """Returns the session of another replica for which to forward a request. Raises `InvalidRequest` if the request
        is for sessions of several replicas."""
        places = {await self._fleet.place(key) for key in keys}
        if len(places) > 1:
            raise InvalidRequest("the sessions of a request belong to several replicas; allowed: one request for each")
        return keys[0] if places and places != {None} else None

    async def _forward(self, asked: _Request, answering: _Answering) -> bool:
        """Has the owner of the session answer. Returns False, having sent nothing, once this replica is the owner.
        Raises `Unreachable`, and `Disconnected` if the request may have been carried out."""
        assert asked.key is not None
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._fleet.lease + PATIENCE_SECONDS
        url = await self._fleet.place(asked.key)
        while url is not None:
            asked_at = clock()
            try:
                async with self._fleet.peers.ask(url, asked.at(url), bodiless=asked.bodiless) as reply:
                    await reply.begun()
                    if not is_misdirected(reply):
                        await answering.pass_on(reply)
                        return True
                    await reply.rest()
                reason = "it does not own the session"
                deadline += clock() - asked_at  # it was waited for there: the session may have left only now
            except NotSent as error:
                reason = str(error)
            except Broken as error:
                if answering.cut():
                    return True
                if not asked.repeatable:
                    raise Disconnected(
                        f"the replica at {url}, which owned the session, has not answered; the request may have been "
                        "carried out"
                    ) from error
                reason = str(error)
            if clock() > deadline:
                raise Unreachable(f"the replica at {url} cannot answer for session {asked.key[1]!r}: {reason}")
            await asyncio.sleep(PAUSE_SECONDS)
            url = await self._fleet.place(asked.key, anew=True)
        return False


class _Answering:
    """The answer to a forwarded request."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._begun = False

    async def pass_on(self, reply: Reply) -> None:
        """Sends the answer of another replica. Raises `Broken`."""
        self._begun = True
        headers = [(name, value) for name, value in reply.headers if name not in _NOT_RETURNED]
        await self._send({"type": "http.response.start", "status": reply.status, "headers": headers})
        client = client_of(self._scope)
        if client is not None and dict(headers).get(b"content-type", b"").startswith(EVENTS.encode()):
            client.begin_events()
        while piece := await reply.piece():
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def cut(self) -> bool:
        """Ends an answer whose rest is lost, if it has begun; returns whether it has. The client sees a broken
        connection and may ask for the rest. Raises `Disconnected` on a WebSocket."""
        if not self._begun:
            return False
        if (client := client_of(self._scope)) is None:
            raise Disconnected("the owner of the session is gone; ask again")
        client.cut()
        return True


def is_misdirected(reply: Reply) -> bool:
    """Whether a replica refuses a forwarded request because it does not own the session."""
    return reply.status == Misdirected.status


async def _names(scope: Scope, body: _Body) -> tuple[list[str], list[str]]:
    """Returns the sessions that a request uses, and those that it would open."""
    used, opened = names.in_path(scope)
    if names.is_in_body(scope):
        read, whole = partial(names.in_body, scope["path"]), await body.whole()
        more = read(whole) if len(whole) < LARGE else await in_parser(partial(read, whole))
        used, opened = used + more[0], opened or more[1]
    return used, opened


def _head_of(scope: Scope, length: int, secret: str) -> bytes:
    """Returns the beginning of a forwarded request, without its host."""
    query = b"?" + scope["query_string"] if scope["query_string"] else b""
    lines = [b"%b %b%b HTTP/1.1" % (scope["method"].encode(), scope["raw_path"], query)]
    lines += [b"%b: %b" % header for header in scope["headers"] if header[0] not in _NOT_SENT]
    lines += [b"%b: %b" % (SECRET.encode(), secret.encode()), b"content-length: %d" % length]
    if scope["state"].get("counted"):
        lines.append(b"%b: 1" % COUNTED.encode())
    lines.append(b"x-request-id: %b" % scope["state"]["request_id"].encode())
    return b"\r\n".join([*lines, b""])
