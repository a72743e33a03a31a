"""Helpers for asyncio tasks: several at once, and background tasks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


AT_ONCE = 32
"""Maximum number of tasks that begin in one round of the event loop. A request can ask for a thousand, and other
requests' streams must advance meanwhile."""


class Background:
    """Runs coroutines to completion. Asyncio itself does not keep unreferenced tasks alive.

    Invariant: `_waiting` has coroutines only while a call of `_begin` is scheduled on the event loop.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: deque[Coroutine[Any, Any, None]] = deque()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` in the background, starting it after work spawned before. It must not raise."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._begin)
        self._waiting.append(work)

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` in the background like `spawn`, but starts it in the next round of the event loop."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _begin(self) -> None:
        for _ in range(min(AT_ONCE, len(self._waiting))):
            self.begin(self._waiting.popleft())
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._begin)


async def all_of(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns the results, in order. If one fails, or this is cancelled, no more are started and the others are
    cancelled and awaited."""
    tasks: list[asyncio.Task[T]] = []
    try:
        for work in works:
            tasks.append(asyncio.ensure_future(work))
            if len(tasks) % AT_ONCE == 0:
                await asyncio.sleep(0)
                if any(map(_failed, tasks[-2 * AT_ONCE :])):
                    break
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
