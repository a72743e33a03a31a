"""WebSockets of clients that do not read."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn

from tenuto.serve.protocol import BoundedSocket

HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def test_a_client_that_reads_nothing_is_disconnected() -> None:
    """It also answers no ping, and a connection that is only closed would wait for it for ever."""
    ended = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        try:
            while True:
                await send({"type": "websocket.send", "text": "x" * 2**20})
        finally:
            ended.set()

    async def story() -> None:
        options: dict[str, Any] = {"ws": BoundedSocket, "ws_ping_interval": 0.1, "ws_ping_timeout": 0.1}
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, **options))
        with socket.create_server(("127.0.0.1", 0)) as listening:
            serving = asyncio.ensure_future(server.serve(sockets=[listening]))
            with socket.create_connection(listening.getsockname()) as client:
                client.sendall(HANDSHAKE)
                await asyncio.wait_for(ended.wait(), 60)
            server.should_exit = True
            await asyncio.wait_for(serving, 60)

    asyncio.run(story())
