"""Requests of other replicas: to take sessions over, and for the output of turns that have moved here."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from tenuto.base.errors import AlreadyExists, Draining, InvalidRequest, TenutoError, TooLarge, Unauthorized
from tenuto.base.wire.between import (
    Abort,
    AnyBetween,
    Drop,
    Empty,
    Fate,
    Follow,
    Forget,
    List,
    Move,
    Put,
    Reserve,
    Take,
    key_of,
)
from tenuto.base.wire.fleet_messages import DropMove, EraseTraces, PutMove, ReserveMove, TakeMove
from tenuto.base.wire.frames import frame
from tenuto.base.wire.messages import StartTurn
from tenuto.base.wire.moves import LiveStream
from tenuto.base.wire.replies import refusal_of
from tenuto.serve.fleet.asking import PATH, SECRET
from tenuto.serve.fleet.fleet import Fleet
from tenuto.serve.fleet.relays import news
from tenuto.serve.shared.edge import SHUTTING_DOWN
from tenuto.serve.shared.live_turn import LiveTurn
from tenuto.serve.shared.sse import until_disconnected

MAX_BYTES = 2**30
"""The most bytes of a request: parked state of a session may come in one piece."""
FORGOTTEN_SECONDS = 30.0
"""How long room is kept for a session if nothing more comes."""
GRACE_SECONDS = 10.0
"""How long a turn that continues here, with its readers at another replica, waits for them to come back."""


class Receiving:
    """Carries out requests of other replicas, which know the fleet's secret. Other requests go to the application."""

    def __init__(self, app: ASGIApp, fleet: Fleet) -> None:
        self._app = app
        self._fleet = fleet
        self._edge = fleet.edge
        self._decoder = msgspec.msgpack.Decoder(AnyBetween)
        self._expiries: dict[str, asyncio.TimerHandle] = {}  # of moves for which there is room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        with suppress(ClientDisconnect):
            try:
                given = next(
                    (value.decode("latin-1") for name, value in scope["headers"] if name == SECRET.encode()), ""
                )
                if not self._fleet.is_forwarded(given):
                    raise Unauthorized(f"{SECRET} is missing")
                request = self._read(await _body(receive))
                if (body := await self._answered(request)) is not None:
                    await _answer(send, 200, body)
                    return
                turn, start, reader = await self._carry_out(request)
            except TenutoError as error:
                await _answer(send, error.status, msgspec.msgpack.encode(refusal_of(0, error)))
                return
            if turn is None:
                await _answer(send, 200, b"")
                return
            try:
                await until_disconnected(scope, receive, self._tell(turn, start, reader, send))
            finally:
                self._left(turn)

    def _read(self, body: bytes) -> AnyBetween:
        try:
            request: AnyBetween = self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"another replica's request cannot be read: {error}") from error
        return request

    async def _answered(self, request: AnyBetween) -> bytes | None:
        """Carries out a request that is answered with a value, and returns that, encoded; `None` for others."""
        match request:
            case List():
                return msgspec.msgpack.encode(await self._edge.listed(request.asked))
            case Fate():
                return await self._edge.knows(request.tenant, request.response)
            case Abort():
                return msgspec.msgpack.encode(await self._abort(request))
            case Forget():
                self._edge.turns.forget_ended(key_of(request))
                asked = EraseTraces(tenant=request.tenant, session=request.session)
                return msgspec.msgpack.encode(await self._edge.link.call(asked))
        return None

    async def _carry_out(self, request: AnyBetween) -> tuple[LiveTurn | None, tuple[int, int], str]:
        """Carries out one of the other requests. Returns the turn whose output is the answer, the numbers of tokens and
        characters of output to skip, and the reader."""
        link = self._edge.link
        match request:
            case Reserve(move=move, offer=offer):
                if self._edge.draining or self._edge.leaving:
                    raise Draining(SHUTTING_DOWN)
                await link.call(ReserveMove(move=move, offer=offer))
                self._expect(move)
            case Put(move=move, piece=piece):
                self._expect(move)
                await link.call(PutMove(move=move, piece=piece))
            case Take():
                turn, start = await asyncio.shield(asyncio.ensure_future(self._take(request)))
                return turn, start, request.reader
            case Drop(move=move):
                self._forget(move)
                await link.call(DropMove(move=move))
            case Follow():
                turn = await self._edge.turns.recall(request.tenant, request.session, request.name)
                return turn, (request.tokens, request.characters), request.reader
            case Empty():
                self._fleet.drain.begin(await self._fleet.replicas())
                await self._fleet.tell()
            case Move():
                await self._fleet.moving.move(key_of(request), request.url)
        return None, (0, 0), ""

    async def _abort(self, request: Abort) -> bool:
        """Carries out `Abort`. Returns whether the turn continues."""
        turn = await self._edge.turns.recall(request.tenant, request.session, request.name)
        if request.unread:
            return await self._edge.turns.unread(turn, request.reader)
        await self._edge.turns.abort(turn, request.keep)
        return False

    def _expect(self, move: str) -> None:
        """Gives up the room for a move unless more of it comes in time."""
        self._forget(move)
        loop = asyncio.get_running_loop()
        self._expiries[move] = loop.call_later(FORGOTTEN_SECONDS, lambda: self._edge.spawn(self._drop(move)))

    def _forget(self, move: str) -> None:
        if (expiry := self._expiries.pop(move, None)) is not None:
            expiry.cancel()

    async def _drop(self, move: str) -> None:
        self._expiries.pop(move, None)
        with suppress(TenutoError):
            await self._edge.link.call(DropMove(move=move))

    async def _take(self, request: Take) -> tuple[LiveTurn | None, tuple[int, int]]:
        self._forget(request.move)
        take = TakeMove(move=request.move, end=request.end)
        key, stream = key_of(request), request.stream
        if stream is None:
            await self._edge.link.call(take)
            self._fleet.arrived(key)
            return None, (0, 0)
        if self._fleet.moving.holds(key):
            raise AlreadyExists(f"it is not settled yet whether session {key[1]!r} has left; move it again")
        known = self._edge.turns.relayed(stream.name)
        turn = known or _live(request.tenant, request.session, stream)
        self._fleet.relays.end(turn)  # the engine is to be its source
        try:
            await self._edge.turns.receive(turn, stream, take)
        except BaseException:
            if turn is known and not turn.ended:
                self._fleet.relays.begin(turn)
            raise
        self._fleet.arrived(key)
        return turn, (len(stream.said.tokens), len(stream.said.text))

    async def _tell(self, turn: LiveTurn, start: tuple[int, int], reader: str, send: Send) -> None:
        headers = [(b"content-type", b"application/octet-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for each in news(turn, start, reader):
            body = b"".join(frame(msgspec.msgpack.encode(each)))
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _left(self, turn: LiveTurn) -> None:
        """Rolls the turn back, even if it has moved on, unless it ends, continues without readers, or a reader comes
        back in time."""
        if not turn.ended:
            asyncio.get_running_loop().call_later(GRACE_SECONDS, self._edge.turns.abandon, turn)


def _live(tenant: str, session: str, stream: LiveStream) -> LiveTurn:
    """Returns a turn that continues here."""
    start = StartTurn(kind="turn", tenant=tenant, session=session, resumable=stream.resumable, about=stream.about)
    turn = LiveTurn(start, continues=stream.continues, once=stream.once, name=stream.name)
    turn.reading = stream.reading
    turn.deliver(stream.ticket)
    if stream.said.tokens or stream.said.text:
        turn.deliver(stream.said)
    return turn


async def _body(receive: Receive) -> bytes:
    pieces, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > MAX_BYTES:
            raise TooLarge(f"another replica's request has more than {MAX_BYTES} bytes, the most allowed")
        more = message.get("more_body", False)
    return b"".join(pieces)


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/octet-stream"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
