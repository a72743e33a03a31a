"""A proxy between a client and a server, which records requests, and how many tokens of earlier ones were not computed
again."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from tenuto.serve.shared.answer_headers import SESSION

SECONDS = 240
LEAST = 0.99
"""The least share of earlier tokens that is to be reused."""


@dataclass(frozen=True, slots=True)
class Counted:
    """The token counts of a request: its `prompt`, those of it that were `cached`, and those of the `answer`."""

    prompt: int
    cached: int
    answer: int

    @classmethod
    def of(cls, usage: Mapping[str, Any]) -> Counted:
        """Reads the usage of any of the three interfaces."""
        if "cache_read_input_tokens" in usage:
            cached = usage["cache_read_input_tokens"]
            new = usage["input_tokens"] + (usage.get("cache_creation_input_tokens") or 0)
            return cls(new + cached, cached, usage["output_tokens"])
        prompt, answer = ("input", "output") if "input_tokens" in usage else ("prompt", "completion")
        cached = usage[f"{prompt}_tokens_details"]["cached_tokens"]
        return cls(usage[f"{prompt}_tokens"], cached, usage[f"{answer}_tokens"])


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: its path, its headers and its body, a JSON object."""

    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]


@dataclass(slots=True)
class Recording:
    """The requests that were answered in a session, in order, and their token counts by session."""

    url: str
    sessions: dict[str, list[Counted]] = field(default_factory=dict)
    requests: list[Asked] = field(default_factory=list)

    def add(self, session: str, asked: Asked, answer: bytes) -> None:
        """Adds a request with the body of its answer."""
        self.requests.append(asked)
        if (usage := usage_of(answer)) is not None:
            self.sessions.setdefault(session, []).append(Counted.of(usage))

    def reuse(self, requests: int) -> list[tuple[int, int]]:
        """Returns, for each request but the first of the session that has the most, how many tokens of the request
        before it and its answer were cached, and how many there were. Raises `AssertionError` if the session has fewer
        than `requests`, or if too few of the tokens were cached."""
        longest = max(self.sessions.values(), key=len, default=[])
        if len(longest) < requests:
            raise AssertionError(f"no session has {requests} requests: {self.sessions}")
        found = []
        for before, request in pairwise(longest):
            earlier = before.prompt + before.answer
            found.append((min(request.cached, earlier), earlier))
            if request.cached < LEAST * earlier:
                raise AssertionError(f"too few tokens were reused: {longest}")
        return found


def usage_of(body: bytes) -> dict[str, Any] | None:
    """Returns the complete usage in an answer, which may be a stream of events; later events add to earlier ones."""
    lines = body.split(b"\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")] or [json.loads(body)]
    found: dict[str, Any] = {}
    for event in events:
        for holder in (event, event.get("message"), event.get("response")):
            found |= (holder.get("usage") if isinstance(holder, dict) else None) or {}
    return found or None


@contextmanager
def recording(url: str) -> Iterator[Recording]:
    """Runs a proxy of the server at `url` during the block."""
    client = httpx.AsyncClient(base_url=url, timeout=SECONDS)

    @asynccontextmanager
    async def connected(_: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    async def forward(request: Request) -> StreamingResponse:
        headers = {name: value for name, value in request.headers.items() if name not in ("host", "accept-encoding")}
        given = await request.body()
        url = httpx.URL(path=request.url.path, query=request.url.query.encode())
        asked = client.build_request(request.method, url, headers=headers, content=given)
        answer = await client.send(asked, stream=True)

        async def body() -> AsyncIterator[bytes]:
            whole = b""
            async for piece in answer.aiter_bytes():
                whole += piece
                yield piece
            if answer.is_success and (session := answer.headers.get(SESSION)) is not None:
                record.add(session, Asked(request.url.path, headers, json.loads(given)), whole)

        # Without a length, a client sees the end of an answer only when it has been recorded.
        own = ("date", "server", "content-length")
        told = {name: value for name, value in answer.headers.items() if name not in own}
        return StreamingResponse(body(), answer.status_code, told)

    methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
    app = Starlette(routes=[Route("/{path:path}", forward, methods=methods)], lifespan=connected)
    listening = socket.create_server(("127.0.0.1", 0))
    record = Recording(f"http://127.0.0.1:{listening.getsockname()[1]}")
    proxy = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=proxy.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield record
    finally:
        proxy.should_exit = True
        thread.join()
