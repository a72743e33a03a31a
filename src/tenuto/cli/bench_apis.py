"""Conversations with servers of three interfaces, as `tenuto bench` holds them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import httpx
import msgspec

from tenuto.base.errors import TenutoError
from tenuto.client.connection import typed_errors
from tenuto.client.sse import EventParser
from tenuto.client.wire import error_from


@dataclass(frozen=True, slots=True)
class Counts:
    """What a server says that a turn was, in tokens: its whole prompt, what of that was cached, and what it generated;
    `None` where it does not say."""

    prompt: int | None
    cached: int | None
    generated: int | None


@dataclass(frozen=True, slots=True)
class Arrival:
    """When (`time.perf_counter`) so many output tokens came."""

    when: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Request:
    """How turns are asked for. `history`: "session", which the server keeps, or "resend", with every turn."""

    history: str
    output_tokens: int
    model: str = ""


class Conversation:
    """One session of the workload. Errors are `TenutoError`s."""

    histories: ClassVar[tuple[str, ...]] = ("session", "resend")
    """The ways it has to keep history, the usual one first."""

    def __init__(self, http: httpx.AsyncClient, request: Request, name: str) -> None:
        self._http = http
        self._request = request
        self._name = name
        self._keeps = request.history == "session"  # the server does
        self._session = ""  # what the server calls it
        self._history: list[int] = []  # in tokens

    @staticmethod
    async def model(http: httpx.AsyncClient) -> str:  # noqa: ARG004 - others ask
        """What the server's model is called."""
        return ""

    async def open(self) -> None:
        """Before the first turn."""

    async def close(self) -> None:
        """After the last."""

    def turn(self, given: list[int]) -> AsyncIterator[Arrival | Counts]:
        """Ask for a turn. Gives its tokens' arrivals, and last the counts."""
        raise NotImplementedError


class TenutoConversation(Conversation):
    """Native sessions. To resend, each turn has a new one."""

    async def open(self) -> None:
        if self._keeps:
            await self._open()

    async def _open(self) -> None:
        self._session = (await _ask(self._http, "POST", "/v1/sessions", {"ttl": 600}))["id"]

    async def close(self) -> None:
        if self._session:
            await _ask(self._http, "DELETE", f"/v1/sessions/{self._session}")

    async def turn(self, given: list[int]) -> AsyncIterator[Arrival | Counts]:
        self._history += given
        if not self._keeps:
            await self._open()
        body = {
            "input": given if self._keeps else self._history,
            "max_new_tokens": self._request.output_tokens,
            "ignore_eos": True,
        }
        async for when, name, said in _events(self._http, f"/v1/sessions/{self._session}/turns", body):
            match name:
                case "delta":
                    self._history += said["tokens"]
                    yield Arrival(when, len(said["tokens"]))
                case "committed":
                    usage = said["usage"]
                    yield Counts(usage["prompt_tokens"], usage["cached_tokens"], usage["completion_tokens"])
                case "aborted":
                    raise TenutoError(f"the turn was aborted: {said['reason']}")
        if not self._keeps:
            await self.close()


class OpenAIConversation(Conversation):
    """Chat completions. `session_id`, which not every server knows, keeps the history; otherwise it is resent."""

    histories = ("resend", "session")

    @staticmethod
    async def model(http: httpx.AsyncClient) -> str:
        return str((await _ask(http, "GET", "/v1/models"))["data"][0]["id"])

    def __init__(self, http: httpx.AsyncClient, request: Request, name: str) -> None:
        super().__init__(http, request, name)
        self._messages: list[dict[str, str]] = []

    async def close(self) -> None:
        if self._keeps:
            with suppress(TenutoError):  # the interface has no word for it; Tenuto's own has
                await _ask(self._http, "DELETE", f"/v1/sessions/{self._name}")

    async def turn(self, given: list[int]) -> AsyncIterator[Arrival | Counts]:
        message = {"role": "user", "content": " ".join(WORDS[number % len(WORDS)] for number in given)}
        self._messages.append(message)
        body = {
            "model": self._request.model,
            "messages": [message] if self._keeps else self._messages,
            "max_tokens": self._request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"session_id": self._name} if self._keeps else {}),
        }
        text, counts = "", None
        async for when, _, said in _events(self._http, "/v1/chat/completions", body):
            counts = counts or Counts(None, None, None)  # there is an answer
            for choice in said.get("choices") or ():
                if piece := choice["delta"].get("content"):
                    text += piece
                    yield Arrival(when, 1)
            if usage := said.get("usage"):
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
                counts = Counts(usage["prompt_tokens"], cached, usage["completion_tokens"])
        self._messages.append({"role": "assistant", "content": text})
        if counts is not None:
            yield counts


class SGLangConversation(Conversation):
    """SGLang's `/generate`: in a streaming session, or with the whole history every time."""

    async def open(self) -> None:
        if self._keeps:
            body = {"capacity_of_str_len": 2**24, "streaming": True}
            self._session = await _ask(self._http, "POST", "/open_session", body)

    async def close(self) -> None:
        if self._session:
            await _ask(self._http, "POST", "/close_session", {"session_id": self._session})

    async def turn(self, given: list[int]) -> AsyncIterator[Arrival | Counts]:
        self._history += given
        options = {"max_new_tokens": self._request.output_tokens, "ignore_eos": True, "temperature": 0}
        body = {
            "input_ids": given if self._keeps else self._history,
            "sampling_params": options,
            "stream": True,
            **({"session_params": {"id": self._session}} if self._keeps else {}),
        }
        seen, output, meta = 0, list[int](), dict[str, Any]()
        async for when, _, said in _events(self._http, "/generate", body):
            meta = said["meta_info"]
            reason = meta.get("finish_reason") or {}
            if reason.get("type") == "abort":
                raise TenutoError(f"the turn was aborted: {reason.get('message')}")
            generated, ids = meta["completion_tokens"], said.get("output_ids") or []
            output = ids if len(ids) == generated else output + ids  # all so far, or with an option only the new ones
            if generated > seen:
                yield Arrival(when, generated - seen)
                seen = generated
        self._history += output
        if meta:
            yield Counts(meta.get("prompt_tokens"), meta.get("cached_tokens"), meta.get("completion_tokens"))


APIS: dict[str, type[Conversation]] = {
    "tenuto": TenutoConversation,
    "openai": OpenAIConversation,
    "sglang": SGLangConversation,
}

WORDS = (  # noqa: SIM905 - as a list it would take a page
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work night point home water room mother area money "
    "story"
).split()
"""Each is one token in most vocabularies."""


async def _ask(http: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    with typed_errors():
        return await _checked(await http.request(method, path, json=body))


async def _checked(response: httpx.Response) -> Any:
    content = await response.aread()
    if response.status_code >= 400:
        raise error_from(response.status_code, content)
    try:
        return msgspec.json.decode(content) if content else None
    except msgspec.DecodeError:
        return None


async def _events(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> AsyncIterator[tuple[float, str, Any]]:
    """The events of a stream: when they came, their names, and what they say. Raises the error that one says."""
    parser, reads = EventParser(), Reads()
    with typed_errors():
        async with http.stream("POST", path, json=body) as response:
            if response.status_code >= 400:
                await _checked(response)
            async for piece in response.aiter_bytes():
                when = reads.time()
                for event in parser.feed(piece):
                    if event.data == "[DONE]":
                        continue
                    said = msgspec.json.decode(event.data)
                    if "error" in said:
                        raise error_from(500, event.data.encode())
                    yield when, event.name, said


class Reads:
    """When data came from the network. An HTTP client hands out what one read has brought in pieces, without waiting
    between them: pieces between which the event loop has not turned came at the same time."""

    def __init__(self) -> None:
        self._when = 0.0
        self._turned = True

    def time(self) -> float:
        """When the piece that has just been handed out came."""
        if self._turned:
            self._when, self._turned = time.perf_counter(), False
            asyncio.get_running_loop().call_soon(self._turn)
        return self._when

    def _turn(self) -> None:
        self._turned = True
