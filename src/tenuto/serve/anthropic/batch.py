"""A batch of messages: its requests, and its state as an object keeps it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Self

import msgspec
from pydantic import Field

from tenuto.base.errors import IllegalTransition, InvalidRequest
from tenuto.base.objects import StoredObject
from tenuto.serve.shared.objects import ForeignObject

MAX_REQUESTS = 10_000
"""Maximum number of requests in a batch."""
LIFETIME = timedelta(hours=24)
"""Time after which requests that are not done expire."""


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


class Head(msgspec.Struct, frozen=True, array_like=True):
    """The head of a batch's object. Times are in seconds since the epoch. `counts`: results by type."""

    total: int
    created: float
    counts: dict[str, int] = {}
    cancelled: float | None = None
    ended: float | None = None

    def encoded(self) -> bytes:
        return msgspec.msgpack.encode(self)

    def having(self, **fields: Any) -> Head:
        """Returns this with other values of these fields."""
        return msgspec.structs.replace(self, **fields)


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch, as it was when it was read."""

    stored: StoredObject
    head: Head

    @classmethod
    def of(cls, stored: StoredObject) -> Self:
        return cls(stored, msgspec.msgpack.decode(stored.head, type=Head))

    @property
    def id(self) -> str:
        return self.stored.name

    @property
    def has_ended(self) -> bool:
        return self.head.ended is not None

    @property
    def expires(self) -> float:
        return self.head.created + LIFETIME.total_seconds()

    def view(self, url: str) -> dict[str, Any]:
        """Returns the batch in the form for clients. `url`: that of all batches."""
        head = self.head
        status = "ended" if self.has_ended else "canceling" if head.cancelled is not None else "in_progress"
        counts = Counter(head.counts if self.has_ended else {})
        kinds = ("succeeded", "errored", "canceled", "expired")
        return {
            "id": self.id,
            "type": "message_batch",
            "processing_status": status,
            "request_counts": {
                "processing": head.total - counts.total(),
                **{kind: counts[kind] for kind in kinds},
            },
            "created_at": _shown(head.created),
            "expires_at": _shown(self.expires),
            "ended_at": _shown(head.ended),
            "cancel_initiated_at": _shown(head.cancelled),
            "archived_at": None,
            "results_url": f"{url}/{self.id}/results" if self.has_ended else None,
        }

    def require_ended(self) -> None:
        """Raises `IllegalTransition` unless all requests are done."""
        if not self.has_ended:
            raise IllegalTransition(f"batch {self.id} is in progress; wait for its end, or cancel it")


def _shown(time: float | None) -> str | None:
    return datetime.fromtimestamp(time, UTC).isoformat() if time is not None else None
