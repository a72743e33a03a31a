"""The LLM of LiveKit's agents, backed by a session: `pip install tenuto[livekit]`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, cast

from livekit.agents import APIConnectionError, APIConnectOptions, APIStatusError, llm
from livekit.agents.types import DEFAULT_API_CONNECT_OPTIONS, NOT_GIVEN, NotGivenOr
from livekit.agents.utils import is_given
from livekit.agents.voice import AgentSession, UserInputTranscribedEvent

from tenuto.base.errors import Disconnected, TenutoError, Unreachable
from tenuto.base.options import RemoteOptions
from tenuto.base.turns import Usage
from tenuto.client import connect_async
from tenuto.integrations.conversation import Conversation, Speech

logger = logging.getLogger(__name__)


class LLM(llm.LLM[Any]):
    """The model of one conversation. When the agent is interrupted, the session keeps the tokens whose words were
    heard, as the chat context has them. Close it with the agent's session; that closes the session on the server."""

    def __init__(
        self, *, url: str, api_key: str | None = None, ttl: float | None = 3600, options: RemoteOptions | None = None
    ) -> None:
        """`url`: the server's. `ttl`: see `Conversation`. `options`: those of every turn."""
        super().__init__()
        self.conversation = Conversation(connect_async(url, api_key), ttl=ttl)
        self.options: RemoteOptions = options or {}
        self._drafts: set[asyncio.Task[None]] = set()

    @property
    def provider(self) -> str:
        return "tenuto"

    def chat(
        self,
        *,
        chat_ctx: llm.ChatContext,
        tools: list[llm.Tool] | None = None,
        conn_options: APIConnectOptions = DEFAULT_API_CONNECT_OPTIONS,
        parallel_tool_calls: NotGivenOr[bool] = NOT_GIVEN,
        tool_choice: NotGivenOr[llm.ToolChoice] = NOT_GIVEN,
        extra_kwargs: NotGivenOr[dict[str, Any]] = NOT_GIVEN,
    ) -> LLMStream:
        """`extra_kwargs`: options of this turn."""
        options = cast("RemoteOptions", {**self.options, **(extra_kwargs if is_given(extra_kwargs) else {})})
        options["tools"] = _definitions(tools or [])
        if is_given(tool_choice):
            options["tool_choice"] = tool_choice
        if is_given(parallel_tool_calls):
            options["parallel_tool_calls"] = parallel_tool_calls
        return LLMStream(self, options, chat_ctx=chat_ctx, tools=tools or [], conn_options=conn_options)

    def draft_for(self, session: AgentSession[Any]) -> None:
        """Computes what the user says to `session` while it is said."""
        speech = Speech()

        def heard(event: UserInputTranscribedEvent) -> None:
            drafting = asyncio.create_task(self._draft(session, speech, event))
            self._drafts.add(drafting)
            drafting.add_done_callback(self._drafts.discard)

        session.on("user_input_transcribed", heard)

    async def _draft(self, session: AgentSession[Any], speech: Speech, event: UserInputTranscribedEvent) -> None:
        agent = session.current_agent
        messages, _ = agent.chat_ctx.to_provider_format("openai", inject_dummy_user_message=False)
        said = speech.so_far(messages, event.transcript, final=event.is_final)
        try:
            await self.conversation.draft([*messages, said], _definitions(agent.tools))
        except TenutoError as error:
            logger.warning("the draft was not computed: %s", error)

    async def aclose(self) -> None:
        await super().aclose()
        await asyncio.gather(*self._drafts)
        await self.conversation.close()


def _definitions(tools: Sequence[Any]) -> list[dict[str, Any]]:
    return cast("list[dict[str, Any]]", llm.ToolContext(tools).parse_function_tools("openai"))


class LLMStream(llm.LLMStream):
    """An answer in progress."""

    _llm: LLM

    def __init__(self, model: LLM, options: RemoteOptions, **given: Any) -> None:
        self._options = options
        super().__init__(model, **given)

    async def _run(self) -> None:
        messages, _ = self._chat_ctx.to_provider_format("openai", inject_dummy_user_message=False)
        conversation = self._llm.conversation
        try:
            async with aclosing(cast("Any", conversation.answer(messages, **self._options))) as parts:
                async for part in parts:
                    calls = [llm.FunctionToolCall(name=c.name, arguments=c.arguments, call_id=c.id) for c in part.calls]
                    if part.text or calls:
                        delta = llm.ChoiceDelta(role="assistant", content=part.text or None, tool_calls=calls)
                        self._event_ch.send_nowait(llm.ChatChunk(id="", delta=delta))
        except (Unreachable, Disconnected) as error:
            raise APIConnectionError(str(error)) from error
        except TenutoError as error:
            raise APIStatusError(str(error), status_code=error.status, retryable=error.status in (429, 503)) from error
        if conversation.usage is not None:
            self._event_ch.send_nowait(llm.ChatChunk(id="", usage=_usage(conversation.usage)))


def _usage(usage: Usage) -> llm.CompletionUsage:
    return llm.CompletionUsage(
        completion_tokens=usage.generated,
        prompt_tokens=usage.prompt,
        prompt_cached_tokens=usage.cached,
        cache_read_tokens=usage.cached,
        total_tokens=usage.prompt + usage.generated,
    )
