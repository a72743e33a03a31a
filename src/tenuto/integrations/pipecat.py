"""Pipecat's LLM service, backed by a session: `pip install tenuto[pipecat]`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, cast

from openai.types.chat import ChatCompletionChunk
from pipecat.adapters.llm.services.open_ai_adapter import openai_is_given
from pipecat.frames.frames import Frame, InterimTranscriptionFrame, TranscriptionFrame
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.base_llm import BaseOpenAILLMService

from tenuto.base.errors import TenutoError
from tenuto.base.options import RemoteOptions
from tenuto.base.tools.answer_part import AnswerPart
from tenuto.base.turns import Usage
from tenuto.client import connect_async
from tenuto.integrations.conversation import Conversation, Speech

OPTIONS = {
    "frequency_penalty": "frequency_penalty",
    "max_completion_tokens": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "presence_penalty": "presence_penalty",
    "seed": "seed",
    "temperature": "temperature",
    "top_p": "top_p",
}
"""Settings of the service, and a turn's options. `extra["extra_body"]` may have others, by their own names."""


class TenutoLLMService(BaseOpenAILLMService):
    """The service of one pipeline. When the bot is interrupted, the session keeps the tokens whose words were spoken,
    as the context has them. The session is closed with the pipeline."""

    def __init__(self, *, url: str, api_key: str | None = None, ttl: float | None = 3600, **options: Any) -> None:
        """`url`: the server's. `ttl`: see `Conversation`. `options`: those of `BaseOpenAILLMService`."""
        super().__init__(base_url=f"{url}/v1", api_key=api_key or "none", **options)
        self.conversation = Conversation(connect_async(url, api_key), ttl=ttl)

    def drafts(self, context: LLMContext) -> Drafts:
        """Returns a processor that computes what the user says while it is said. Its place in the pipeline is after
        speech-to-text, before the aggregator of `context` for the user."""
        return Drafts(self, context)

    async def cleanup(self) -> None:
        await super().cleanup()
        await self.conversation.close()

    async def get_chat_completions(self, context: LLMContext) -> Any:
        """Returns the answer as chunks of OpenAI's API."""
        messages, options = await self.request(context)
        return _chunks(self.conversation.answer(messages, **options), self.conversation)

    async def request(self, context: LLMContext) -> tuple[list[Any], RemoteOptions]:
        """Returns the context's messages, and the options of a turn that answers them."""
        told = await self.get_llm_adapter().get_llm_invocation_params(
            context,
            system_instruction=cast("str | None", self._settings.system_instruction),
            convert_developer_to_user=False,
        )
        given = {
            name: value for name, value in self.build_chat_completion_params(told).items() if openai_is_given(value)
        }
        options = {to: given[name] for name, to in OPTIONS.items() if given.get(name) is not None}
        options["tools"] = given.get("tools", [])
        options["tool_choice"] = given.get("tool_choice")
        return list(given["messages"]), cast("RemoteOptions", options | given.get("extra_body", {}))


async def _chunks(parts: AsyncIterator[AnswerPart], conversation: Conversation) -> AsyncIterator[ChatCompletionChunk]:
    called = 0
    async with aclosing(cast("Any", parts)):
        async for part in parts:
            if part.text:
                yield _chunk({"content": part.text})
            for call in part.calls:
                function = {"name": call.name, "arguments": call.arguments}
                yield _chunk(
                    {"tool_calls": [{"index": called, "id": call.id, "type": "function", "function": function}]}
                )
                called += 1
    yield _chunk(None, conversation.usage)


def _chunk(delta: dict[str, Any] | None, usage: Usage | None = None) -> ChatCompletionChunk:
    body: dict[str, Any] = {"id": "chat", "created": 0, "model": "tenuto", "object": "chat.completion.chunk"}
    body["choices"] = [] if delta is None else [{"index": 0, "delta": delta}]
    if usage is not None:
        body["usage"] = {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.generated,
            "total_tokens": usage.prompt + usage.generated,
            "prompt_tokens_details": {"cached_tokens": usage.cached},
        }
    return ChatCompletionChunk.model_validate(body)


class Drafts(FrameProcessor):
    """Computes transcriptions ahead, and passes all frames on."""

    def __init__(self, service: TenutoLLMService, context: LLMContext) -> None:
        super().__init__()
        self._service = service
        self._context = context
        self._speech = Speech()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        await self.push_frame(frame, direction)
        if isinstance(frame, InterimTranscriptionFrame | TranscriptionFrame):
            self.create_task(self._draft(frame.text, final=isinstance(frame, TranscriptionFrame)))

    async def _draft(self, text: str, *, final: bool) -> None:
        try:
            messages, options = await self._service.request(self._context)
            said = self._speech.so_far(messages, text, final=final)
            await self._service.conversation.draft([*messages, said], options.get("tools"))
        except TenutoError as error:
            await self.push_error(f"the draft was not computed: {error}", error)
