"""Connections on which any bytes can be sent."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import Self

import httpx

from tests.serve.server import Server

SECONDS = 60


class Raw:
    """A connection on which any bytes can be sent."""

    def __init__(self, server: Server) -> None:
        url = httpx.URL(server.url)
        self._socket = socket.create_connection((url.host, url.port or 0), timeout=SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def send_no_more(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    def answer(self) -> tuple[int, str | None]:
        """Returns status and code of the answer, read until the server closes the connection; 0 if it closes without
        one."""
        received = b""
        with suppress(ConnectionError):
            while part := self._socket.recv(2**16):
                received += part
        return self.parsed(received)

    def answer_of(self, length: int) -> bytes:
        """Returns at most the first `length` bytes of the answer."""
        received = b""
        while len(received) < length and (part := self._socket.recv(length - len(received))):
            received += part
        return received

    @staticmethod
    def parsed(received: bytes) -> tuple[int, str | None]:
        head, _, body = received.partition(b"\r\n\r\n")
        if not head:
            return 0, None
        return int(head.split()[1]), json.loads(body)["error"]["code"] if body.startswith(b"{") else None

    def send_until_answered(self, start: bytes, part: bytes) -> tuple[int, str | None]:
        """Sends endlessly; returns the answer that arrives meanwhile."""
        received, sent = b"", 0
        with suppress(ConnectionError):
            self.send(start)
            self._socket.settimeout(0.05)
            while sent < 2**28:
                with suppress(TimeoutError):
                    self._socket.sendall(part)
                    sent += len(part)
                with suppress(TimeoutError):
                    received += (got := self._socket.recv(2**16))
                    if not got:
                        break
        assert sent < 2**28, "the server accepts endless data"
        return self.parsed(received)
