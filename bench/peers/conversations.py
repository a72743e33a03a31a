"""Conversations with peers' servers in token ids, which resend the whole history every turn."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from tenuto.cli.bench_apis import Arrival, BenchConversation, BenchRequest, Counts, OpenAIConversation
from tenuto.cli.bench_http import BenchHttp, TimedEvent


class LlamaConversation(BenchConversation):
    """Uses `/completion` of llama.cpp's server. The server closes a connection after a stream, so each turn opens
    one."""

    histories = ("resend",)

    async def _events(self, prompt: Sequence[int | str], **options: Any) -> list[TimedEvent]:
        """Sends a prompt of tokens and texts, and returns the events of the answer."""
        body = {
            "prompt": prompt,
            "n_predict": self._request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": True,
            "stream": True,
            **options,
        }
        return await self._http.events("/completion", body, {"connection": "close"})

    async def turn(self, given: list[int]) -> AsyncIterator[Arrival | Counts]:
        self._history += given
        for when, _, data in await self._events(self._history, return_tokens=True):
            if ids := data.get("tokens"):
                self._history += ids
                yield Arrival(when, len(ids))
            if data.get("stop"):
                yield Counts(data["tokens_evaluated"], data["timings"]["cache_n"], data["tokens_predicted"])


class IkLlamaConversation(LlamaConversation):
    """Does the same with the server of ik_llama.cpp, which streams only text. So the history has the texts of outputs,
    and the server makes tokens of them again."""

    def __init__(self, http: BenchHttp, request: BenchRequest, name: str) -> None:
        super().__init__(http, request, name)
        self._said: list[int | str] = []

    async def turn(self, given: list[int]) -> AsyncIterator[Arrival | Counts]:
        self._said += given
        text = ""
        for when, _, data in await self._events(self._said):
            if piece := data.get("content"):
                text += piece
                yield Arrival(when, 1)
            if data.get("stop"):
                prompt = data["tokens_evaluated"]
                yield Counts(prompt, prompt - data["timings"]["prompt_n"], data["tokens_predicted"])
        self._said.append(text)


class CompletionsConversation(OpenAIConversation):
    """Uses OpenAI's completions with vLLM's extension for token ids in the answer."""

    histories = ("resend",)

    async def turn(self, given: list[int]) -> AsyncIterator[Arrival | Counts]:
        self._history += given
        body: dict[str, Any] = {
            "model": self._request.model,
            "prompt": self._history,
            "max_tokens": self._request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for when, _, data in await self._http.events("/v1/completions", body):
            for choice in data["choices"]:
                ids = choice.get("token_ids") or []
                self._history += ids
                yield Arrival(when, len(ids))
            if usage := data.get("usage"):
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
                yield Counts(usage["prompt_tokens"], cached, usage["completion_tokens"])
