"""Requests of this replica's edge to others, with the secret of the fleet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from tenuto.base.errors import Disconnected, TenutoError, Unreachable
from tenuto.base.wire.between import AnyBetween, News
from tenuto.base.wire.frames import FrameReader
from tenuto.base.wire.pieces import in_pieces
from tenuto.base.wire.replies import Refusal, error_of
from tenuto.serve.fleet.peers import Broken, NotSent, Peers, Reply

PATH = "/fleet/between"
"""The path at which a replica takes requests of others."""
SECRET = "x-tenuto-fleet"  # noqa: S105 - the name of a header
"""The header with the secret of the fleet, which marks a forwarded request."""


class Between:
    """Asks other replicas."""

    def __init__(self, peers: Peers, secret: str) -> None:
        self._peers = peers
        self._secret = secret
        self._encoder = msgspec.msgpack.Encoder()

    @asynccontextmanager
    async def stream(self, url: str, request: AnyBetween) -> AsyncIterator[Reply]:
        """Yields the answer of the replica at `url`, once it has begun. Raises its refusal, `Unreachable` if it has not
        received the request, and `Disconnected` if it may have."""
        body = in_pieces(request, self._encoder)
        head = f"POST {PATH} HTTP/1.1\r\nhost: {url.removeprefix('http://')}\r\n{SECRET}: {self._secret}\r\n"
        head += f"content-length: {sum(map(len, body))}\r\n\r\n"
        try:
            async with self._peers.ask(url, head.encode(), *body) as reply:
                await reply.begun()
                if reply.status != 200:
                    raise await _refusal(reply)
                yield reply
        except NotSent as error:
            raise Unreachable(f"the replica at {url} cannot be reached: {error}") from error
        except Broken as error:
            raise Disconnected(f"the connection to the replica at {url} broke: {error}") from error

    async def ask(self, url: str, request: AnyBetween) -> bytes:
        """Has a request carried out, and returns the answer. Raises the errors of `stream`."""
        async with self.stream(url, request) as reply:
            return await _whole(reply)


async def _whole(reply: Reply) -> bytes:
    body = b""
    while piece := await reply.piece():
        body += piece
    return body


async def _refusal(reply: Reply) -> TenutoError:
    try:
        return error_of(msgspec.msgpack.decode(await _whole(reply), type=Refusal))
    except msgspec.DecodeError:
        return TenutoError(f"another replica answered with status {reply.status}")


async def news_of(reply: Reply) -> AsyncIterator[News]:
    """Yields each `News` of a turn in an answer. Raises `Broken`."""
    frames, decoder = FrameReader(), msgspec.msgpack.Decoder(News)
    while piece := await reply.piece():
        for payload in frames.feed(piece):
            yield decoder.decode(payload)
