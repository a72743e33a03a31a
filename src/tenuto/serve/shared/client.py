"""An extension of ASGI that our protocol offers: cheaper ways to write parts of an answer and to notice disconnects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from starlette.types import Scope

EXTENSION = "tenuto.client"


class Client(Protocol):
    """The connection on which a request came."""

    def begin_events(self) -> None:
        """Declares that the answer has begun and is a stream of server-sent events."""
        ...

    def write(self, part: bytes) -> bool:
        """Writes a part of the answer's body, which has begun and is not complete. Returns False, without writing, if
        the buffers are full. Ignored if the client has gone."""
        ...

    async def drain(self) -> None:
        """Waits until the buffers have room, or the client has gone."""
        ...

    def watch(self, gone: Callable[[], None] | None) -> bool:
        """Sets the function to call when the client disconnects; `None` removes it. Returns False if that is not
        possible, since the client has disconnected or part of its request is unread."""
        ...


def client_of(scope: Scope) -> Client | None:
    """Returns the client of a request, or `None` if the application runs on another server."""
    client: Client | None = scope.get("extensions", {}).get(EXTENSION)
    return client
