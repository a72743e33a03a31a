"""Conversations with peers' servers in token ids, which resend the whole history every turn."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from tenuto.cli.bench_apis import Arrival, BenchConversation, Counts, OpenAIConversation


class LlamaConversation(BenchConversation):
    """Uses `/completion` of llama.cpp's server. The server closes a connection after a stream, so each turn opens
    one."""

    histories = ("resend",)

    async def turn(self, given: list[int]) -> AsyncIterator[Arrival | Counts]:
        self._history += given
        body = {
            "prompt": self._history,
            "n_predict": self._request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": True,
            "return_tokens": True,
            "stream": True,
        }
        for when, _, data in await self._http.events("/completion", body, {"connection": "close"}):
            if ids := data.get("tokens"):
                self._history += ids
                yield Arrival(when, len(ids))
            if data.get("stop"):
                yield Counts(data["tokens_evaluated"], data["timings"]["cache_n"], data["tokens_predicted"])


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
