"""Asyncio tasks: several at once, and background tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """Runs coroutines to completion. Asyncio itself does not keep unreferenced tasks alive."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in the background. It must not raise."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def all_of(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results, in order. If one fails, or this is cancelled, the others are cancelled and awaited."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
