from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from tenuto.base.errors import Disconnected, InvalidRequest, TenutoError, Unreachable
from tenuto.cli.bench_http import BenchHttp, TimedEvent

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@asynccontextmanager
async def answering(*answers: list[bytes]) -> AsyncIterator[tuple[BenchHttp, list[bytes]]]:
    """Runs a server that answers each request with the next of `answers`, in pieces, and closes the connection after an
    empty one; yields it with its requests, preceded by one entry for each connection."""
    left, asked, serving = list(answers), list[bytes](), set[asyncio.Task[None] | None]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        asked.append(b"connected")
        ends = False
        while left and not ends:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:  # the client has disconnected
                break
            length = int(*re.findall(rb"(?i)content-length: (\d+)", head))  # 0 without a body
            asked.append(head + await reader.readexactly(length))
            for piece in left.pop(0):
                writer.write(piece)
                await asyncio.sleep(0.02)
                ends = not piece
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        address = server.sockets[0].getsockname()
        async with BenchHttp(httpx.URL(f"http://127.0.0.1:{address[1]}/base/"), "key") as http:
            yield http, asked
        await asyncio.gather(*(task for task in serving if task is not None))


async def read(http: BenchHttp) -> list[TimedEvent]:
    return await http.events("/path", {"a": 1})


def test_events_of_one_read_share_a_time_and_connections_are_reused() -> None:
    async def story() -> None:
        two = chunk(b'data: {"n": 1}\n\n') + chunk(b'event: end\ndata: {"n": 2}\n\n')
        stream = [CHUNKED + two, chunk(b'data: {"n":'), chunk(b" 3}\n\ndata: [DONE]\n\n") + b"0\r\n\r\n"]
        async with answering(stream, [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]"]) as (http, asked):
            events = await read(http)
            assert [(name, data) for _, name, data in events] == [
                ("message", {"n": 1}),
                ("end", {"n": 2}),
                ("message", {"n": 3}),
            ]
            first, second, third = (when for when, *_ in events)
            assert first == second < third
            assert await http.ask("GET", "/other") == []
            assert [request.partition(b" HTTP")[0] for request in asked] == [
                b"connected",
                b"POST /base/path",
                b"GET /base/other",
            ]
            assert b"authorization: Bearer key\r\n" in asked[1]
            assert asked[1].endswith(b'\r\n\r\n{"a":1}')

    asyncio.run(story())


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async def story() -> None:
        again = [HEAD + b"connection: close\r\n\r\n", b"data: [2]\n\n", b""]
        async with answering([HEAD + b"\r\n", b"data: [1]\n\n", b""], again) as (http, asked):
            assert [data for *_, data in await read(http)] == [[1]]
            assert [data for *_, data in await read(http)] == [[2]]
            assert asked.count(b"connected") == 2

    asyncio.run(story())


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        ([CHUNKED + chunk(b"data: [1]\n\n"), b""], Disconnected, "connection to the server broke"),
        ([b""], Disconnected, "connection to the server broke"),
        ([HEAD, b""], Disconnected, "connection to the server broke"),
        ([b"SSH-2.0\r\n\r\n"], Disconnected, "connection to the server broke"),
        (
            [CHUNKED + chunk(b'data: {"error": {"message": "no", "code": "invalid_request"}}\n\n') + b"0\r\n\r\n"],
            InvalidRequest,
            "no",
        ),
        ([b"HTTP/1.1 400 Bad\r\ncontent-length: 4\r\n\r\noops"], TenutoError, "status 400 and no reason"),
    ],
)
def test_broken_answers_are_typed_errors(answer: list[bytes], error: type[TenutoError], says: str) -> None:
    async def story() -> None:
        async with answering(answer) as (http, _):
            with pytest.raises(error, match=says):
                await read(http)

    asyncio.run(story())


def test_an_absent_server_is_unreachable() -> None:
    async def story() -> None:
        async with BenchHttp(httpx.URL("http://127.0.0.1:9")) as http:
            with pytest.raises(Unreachable):
                await http.ask("GET", "/")

    asyncio.run(story())
