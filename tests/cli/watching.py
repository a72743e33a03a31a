"""`tenuto top` without a terminal."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from tenuto.client.connection import Connection
from tenuto.client.map_reader import MapReader

if TYPE_CHECKING:
    from textual.pilot import Pilot

SECONDS = 60


@asynccontextmanager
async def watching(url: str, key: str | None = None, size: tuple[int, int] = (80, 24)) -> AsyncIterator[Pilot[Any]]:
    """Runs `tenuto top` on a terminal of `size` columns and lines."""
    from tenuto.cli.top.app import TopApp  # noqa: PLC0415 - an extra

    connection = Connection(url, key)
    reader = MapReader(connection)
    try:
        app = TopApp(reader, await asyncio.wrap_future(reader.next()), url)
        async with app.run_test(size=size, notifications=True) as pilot:
            yield pilot
    finally:
        await asyncio.to_thread(reader.close)
        await asyncio.to_thread(connection.close)


def seen(pilot: Pilot[Any]) -> str:
    """Returns what is on the screen."""
    return "\n".join(strip.text for strip in pilot.app.screen._compositor.render_strips())


async def shows(pilot: Pilot[Any], pattern: str) -> re.Match[str]:
    """Waits until the screen matches."""
    deadline = time.monotonic() + SECONDS
    while (found := re.search(pattern, seen(pilot))) is None:
        assert time.monotonic() < deadline, f"no {pattern!r} in\n{seen(pilot)}"
        await pilot.pause(0.05)
    return found
