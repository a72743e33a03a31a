"""Connections end so that no client loses a request, or the end of its answer."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Self

import pytest
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from tenuto.serve.protocol import BoundedProtocol, ConnectionLimits
from tenuto.serve.run import EndingServer
from tenuto.serve.shared.errors import OPENAI_FORM
from tests.eventually import eventually
from tests.serve.server import END_SECONDS, serving
from tests.serve.test_unread import SECONDS, asked, said

REQUEST = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"


async def ok(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


class Served:
    """A server in this thread, whose event loop does nothing while a test does not wait."""

    def __init__(self) -> None:
        limits = ConnectionLimits(connections=10, header_seconds=SECONDS)
        protocol: Any = partial(BoundedProtocol, limits, lambda _: None, lambda _: OPENAI_FORM)
        config = uvicorn.Config(ok, http=protocol, log_config=None, lifespan="off", timeout_keep_alive=SECONDS)
        config.load()
        self.server = EndingServer(config)
        self.server.lifespan = config.lifespan_class(config)
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.place = self.listening.getsockname()

    async def __aenter__(self) -> Self:
        await self.server.startup(sockets=[self.listening])
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.listening.fileno() >= 0:
            await self.server.shutdown([self.listening])

    @property
    def connection(self) -> BoundedProtocol:
        (connection,) = self.server.server_state.connections
        assert isinstance(connection, BoundedProtocol)
        return connection


async def answer(client: socket.socket) -> bytes:
    """Returns the next answer, or what came before the end of the connection."""
    received = b""
    while not received.endswith(b"ok") and (piece := await asyncio.to_thread(client.recv, 2**16)):
        received += piece
    return received


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(story())


@pytest.mark.parametrize("why", ["idle", "ending"])
@pytest.mark.parametrize("arrived", [len(REQUEST), 10])
def test_a_request_that_has_arrived_when_its_connection_should_close_is_answered(why: str, arrived: int) -> None:
    async def story() -> None:
        async with Served() as served:
            with socket.create_connection(served.place, SECONDS) as client:
                client.sendall(REQUEST)
                assert (await answer(client)).endswith(b"ok")
                connection = served.connection
                client.sendall(REQUEST[:arrived])
                eventually(lambda: connection.arriving)  # the loop cannot read it meanwhile
                (connection.timeout_keep_alive_handler if why == "idle" else connection.shutdown)()
                if arrived < len(REQUEST):
                    while connection.arriving:
                        await asyncio.sleep(0.01)
                    client.sendall(REQUEST[arrived:])
                again = await answer(client)
                assert again.endswith(b"ok")
                assert (b"connection: close" in again) == (why == "ending")

    run(story)


def test_a_connection_that_was_opened_before_the_end_is_served() -> None:
    async def story() -> None:
        async with Served() as served:
            with socket.create_connection(served.place, SECONDS) as client:  # it is not accepted yet
                ending = asyncio.ensure_future(served.server.shutdown([served.listening]))
                while not served.server.server_state.connections:
                    await asyncio.sleep(0)
                client.sendall(REQUEST)
                assert (await answer(client)).endswith(b"ok")
                await ending

    run(story)


def test_an_idle_connection_is_closed_at_the_end() -> None:
    async def story() -> None:
        async with Served() as served:
            with socket.create_connection(served.place, SECONDS) as client:
                client.sendall(REQUEST)
                assert (await answer(client)).endswith(b"ok")
                await served.server.shutdown([served.listening])
                assert await answer(client) == b""

    run(story)


def test_a_client_that_reads_late_gets_its_whole_answer_from_an_ending_server() -> None:
    arguments = ("--context-length", "8192", "--drain-seconds", "60", "--unread-seconds", "60")
    body = {"input": [1, 2, 3], "max_new_tokens": 8000, "ignore_eos": True}
    with serving("--model", "witness", *arguments) as server, server.client() as http:
        http.post("/v1/sessions", json={"id": "late"}).raise_for_status()
        with asked(server, "/v1/sessions/late/turns", body) as late:
            eventually(lambda: said(http, "late") == 0 and http.get("/v1/sessions/late").json()["version"] == 1)
            server.process.terminate()
            server.line_with('"event": "ending"')
            time.sleep(3)  # longer than connections take that end by themselves
            received = b""
            while piece := late.recv(2**12):
                received += piece
        assert received.endswith(b"0\r\n\r\n")
        assert b"event: committed" in received
        assert server.process.wait(END_SECONDS) == 0
