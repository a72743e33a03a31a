"""Batches of messages: requests that are answered in the background, after those of clients that wait."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import msgspec
from pydantic import Field

from tenuto.base.errors import IllegalTransition, InvalidRequest, LimitReached, NotFound
from tenuto.serve.anthropic.errors import FORM
from tenuto.serve.shared.errors import Failure
from tenuto.serve.shared.objects import ForeignObject

MAX_REQUESTS = 10_000
"""Maximum number of requests in a batch."""
MAX_BATCHES = 100
"""Maximum number of one tenant's batches."""
MAX_BYTES = 64 * 2**20
"""Maximum size of one tenant's requests that wait and of its results, as JSON."""
AT_ONCE = 16
"""Maximum number of one tenant's requests that are answered at once."""
LIFETIME = timedelta(hours=24)
"""Time after which requests that are not done expire."""

Result = dict[str, Any]
AnswerTo = Callable[[bytes], Awaitable[Result]]
"""Returns the result of a request, given as JSON. It must not raise."""


class BatchRequest(ForeignObject):
    """A request of a batch. `params`: the body of a request for messages, checked when its turn comes."""

    custom_id: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    params: dict[str, Any]


class BatchBody(ForeignObject):
    """A batch to run."""

    requests: Annotated[list[BatchRequest], Field(fail_fast=True, min_length=1, max_length=MAX_REQUESTS)]

    def encoded(self) -> list[tuple[str, bytes]]:
        """Returns the requests as JSON, with their ids. Raises `InvalidRequest`."""
        seen: set[str] = set()
        for number, request in enumerate(self.requests):
            if request.custom_id in seen:
                raise InvalidRequest(
                    f"requests[{number}].custom_id is {request.custom_id!r} again; allowed: every id once",
                    param=f"requests[{number}].custom_id",
                )
            seen.add(request.custom_id)
        return [(request.custom_id, json.dumps(request.params).encode()) for request in self.requests]


@dataclass(slots=True)
class Batch:
    """A batch. `waiting`: the requests that have not begun. `running`: tasks that answer requests. `results`: lines of
    JSON, one per request that is done. `size`: bytes of what waits and of the results. `counts`: results by type."""

    id: str
    waiting: deque[tuple[str, bytes]]
    total: int
    size: int
    created: datetime = field(default_factory=lambda: datetime.now(UTC))
    running: set[asyncio.Task[Result]] = field(default_factory=set)
    results: list[bytes] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    cancelled: datetime | None = None
    ended: datetime | None = None

    @property
    def expires(self) -> datetime:
        return self.created + LIFETIME

    def is_cancelled(self) -> bool:
        return self.cancelled is not None

    def view(self, url: str) -> dict[str, Any]:
        """Returns the batch in the form for clients. `url`: that of all batches."""
        status = "ended" if self.ended is not None else "canceling" if self.is_cancelled() else "in_progress"
        counts = self.counts if self.ended is not None else Counter[str]()
        kinds = ("succeeded", "errored", "canceled", "expired")
        return {
            "id": self.id,
            "type": "message_batch",
            "processing_status": status,
            "request_counts": {
                "processing": self.total - counts.total(),
                **{kind: counts[kind] for kind in kinds},
            },
            "created_at": self.created.isoformat(),
            "expires_at": self.expires.isoformat(),
            "ended_at": self.ended.isoformat() if self.ended is not None else None,
            "cancel_initiated_at": self.cancelled.isoformat() if self.cancelled is not None else None,
            "archived_at": None,
            "results_url": f"{url}/{self.id}/results" if self.ended is not None else None,
        }

    def require_ended(self) -> None:
        """Raises `IllegalTransition` unless all requests are done."""
        if self.ended is None:
            raise IllegalTransition(f"batch {self.id} is in progress; wait for its end, or cancel it")

    def cancel(self) -> None:
        """Ends the batch early. Nothing happens if it has ended."""
        if self.ended is None and not self.is_cancelled():
            self.cancelled = datetime.now(UTC)
            for task in self.running:
                task.cancel()


class Batches:
    """The batches of a tenant. They exist only in this process and end with it.

    Invariant: `_bytes` is the sum of the batches' sizes.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, Batch] = {}  # the oldest first
        self._bytes = 0
        self._places = asyncio.Semaphore(AT_ONCE)

    def open(self, requests: Sequence[tuple[str, bytes]]) -> Batch:
        """Opens a batch. The oldest ones that have ended make room for it if needed. Raises `LimitReached`."""
        size = sum(len(params) for _, params in requests)
        unended = [batch for batch in self._by_id.values() if batch.ended is None]
        used = sum(batch.size for batch in unended)
        if len(unended) >= MAX_BATCHES or used + size > MAX_BYTES:
            raise LimitReached(
                f"{len(unended)} batches with {used} bytes are in progress, and this one has {size} bytes; "
                f"allowed: {MAX_BATCHES} batches with {MAX_BYTES} bytes"
            )
        while len(self._by_id) >= MAX_BATCHES or self._bytes + size > MAX_BYTES:
            self.delete(next(batch for batch in self._by_id.values() if batch.ended is not None))
        batch = Batch(f"msgbatch_{secrets.token_hex(12)}", deque(requests), len(requests), size)
        self._by_id[batch.id] = batch
        self._bytes += size
        return batch

    def find(self, name: str) -> Batch:
        """Returns a batch by id. Raises `NotFound`."""
        found = self._by_id.get(name)
        if found is None:
            raise NotFound(f"there is no batch {name[:80]!r}; it was deleted, is too old, or ended with the server")
        return found

    def newest(self) -> list[Batch]:
        """Returns all batches, the newest first."""
        return list(self._by_id.values())[::-1]

    def delete(self, batch: Batch) -> None:
        """Drops a batch and its results. Raises `IllegalTransition` if it is in progress."""
        batch.require_ended()
        del self._by_id[batch.id]
        self._bytes -= batch.size

    async def run(self, batch: Batch, answer_to: AnswerTo, at_once: int) -> None:
        """Answers a batch's requests, at most `at_once` of them at the same time."""
        await asyncio.gather(*(self._work(batch, answer_to) for _ in range(min(at_once, AT_ONCE, batch.total))))
        batch.ended = datetime.now(UTC)

    async def _work(self, batch: Batch, answer_to: AnswerTo) -> None:
        """Answers one request after the other."""
        while True:
            async with self._places:
                if not batch.waiting:
                    return
                name, params = batch.waiting.popleft()
                result = await self._result(batch, params, answer_to)
            self._add(batch, name, len(params), result)
            await asyncio.sleep(0)  # thousands may end without waiting

    async def _result(self, batch: Batch, params: bytes, answer_to: AnswerTo) -> Result:
        if batch.is_cancelled():
            return {"type": "canceled"}
        task = asyncio.ensure_future(answer_to(params))
        batch.running.add(task)
        try:
            async with asyncio.timeout((batch.expires - datetime.now(UTC)).total_seconds()):
                return await task
        except TimeoutError:
            return {"type": "expired"}
        except asyncio.CancelledError:
            if not batch.is_cancelled():
                raise
            return {"type": "canceled"}
        finally:
            batch.running.discard(task)

    def _add(self, batch: Batch, name: str, waited: int, result: Result) -> None:
        """Stores a result. One for which there is no room becomes an error."""
        line = _line(name, result)
        if self._bytes - waited + len(line) > MAX_BYTES:
            full = LimitReached(f"results have {self._bytes} bytes; allowed: {MAX_BYTES}; delete some batches")
            result = {"type": "errored", "error": FORM.body(Failure.of(full), batch.id)}
            line = _line(name, result)
        batch.results.append(line)
        batch.counts[result["type"]] += 1
        batch.size += len(line) - waited
        self._bytes += len(line) - waited


def _line(name: str, result: Result) -> bytes:
    return msgspec.json.encode({"custom_id": name, "result": result}) + b"\n"
