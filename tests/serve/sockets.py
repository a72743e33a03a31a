"""WebSockets of a real server, by the `websockets` package."""

from __future__ import annotations

import json
from typing import Any

from websockets.sync.client import connect
from websockets.sync.connection import Connection

from tests.serve.server import Server


def opened(server: Server, path: str, **options: Any) -> Connection:
    """Returns a socket at this path of the server."""
    return connect(server.url.replace("http", "ws", 1) + path, **options)


def received(socket: Connection) -> Any:
    """Returns the next message."""
    return json.loads(socket.recv(timeout=60))
