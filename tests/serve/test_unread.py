"""Clients that do not read their answers count as disconnected; slow readers do not."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import pytest
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from tenuto.serve.unread import CHECKS, SEND_BUFFER_BYTES, UnreadConnections, WatchedConnection
from tests.eventually import eventually
from tests.serve.server import END_SECONDS, Server, serving
from tests.serve.test_native import turn

CONTEXT = 400_000
ENDLESS = {"input": [1, 2, 3], "max_new_tokens": CONTEXT - 10, "ignore_eos": True}
ROWS = 4
SECONDS = 60
"""The longest that a test waits for anything."""


@pytest.fixture(scope="module")
def witness() -> Iterator[Server]:
    """A server on which a turn can send far more than buffers hold. It must pass an audit when the tests are done."""
    arguments = ("--context-length", str(CONTEXT), "--unread-seconds", "1", "--max-running-requests", str(ROWS))
    with serving("--model", "witness", *arguments) as server:
        yield server
        server.audit()


def connected(url: str) -> socket.socket:
    """Returns a connection whose client side buffers little."""
    target = httpx.URL(url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(SECONDS)
    connection.connect((target.host, target.port or 0))
    return connection


def asked(server: Server, path: str, body: dict[str, Any]) -> socket.socket:
    """Returns a connection with a request whose answer is not read."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    connection = connected(server.url)
    connection.sendall(head.encode() + content)
    return connection


def is_broken(connection: socket.socket) -> bool:
    """Returns whether the connection ends before the end of the answer."""
    received = b""
    with suppress(ConnectionError):
        while piece := connection.recv(2**16):
            received += piece
    return not received.endswith(b"0\r\n\r\n")


def dropped(server: Server) -> int:
    """Returns how many clients the server has disconnected because they do not read."""
    return sum("client does not read" in line for line in server.lines)


def begun(http: httpx.Client, session: str) -> bool:
    return http.get(f"/v1/sessions/{session}").json()["turn"] == "running"


REQUESTS = {
    "native": ("/v1/sessions/silent/turns", ENDLESS),
    "openai": (
        "/v1/completions",
        {
            "model": "witness",
            "prompt": [1, 2, 3],
            "max_tokens": ENDLESS["max_new_tokens"],
            "stream": True,
            "session_id": "silent",
        },
    ),
    "sglang": (
        "/generate",
        {
            "input_ids": [1, 2, 3],
            "sampling_params": {"max_new_tokens": 20_000},  # every event has all output so far
            "stream": True,
            "session_params": {"id": "silent"},
        },
    ),
}


@pytest.mark.parametrize("interface", list(REQUESTS))
def test_an_unread_stream_ends_as_if_its_client_had_disconnected(
    witness: Server, http: httpx.Client, interface: str
) -> None:
    http.post("/v1/sessions", json={"id": "silent"}).raise_for_status()
    http.post("/v1/sessions", json={"id": "other"}).raise_for_status()
    path, body = REQUESTS[interface]
    before = dropped(witness)
    with asked(witness, path, body) as silent:
        assert turn(http, "/v1/sessions/other", input=[1], max_new_tokens=500)["kept"] == 500
        eventually(lambda: dropped(witness) > before)
        eventually(lambda: not begun(http, "silent"))
        assert is_broken(silent)
    assert http.get("/v1/sessions/silent").json()["version"] == 0
    assert turn(http, "/v1/sessions/silent", input=[1])["version"] == 1
    for session in ("silent", "other"):
        http.delete(f"/v1/sessions/{session}")


def test_unread_streams_do_not_keep_others_out(witness: Server, http: httpx.Client) -> None:
    sessions, silent = [f"silent-{n}" for n in range(ROWS + 2)], list[socket.socket]()
    before = dropped(witness)
    with ExitStack() as stack:
        for session in sessions:
            http.post("/v1/sessions", json={"id": session}).raise_for_status()
            silent.append(stack.enter_context(asked(witness, f"/v1/sessions/{session}/turns", ENDLESS)))
        answer = http.post("/v1/completions", json={"model": "witness", "prompt": [1]}, timeout=SECONDS)
        assert answer.json()["usage"]["completion_tokens"] == 16
        eventually(lambda: dropped(witness) == before + len(sessions))
        eventually(lambda: all(http.get(f"/v1/sessions/{session}").json()["turn"] is None for session in sessions))
        assert all(is_broken(each) for each in silent)
    for session in sessions:
        http.delete(f"/v1/sessions/{session}")


def test_a_turn_that_may_continue_without_readers_survives_one_that_does_not_read(
    witness: Server, http: httpx.Client
) -> None:
    http.post("/v1/sessions", json={"id": "going-on"}).raise_for_status()
    body = {**ENDLESS, "on_disconnect": "continue"}
    with asked(witness, "/v1/sessions/going-on/turns", body) as silent:
        before = dropped(witness)
        eventually(lambda: dropped(witness) > before)
        assert begun(http, "going-on")
        assert is_broken(silent)
    assert begun(http, "going-on")
    aborted = http.post("/v1/sessions/going-on/abort", json={"keep": 7}).json()
    assert (aborted["committed"], aborted["kept"]) == (True, 7)
    http.delete("/v1/sessions/going-on")


@pytest.mark.parametrize("how", ["told to end", "without its engine"])
def test_an_ending_server_does_not_wait_for_clients_that_do_not_read(how: str) -> None:
    arguments = ("--context-length", str(CONTEXT), "--drain-seconds", "0")
    with serving("--model", "witness", *arguments) as server, server.client() as http:
        http.post("/v1/sessions", json={"id": "silent"}).raise_for_status()
        with asked(server, "/v1/sessions/silent/turns", ENDLESS) as silent:
            eventually(lambda: said(http, "silent") > 5000)  # a megabyte of events, more than buffers hold
            if how == "told to end":
                assert server.stop() == 0
            else:
                os.kill(server.engine_pid, signal.SIGKILL)
                assert server.process.wait(END_SECONDS) == 70
            assert is_broken(silent)
    assert not [line for line in server.lines if "Traceback" in line or "graceful" in line]


def said(http: httpx.Client, session: str) -> int:
    """Returns the number of output tokens of its open turn."""
    turn_id = http.get(f"/v1/sessions/{session}").json()["turn_id"]
    return len(http.get(f"/v1/sessions/{session}/turns/{turn_id}").json()["tokens"]) if turn_id else 0


# -- the definition of reading, checked by hand


class Endless:
    """An application that sends endlessly. `sent`: messages sent; `gone`: whether it saw the disconnect."""

    def __init__(self) -> None:
        self.sent = 0
        self.gone = asyncio.Event()

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        async def hear() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.gone.set()

        hearing = asyncio.ensure_future(hear())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not self.gone.is_set():
            await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": True})
            self.sent += 1
            await asyncio.sleep(0)
        hearing.cancel()


async def full(connections: set[Any]) -> None:
    """Waits until nothing more can be sent on the only connection."""
    while not any(connection.flow.write_paused for connection in connections):
        await asyncio.sleep(0.01)
    (connection,) = connections
    before = -1
    while before != connection.transport.get_write_buffer_size():
        before = connection.transport.get_write_buffer_size()
        await asyncio.sleep(0.05)


def test_reading_a_little_now_and_then_is_enough_and_reading_nothing_is_not() -> None:
    async def story() -> None:
        application = Endless()
        server = uvicorn.Server(uvicorn.Config(application, http=WatchedConnection, log_config=None, lifespan="off"))
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        serving = asyncio.ensure_future(server.serve(sockets=[listening]))
        connections = server.server_state.connections
        unread = UnreadConnections(connections, seconds=1)
        with connected(f"http://127.0.0.1:{listening.getsockname()[1]}") as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            client.setblocking(False)
            for _ in range(5 * CHECKS):
                await full(connections)
                unread.check()
                for _ in range(8):  # small pieces: the kernel announces freed room only gradually
                    with suppress(BlockingIOError):
                        client.recv(2048)
                    await asyncio.sleep(0.01)
            assert not application.gone.is_set()
            await full(connections)
            stuck = application.sent
            for _ in range(2 * CHECKS):
                unread.check()
                await asyncio.sleep(0.01)
            await asyncio.wait_for(application.gone.wait(), SECONDS)
            assert application.sent <= stuck + 1
            assert not connections
        server.should_exit = True
        await serving

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(story())


def test_a_connection_that_is_idle_or_being_read_is_left_alone() -> None:
    async def story() -> None:
        async def application(_scope: Scope, _receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})

        server = uvicorn.Server(uvicorn.Config(application, http=WatchedConnection, log_config=None, lifespan="off"))
        listening = socket.create_server(("127.0.0.1", 0))
        serving = asyncio.ensure_future(server.serve(sockets=[listening]))
        unread = UnreadConnections(server.server_state.connections, seconds=1)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            for _ in range(3):
                assert (await client.get("/")).text == "ok"
                for _ in range(3 * CHECKS):
                    unread.check()
                assert len(server.server_state.connections) == 1
        server.should_exit = True
        await serving

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(story())
