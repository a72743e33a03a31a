"""The lines of a stream of events."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx


async def lines(answer: httpx.Response) -> AsyncIterator[str]:
    """Yields the lines of an answer. Those of httpx also end at characters such as U+0085, which texts may have."""
    rest = b""
    async for piece in answer.aiter_bytes():
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line.decode()
