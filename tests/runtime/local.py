"""A link to an engine in this process, for tests of code that uses a link."""

from __future__ import annotations

import asyncio
from typing import Any

from tenuto.base.config import WorkerSettings
from tenuto.base.wire.link import Link
from tenuto.base.wire.replies import AnyReply, Stopped
from tenuto.base.wire.request import Request
from tenuto.runtime.opening import open_service


class LocalLink(Link):
    """A `Link` whose engine runs in a thread of this process. Construct it inside an event loop."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Loads the model, which blocks. Raises `ModelError` or `ConfigError`."""
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._service = open_service(settings, self._post)

    def send(self, request: Request[Any]) -> None:
        self._service.handle(request)

    async def close(self) -> None:
        await asyncio.to_thread(self._service.close)
        self.stop(Stopped(reason="the engine was closed"))

    def _post(self, reply: AnyReply) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.take, reply)
