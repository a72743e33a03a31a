"""A link to an engine in this process, for tests of what stands on a link."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from tenuto.base.link import Deliver, Switchboard
from tenuto.base.messages import AnyReply, Request, StartTurn, Stopped, WorkerSettings
from tenuto.runtime.service import open_service

T = TypeVar("T")


class LocalLink:
    """A `Link` whose engine runs in a thread of this process. To be made where an event loop runs."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Loads the model and blocks meanwhile. Raises `ModelError` or `ConfigError`."""
        self._loop = asyncio.get_running_loop()
        self._service = open_service(settings, self._post)
        self._board = Switchboard(self._service.handle)

    @property
    def stopped(self) -> Stopped | None:
        return self._board.stopped

    async def call(self, request: Request[T]) -> T:
        return await self._board.call(request)

    async def start(self, request: StartTurn, deliver: Deliver) -> None:
        await self._board.start(request, deliver)

    async def ended(self) -> None:
        await self._board.ended()

    async def close(self) -> None:
        await asyncio.to_thread(self._service.close)
        self._board.stop(Stopped(reason="the engine was closed"))

    def _post(self, reply: AnyReply) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._board.take, reply)
