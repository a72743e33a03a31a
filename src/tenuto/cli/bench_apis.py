"""Conversations with servers over three interfaces, for `tenuto bench`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from tenuto.base.errors import TenutoError
from tenuto.cli.bench_http import BenchHttp


@dataclass(frozen=True, slots=True)
class Counts:
    """A turn's token counts as reported by the server: the whole prompt, the cached part of it, and the output; `None`
    if not reported."""

    prompt: int | None
    cached: int | None
    generated: int | None


class Arrival(NamedTuple):
    """The arrival of `tokens` output tokens at time `when` (`time.perf_counter`)."""

    when: float
    tokens: int


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """The parameters of all requests. `history`: "session" (the server keeps it) or "resend" (every turn sends it)."""

    history: str
    output_tokens: int
    model: str = ""


class BenchConversation:
    """One session of the workload. Errors are `TenutoError`s."""

    histories: ClassVar[tuple[str, ...]] = ("session", "resend")
    """The supported values of `history`, the default first."""

    def __init__(self, http: BenchHttp, request: BenchRequest, name: str) -> None:
        self._http = http
        self._request = request
        self._name = name
        self._keeps = request.history == "session"  # whether the server keeps the history
        self._session = ""  # its id on the server
        self._history: list[int] = []  # in tokens

    @staticmethod
    async def model(http: BenchHttp) -> str:  # noqa: ARG004 - subclasses use it
        """Returns the name of the server's model."""
        return ""

    async def open(self) -> None:
        """Prepares for the first turn."""

    async def close(self) -> None:
        """Cleans up after the last turn."""

    def turn(self, given: list[int]) -> AsyncIterator[Arrival | Counts]:
        """Runs a turn. Yields the arrivals of its tokens, then its counts."""
        raise NotImplementedError


class TenutoConversation(BenchConversation):
    """Uses native sessions. To resend the history, each turn opens a new one."""

    async def open(self) -> None:
        if self._keeps:
            await self._open()

    async def _open(self) -> None:
        self._session = (await self._http.ask("POST", "/v1/sessions", {"ttl": 600}))["id"]

    async def close(self) -> None:
        if self._session:
            await self._http.ask("DELETE", f"/v1/sessions/{self._session}")

    async def turn(self, given: list[int]) -> AsyncIterator[Arrival | Counts]:
        self._history += given
        if not self._keeps:
            await self._open()
        body = {
            "input": given if self._keeps else self._history,
            "max_new_tokens": self._request.output_tokens,
            "ignore_eos": True,
        }
        for when, name, data in await self._http.events(f"/v1/sessions/{self._session}/turns", body):
            match name:
                case "delta":
                    self._history += data["tokens"]
                    yield Arrival(when, len(data["tokens"]))
                case "committed":
                    usage = data["usage"]
                    yield Counts(usage["prompt_tokens"], usage["cached_tokens"], usage["completion_tokens"])
                case "aborted":
                    raise TenutoError(f"the turn was aborted: {data['reason']}")
        if not self._keeps:
            await self.close()


class OpenAIConversation(BenchConversation):
    """Uses chat completions. `session_id`, which not every server supports, keeps the history; otherwise it is
    resent."""

    histories: ClassVar[tuple[str, ...]] = ("resend", "session")

    @staticmethod
    async def model(http: BenchHttp) -> str:
        return str((await http.ask("GET", "/v1/models"))["data"][0]["id"])

    def __init__(self, http: BenchHttp, request: BenchRequest, name: str) -> None:
        super().__init__(http, request, name)
        self._messages: list[dict[str, str]] = []

    async def close(self) -> None:
        if self._keeps:
            with suppress(TenutoError):  # only Tenuto's own interface can close it
                await self._http.ask("DELETE", f"/v1/sessions/{self._name}")

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
        for when, _, data in await self._http.events("/v1/chat/completions", body):
            counts = counts or Counts(None, None, None)  # the server has answered
            for choice in data.get("choices") or ():
                if piece := choice["delta"].get("content"):
                    text += piece
                    yield Arrival(when, 1)
            if usage := data.get("usage"):
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
                counts = Counts(usage["prompt_tokens"], cached, usage["completion_tokens"])
        self._messages.append({"role": "assistant", "content": text})
        if counts is not None:
            yield counts


class SGLangConversation(BenchConversation):
    """Uses SGLang's `/generate`, in a streaming session or with the whole history every time."""

    async def open(self) -> None:
        if self._keeps:
            body = {"capacity_of_str_len": 2**24, "streaming": True}
            self._session = await self._http.ask("POST", "/open_session", body)

    async def close(self) -> None:
        if self._session:
            await self._http.ask("POST", "/close_session", {"session_id": self._session})

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
        for when, _, data in await self._http.events("/generate", body):
            meta = data["meta_info"]
            reason = meta.get("finish_reason") or {}
            if reason.get("type") == "abort":
                raise TenutoError(f"the turn was aborted: {reason.get('message')}")
            generated, ids = meta["completion_tokens"], data.get("output_ids") or []
            output = ids if len(ids) == generated else output + ids  # all so far, or only the new ones
            if generated > seen:
                yield Arrival(when, generated - seen)
                seen = generated
        self._history += output
        if meta:
            yield Counts(meta.get("prompt_tokens"), meta.get("cached_tokens"), meta.get("completion_tokens"))


APIS: dict[str, type[BenchConversation]] = {
    "tenuto": TenutoConversation,
    "openai": OpenAIConversation,
    "sglang": SGLangConversation,
}

WORDS = (  # noqa: SIM905 - as a list it would take a page
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work night point home water room mother area money "
    "story"
).split()
"""Words that are one token each in most vocabularies."""
