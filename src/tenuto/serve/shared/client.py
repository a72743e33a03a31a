"""Who asked, as our protocol gives it to the application besides what ASGI has: cheaper for what happens often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from starlette.types import Scope

EXTENSION = "tenuto.client"


class Client(Protocol):
    """The connection on which a request came."""

    def begin_events(self) -> None:
        """The answer has begun, and is a stream of server-sent events."""
        ...

    def write(self, part: bytes) -> bool:
        """Write a part of the answer's body, which has begun and is not complete. False if it is not taken: the
        buffers are full. Ignored if the client has gone."""
        ...

    async def drain(self) -> None:
        """Wait until parts are taken again, or the client has gone."""
        ...

    def watch(self, gone: Callable[[], None] | None) -> bool:
        """Have `gone` called when the client disconnects, instead of what was to be called before; `None` for nothing.
        False if that is not possible: it has disconnected, or some of its request has not been read."""
        ...


def client_of(scope: Scope) -> Client | None:
    """`None` if another server runs the application."""
    client: Client | None = scope.get("extensions", {}).get(EXTENSION)
    return client
