"""Batches of messages: requests that are answered in the background, after those of clients that wait."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import msgspec
import structlog

from tenuto.base.errors import LimitReached, NotAcknowledged, NotFound
from tenuto.base.objects import NOBODY, ItemName, NewItem, ObjectItem, StoredObject
from tenuto.serve.anthropic.batch import Batch, Head
from tenuto.serve.anthropic.errors import FORM
from tenuto.serve.shared.errors import Failure
from tenuto.serve.shared.tenant_objects import Edit, TenantObjects, new_edit

log = structlog.get_logger("tenuto.batches")

MAX_BATCHES = 100
"""Maximum number of one tenant's batches."""
MAX_BYTES = 64 * 2**20
"""Maximum size of one tenant's requests that wait and of its results, as JSON."""
AT_ONCE = 16
"""Maximum number of one tenant's requests that are answered at once."""
WATCH_SECONDS = 0.5
"""How often to look whether a batch was cancelled through another replica."""
AGAIN_SECONDS = 0.5
"""Time between attempts to reach the database."""
WAITING, RESULTS = "waiting", "results"
"""The lists of a batch's requests that have no result, and of lines of JSON, one for each that has."""

T = TypeVar("T")

Result = dict[str, Any]
AnswerTo = Callable[[bytes], Awaitable[Result | None]]
"""Returns the result of a request, given as JSON; `None` if this replica does not answer it, because it ends. It must
not raise."""
Work = Callable[[str, AnswerTo, int], Awaitable[None]]
"""Works on a batch, like `Batches.run`."""


class Batches:
    """The batches of a tenant, and the runs of those that this replica works on.

    Invariant: each request of a batch is either in the list `WAITING` or has its result in the list `RESULTS`, and one
    change moves it from one to the other. Only the replica that the batch names as its worker makes such changes, each
    of which expects the revision that its last one has left. A replica becomes the worker only if the one before has
    left the batch, or its lease has ended; the results of that one are then no longer recorded. So no request has two
    results, and a recorded result stays.
    """

    KIND = "batch of messages"

    def __init__(self, objects: TenantObjects) -> None:
        self._objects = objects
        self._places = asyncio.Semaphore(AT_ONCE)
        self._runs: dict[str, Run | None] = {}  # those of this replica, which may have yet to begin

    async def open(self, name: str, requests: Sequence[tuple[str, bytes]]) -> Batch:
        """Opens a batch for this replica to work on, by the caller's call of `run`. The oldest ones that have ended
        make room for it if needed. Raises `LimitReached`, and `NotAcknowledged` if it may be open."""
        size = sum(len(params) for _, params in requests)
        kept = await self._all()
        unended = [batch for batch in kept if not batch.has_ended]
        used = sum(batch.stored.size for batch in unended)
        if len(unended) >= MAX_BATCHES or used + size > MAX_BYTES:
            raise LimitReached(
                f"{len(unended)} batches with {used} bytes are in progress, and this one has {size} bytes; "
                f"allowed: {MAX_BATCHES} batches with {MAX_BYTES} bytes"
            )
        ended = iter([batch for batch in kept if batch.has_ended])
        left, used = len(kept), sum(batch.stored.size for batch in kept)
        while left >= MAX_BATCHES or used + size > MAX_BYTES:
            oldest = next(ended)
            await self._objects.delete(oldest.id)
            left, used = left - 1, used - oldest.stored.size
        head = Head(len(requests), time.time())
        waiting = [NewItem(WAITING, custom_id, params) for custom_id, params in requests]
        await self._objects.edit(name, "", Edit(head.encoded(), self._objects.worker, added=waiting))
        return await self.find(name)

    async def _all(self) -> list[Batch]:
        return [Batch.of(each) for each in await self._objects.listed()]

    async def find(self, name: str) -> Batch:
        """Returns a batch by id. Raises `NotFound`."""
        if (found := await self._objects.find(name)) is None:
            raise _absent(name)
        return Batch.of(found)

    async def newest(self) -> list[Batch]:
        """Returns all batches, the newest first."""
        return (await self._all())[::-1]

    async def results(self, name: str) -> bytes:
        """Returns the results of a batch that has ended, a line each. Raises `NotFound`, `IllegalTransition`."""
        (await self.find(name)).require_ended()
        return b"".join([item.body for item in await self._objects.items(name, RESULTS)])

    async def cancel(self, name: str) -> Batch:
        """Ends a batch early. Nothing happens if it has ended. Raises `NotFound`."""

        def cancelled(found: StoredObject | None) -> Edit | None:
            if found is None:
                raise _absent(name)
            head = Batch.of(found).head
            if head.ended is not None or head.cancelled is not None:
                return None
            return Edit(head.having(cancelled=time.time()).encoded(), found.worker)

        await self._objects.change(name, cancelled)
        if (run := self._runs.get(name)) is not None:
            await run.look()
        return await self.find(name)

    async def delete(self, name: str) -> None:
        """Drops a batch and its results. Raises `NotFound`, and `IllegalTransition` if it is in progress."""
        (await self.find(name)).require_ended()
        await self._objects.delete(name)

    async def resume(self, name: str, answer_to: AnswerTo, at_once: int) -> None:
        """Becomes the worker of a batch whose worker is gone, unless another replica does, and calls `run`."""
        with self._working_on(name) as free:
            if free and await self._claim(name):
                log.info("taken over", batch=name)
                await self._run(name, answer_to, at_once)

    async def run(self, name: str, answer_to: AnswerTo, at_once: int) -> None:
        """Answers the requests of a batch whose worker is this replica, at most `at_once` of them at the same time.
        Returns once the batch has ended, or has another worker."""
        with self._working_on(name) as free:
            if free:
                await self._run(name, answer_to, at_once)

    @contextmanager
    def _working_on(self, name: str) -> Iterator[bool]:
        """Yields whether this replica may work on the batch: it does not do so already."""
        free = name not in self._runs
        if free:
            self._runs[name] = None
        try:
            yield free
        finally:
            if free:
                del self._runs[name]

    async def _claim(self, name: str) -> bool:
        found = await self._objects.find(name)
        if found is None or not found.abandoned:
            return False
        edit = new_edit(found.revision, Edit(found.head, self._objects.worker))
        return await until_known(lambda: self._objects.carry_out(name, edit))

    async def _run(self, name: str, answer_to: AnswerTo, at_once: int) -> None:
        found = await until_known(lambda: self.find(name))
        run = self._runs[name] = Run(self._objects, found, answer_to, self._places)
        await run.work(at_once)


def new_name() -> str:
    """Returns the id of a new batch."""
    return f"msgbatch_{secrets.token_hex(12)}"


def _absent(name: str) -> NotFound:
    return NotFound(f"there is no batch {name[:80]!r}; it was deleted, is too old, or ended with the server")


class _Left(Exception):
    """The batch has another worker now, or is gone."""


class Run:
    """Answers the requests of one batch. `batch`: its latest state that is known here."""

    def __init__(self, objects: TenantObjects, batch: Batch, answer_to: AnswerTo, places: asyncio.Semaphore) -> None:
        self.batch = batch
        self._objects = objects
        self._answer_to = answer_to
        self._places = places
        self._waiting: deque[ObjectItem] = deque()  # requests that have not begun
        self._running: dict[asyncio.Task[Result | None], None] = {}  # answers to requests, in order
        self._changing = asyncio.Lock()  # held while the batch is changed, or read again
        self._leaving = False  # whether no more requests are to begin

    async def work(self, at_once: int) -> None:
        """Answers all requests, or leaves the batch to other replicas."""
        watching = asyncio.ensure_future(self._watch())
        try:
            self._waiting.extend(await until_known(lambda: self._objects.items(self.batch.id, WAITING)))
            most = max(1, min(at_once, AT_ONCE, len(self._waiting)))
            await asyncio.gather(*(self._work() for _ in range(most)))
            await self._leave()
        except _Left:
            pass
        finally:
            watching.cancel()
            self._stop()

    def _stop(self) -> None:
        self._leaving = True
        for task in list(self._running):
            task.cancel()

    async def look(self) -> None:
        """Finds out whether the batch was cancelled, or has another worker."""
        async with self._changing:
            try:
                await self._read()
            except _Left:
                self._stop()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            with suppress(NotAcknowledged):
                await self.look()

    async def _read(self) -> None:
        """Reads the batch again. Raises `_Left`."""
        found = await self._objects.find(self.batch.id)
        if found is None or found.worker != self._objects.worker:
            raise _Left
        self.batch = Batch.of(found)
        if self._is_cancelled():
            for task in list(self._running):
                task.cancel()

    async def _work(self) -> None:
        """Answers one request after the other. Raises `_Left`."""
        while not self._leaving:
            async with self._places:
                if not self._waiting or self._leaving:
                    return
                request = self._waiting.popleft()
                result = await self._result(request.body)
            if result is None:
                self._leaving = True
                return
            await self._record(request.name, len(request.body), result)
            await asyncio.sleep(0)  # thousands may end without waiting

    def _is_cancelled(self) -> bool:
        return self.batch.head.cancelled is not None

    async def _result(self, params: bytes) -> Result | None:
        if self._is_cancelled():
            return {"type": "canceled"}
        task = asyncio.ensure_future(self._answer_to(params))
        self._running[task] = None
        try:
            async with asyncio.timeout(self.batch.expires - time.time()):
                return await task
        except TimeoutError:
            return {"type": "expired"}
        except asyncio.CancelledError:
            if self._leaving:
                return None
            if not self._is_cancelled():
                raise
            return {"type": "canceled"}
        finally:
            del self._running[task]

    async def _record(self, name: str, waited: int, result: Result) -> None:
        """Records a result, or an error if there is no room for it. Raises `_Left`."""
        async with self._changing:
            while True:
                line = _line(name, result)
                used = (await until_known(self._objects.use)).size
                if used - waited + len(line) > MAX_BYTES:
                    full = LimitReached(f"results have {used} bytes; allowed: {MAX_BYTES}; delete some batches")
                    result = {"type": "errored", "error": FORM.body(Failure.of(full), self.batch.id)}
                    line = _line(name, result)
                if await self._recorded(name, result["type"], line):
                    return
                page = await until_known(lambda: self._objects.page(self.batch.id, RESULTS, 1, name))
                await until_known(self._read)
                if page is not None and page.found:  # it was recorded, and the batch was changed after that
                    return

    async def _recorded(self, name: str, kind: str, line: bytes) -> bool:
        """Records a result, unless others have changed the batch. Returns whether it was recorded."""
        head = self.batch.head
        counts = {**head.counts, kind: head.counts.get(kind, 0) + 1}
        last = sum(counts.values()) == head.total
        head = head.having(counts=counts, ended=time.time() if last else None)
        worker = self._objects.worker if not last else None
        change = Edit(head.encoded(), worker, removed=[ItemName(WAITING, name)], added=[NewItem(RESULTS, name, line)])
        return await self._carry_out(change, head)

    async def _carry_out(self, change: Edit, head: Head) -> bool:
        edit = new_edit(self.batch.stored.revision, change)
        if not await until_known(lambda: self._objects.carry_out(self.batch.id, edit)):
            return False
        stored = msgspec.structs.replace(self.batch.stored, revision=edit.revision, worker=change.worker)
        self.batch = Batch(stored, head)
        return True

    async def _leave(self) -> None:
        """Leaves the batch to other replicas, unless it has ended. Raises `_Left` if others have it."""
        async with self._changing:
            while not self.batch.has_ended and not await self._carry_out(
                Edit(self.batch.head.encoded(), NOBODY), self.batch.head
            ):
                await until_known(self._read)


async def until_known(ask: Callable[[], Awaitable[T]]) -> T:
    """Returns the result of `ask`, which is called again while the database cannot be reached."""
    while True:
        try:
            return await ask()
        except NotAcknowledged:
            await asyncio.sleep(AGAIN_SECONDS)


def _line(name: str, result: Result) -> bytes:
    return msgspec.json.encode({"custom_id": name, "result": result}) + b"\n"
