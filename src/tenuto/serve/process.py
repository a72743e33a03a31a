"""A link to an engine in another process."""

from __future__ import annotations

import asyncio
import signal
from typing import Any, Self

import msgspec
import structlog

from tenuto.base.errors import InvalidRequest
from tenuto.base.views import ModelView
from tenuto.base.wire.frames import FrameReader, frame
from tenuto.base.wire.link import Link
from tenuto.base.wire.pieces import in_pieces
from tenuto.base.wire.replies import AnyReply, Refusal, Stopped, error_of
from tenuto.base.wire.request import Request
from tenuto.serve.engine_process import EngineProcess

log = structlog.get_logger("tenuto.server")

EXIT_SECONDS = 5.0
"""Time an engine process has to exit once its socket is closed, not counting the time for writing memory to disk. Then
it is killed."""


class ProcessLink(Link, asyncio.BufferedProtocol):
    """A `Link` to an engine process over its socket pair. Created by `open`."""

    model: ModelView  # set by `open`, like `_transport`
    _transport: asyncio.Transport

    def __init__(self, engine: EngineProcess) -> None:
        super().__init__()
        self._engine = engine
        self._frames = FrameReader()
        self._decoder = msgspec.msgpack.Decoder(AnyReply)
        self._encoder = msgspec.msgpack.Encoder()
        self._ready: asyncio.Future[ModelView] = asyncio.get_running_loop().create_future()
        self._buried: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, engine: EngineProcess) -> Self:
        """Takes over the connection of a process and waits until its model is loaded. Raises `ModelError`,
        `ConfigError`, `EngineStopped`."""
        link = cls(engine)
        loop = asyncio.get_running_loop()
        link._transport, _ = await loop.create_unix_connection(lambda: link, sock=engine.connection)
        try:
            link.model = await link._ready
        except BaseException:
            await link.close()
            raise
        return link

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._engine.pid

    async def close(self) -> None:
        """Closes the socket, which makes the child exit, and waits until it has."""
        self._transport.close()
        self.stop(Stopped(reason="the engine was closed"))
        await self._bury()

    def send(self, request: Request[Any]) -> None:
        try:
            message = in_pieces(request, self._encoder)
        except (OverflowError, UnicodeEncodeError) as error:
            raise InvalidRequest("a value cannot be encoded; allowed: 64-bit numbers and valid Unicode text") from error
        if not self._transport.is_closing():  # else `_bury` gives all callers an error
            self._transport.writelines(frame(*message))

    # -- called by the event loop

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._frames.room()

    def buffer_updated(self, nbytes: int) -> None:
        for payload in self._frames.took(nbytes):
            reply: AnyReply = self._decoder.decode(payload)
            if self._ready.done():
                self.take(reply)
                if self.stopped is not None:
                    log.error("engine stopped", reason=str(self.stopped.error()))
                    self._transport.close()
            elif isinstance(reply, Refusal):
                self._ready.set_exception(error_of(reply))
            else:
                self._ready.set_result(msgspec.msgpack.decode(reply.value, type=ModelView))  # type: ignore[union-attr]

    def connection_lost(self, _error: Exception | None) -> None:
        self._buried = asyncio.ensure_future(self._bury())

    async def _bury(self) -> None:
        """Waits until the child has exited, and fails all open requests with the reason."""
        ended = asyncio.ensure_future(asyncio.to_thread(self._engine.wait))
        saving = self._engine.snapshot_seconds if self._ready.done() else 0
        await asyncio.wait({ended}, timeout=EXIT_SECONDS + saving)
        if not ended.done():
            self._engine.kill()
        status = await ended
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        stopped = Stopped(reason=f"the engine process {how}")
        if self.stopped is None:
            log.error("engine ended", reason=stopped.reason)
        self.stop(stopped)
        if not self._ready.done():
            self._ready.set_exception(stopped.error())
