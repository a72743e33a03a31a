"""A request and its answer as they pass, with limits on the body."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tenuto.base.errors import Overloaded, RequestTimeout, TenutoError, TooLarge
from tenuto.serve.shared.bodies import Structure
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.settings import BODY_BYTES_A_SECOND

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class Exchange:
    """One request and its answer. The creator must call `forget` in the end.

    `status`: status of the answer; 0 until it has begun. `excess`: set once the body exceeds a limit on its size,
    structure or time; the application's answer is then not sent.
    """

    def __init__(
        self,
        receive: Receive,
        send: Send,
        headers: Sequence[tuple[bytes, bytes]],
        edge: Edge,
        own: Mapping[str, str] = NO_HEADERS,
        *,
        to_disk: bool = False,
    ) -> None:
        """`headers`: added to the answer. `own`: added to answers that are no errors; complete when the answer begins.
        `to_disk`: the body is not kept in memory."""
        self.own = own
        self.status = 0
        self.excess: TenutoError | None = None
        self._receive = receive
        self._send = send
        self._headers = headers
        self._edge = edge
        self._to_disk = to_disk
        self._received = 0
        self._structure = Structure() if not to_disk else None
        self._complete = False  # the whole body has arrived
        self._began = asyncio.get_running_loop().time()

    @property
    def texts(self) -> Sequence[tuple[int, int]]:
        """The places of long texts in the part of the body that has arrived."""
        return self._structure.texts if self._structure is not None else ()

    def expect(self, length: int) -> None:
        """Checks a body of `length` bytes. Raises `TooLarge`, or `Overloaded` if the bodies of all requests are too
        large together."""
        settings = self._edge.settings
        limit = settings.max_state_bytes if self._to_disk else settings.max_body_bytes
        together = settings.max_state_bytes if self._to_disk else settings.max_bodies_bytes
        if length > limit:
            self.excess = TooLarge(f"the body has more than {limit} bytes, the most allowed")
        elif (self._edge.spooled_bytes if self._to_disk else self._edge.body_bytes) > together:
            self.excess = Overloaded(
                f"the bodies of all requests have {together} bytes, the most allowed; try again later"
            )
        if self.excess is not None:
            raise self.excess

    def forget(self) -> int:
        """Stops counting the body of a request that is over. Returns the number of bytes received."""
        received, self._received = self._received, 0
        self._count(-received)
        return received

    def _count(self, size: int) -> None:
        if self._to_disk:
            self._edge.spooled_bytes += size
        else:
            self._edge.body_bytes += size

    async def receive(self) -> Message:
        message = await (self._receive() if self._complete else self._receive_body())
        self._complete = not message.get("more_body", False)
        piece = message.get("body", b"")
        self._received += len(piece)
        self._count(len(piece))
        self.expect(self._received)
        if self._structure is not None:
            self._look_into(self._structure, piece)
        return message

    def _look_into(self, structure: Structure, piece: bytes) -> None:
        try:
            structure.feed(piece)
        except TooLarge as error:
            self.excess = error
            raise

    async def _receive_body(self) -> Message:
        allowed = self._edge.settings.body_seconds + self._received / BODY_BYTES_A_SECOND
        try:
            async with asyncio.timeout_at(self._began + allowed):
                return await self._receive()
        except TimeoutError:
            self.excess = RequestTimeout(
                f"the body was incomplete after {allowed:.0f} seconds; {self._received} bytes arrived"
            )
            raise self.excess from None

    async def send(self, message: Message) -> None:
        if self.excess is not None and not self.status:
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            own = list(self._headers)
            if self._edge.draining or self._edge.leaving:  # so that clients send their next request elsewhere
                own.append((b"connection", b"close"))
            if self.status < 400:
                own += [(name.encode(), value.encode()) for name, value in self.own.items()]
            message["headers"] = [*message["headers"], *own]
        await self._send(message)

    async def refuse(self, scope: Scope, refusal: Response) -> None:
        """Sends a refusal as the answer."""
        self.excess = None
        await refusal(scope, self._receive, self.send)
