"""A server of the witness, and a proxy in front of it that breaks connections."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

import tenuto
from tests.serve.server import Server, serving

CONTEXT = 2**15
"""So long that every turn is aborted before it."""


@pytest.fixture(scope="package")
def witness() -> Iterator[Server]:
    with serving("--model", "witness", "--page-size", "4", "--context-length", str(CONTEXT)) as server:
        yield server
        server.audit()


@pytest.fixture
def remote(witness: Server) -> Iterator[tenuto.RemoteEngine]:
    """A client. Sessions that a test leaves open are closed."""
    with tenuto.connect(witness.url) as engine:
        yield engine
        for info in engine.sessions():
            engine.attach(info.session_id).close()


class Proxy:
    """Forwards bytes to a server. `cuts`: the numbers of answer bytes after which the next connections break, in order;
    later connections do not. With `refuse`, new ones are closed at once. `connections`: their number so far. Answers
    pass while `answers` is set."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.cuts: list[int] = []
        self.refuse = False
        self.connections = 0
        self.answers = threading.Event()
        self.answers.set()
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut(self) -> None:
        """Breaks all connections."""
        for one in self._open:
            _shut(one)

    def close(self) -> None:
        self.answers.set()
        _shut(self._listener)
        self._listener.close()
        self._threads[0].join()
        self.cut()
        for thread in self._threads:
            thread.join()
        for one in self._open:
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.refuse:
                    client.close()
                    continue
                self.connections += 1
                server = socket.create_connection(self._target)
                self._open += [client, server]
                most = self.cuts.pop(0) if self.cuts else 2**40
                always = threading.Event()
                always.set()
                for one_way in ((client, server, 2**40, always), (server, client, most, self.answers)):
                    thread = threading.Thread(target=_pass_on, args=one_way)
                    thread.start()
                    self._threads.append(thread)


def _pass_on(source: socket.socket, target: socket.socket, most: int, allowed: threading.Event) -> None:
    with suppress(OSError):
        while most and (data := source.recv(min(4096, most))):
            allowed.wait()
            target.sendall(data)
            most -= len(data)
    for one in (source, target):
        _shut(one)


def _shut(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy(witness: Server) -> Iterator[Proxy]:
    running = Proxy(witness.url)
    yield running
    running.close()
