"""Pipecat's pipelines from the package index, with the service that has a session. Words are spoken by a processor that
takes a moment for each, in the place of a voice and a loudspeaker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Self

import pytest

from tests.integrations.heard import QUESTION, STORY, beginnings, open_sessions, turns_of
from tests.serve.server import Server

pytest.importorskip("pipecat", reason="pipecat-ai is not installed; python -m bench.clients pipecat runs this")

from pipecat.adapters.llm.schemas.function_schema import FunctionSchema
from pipecat.adapters.llm.schemas.tools_schema import ToolsSchema
from pipecat.frames import frames
from pipecat.metrics.metrics import LLMTokenUsage, LLMUsageMetricsData
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair, LLMUserAggregatorParams
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.llm_service import FunctionCallParams
from pipecat.turns.user_turn_strategies import ExternalUserTurnStrategies
from pipecat.workers.runner import WorkerRunner

from tenuto.integrations.pipecat import TenutoLLMService

SECONDS_A_WORD = 0.05
END = "<|im_end|>"


class Voice(FrameProcessor):
    """Speaks one word after the other, as far as no interruption comes."""

    def __init__(self) -> None:
        super().__init__()
        self.spoken: list[str] = []
        self.usage: list[LLMTokenUsage] = []
        self._rest = ""

    async def process_frame(self, frame: Any, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, frames.MetricsFrame):
            self.usage += [data.value for data in frame.data if isinstance(data, LLMUsageMetricsData)]
        if isinstance(frame, frames.InterruptionFrame):
            self._rest = ""
        if isinstance(frame, frames.LLMTextFrame):
            self._rest += frame.text
            *words, self._rest = self._rest.split(" ")
            for word in words:
                await self._speak(word)
            return
        if isinstance(frame, frames.LLMFullResponseEndFrame):
            await self._speak(self._rest)
            self._rest = ""
        await self.push_frame(frame, direction)

    async def _speak(self, word: str) -> None:
        if word:
            await asyncio.sleep(SECONDS_A_WORD)
            self.spoken.append(word)
            await self.push_frame(frames.TTSTextFrame(word, text_type="word"))


class Talk:
    """A pipeline without sound: what the user says comes as transcripts."""

    def __init__(self, server: Server, *, max_tokens: int, tools: ToolsSchema | None = None) -> None:
        settings = TenutoLLMService.Settings(
            system_instruction="You tell stories.", max_tokens=max_tokens, temperature=0
        )
        self.service = TenutoLLMService(url=server.url, settings=settings)
        self.context = LLMContext(tools=tools) if tools is not None else LLMContext()
        params = LLMUserAggregatorParams(user_turn_strategies=ExternalUserTurnStrategies())
        aggregators = LLMContextAggregatorPair(self.context, user_params=params)
        self.voice = Voice()
        parts = [
            self.service.drafts(self.context),
            aggregators.user(),
            self.service,
            self.voice,
            aggregators.assistant(),
        ]
        enabled = PipelineParams(enable_metrics=True, enable_usage_metrics=True)
        self.worker = PipelineWorker(Pipeline(parts), params=enabled, cancel_on_idle_timeout=False)

    async def __aenter__(self) -> Self:
        runner = WorkerRunner()
        await runner.add_workers(self.worker)
        self._running = asyncio.create_task(runner.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.worker.cancel()
        await self._running

    @property
    def messages(self) -> list[Any]:
        return self.context.get_messages()

    @property
    def session(self) -> str:
        assert self.service.conversation.session_id is not None
        return self.service.conversation.session_id

    async def say(self, text: str) -> None:
        """The user speaks. All transcripts but the last may still change."""
        await self.worker.queue_frame(frames.ProposedUserStartedSpeakingFrame())
        for heard in beginnings(text):
            await self.worker.queue_frame(frames.InterimTranscriptionFrame(heard, "user", ""))
            await asyncio.sleep(0.15)
        await self.worker.queue_frame(frames.TranscriptionFrame(text, "user", ""))
        await self.worker.queue_frame(frames.ProposedUserStoppedSpeakingFrame())

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.01)


def test_an_interrupted_bot_keeps_what_it_said_and_computes_while_the_user_speaks(smollm2_server: Server) -> None:
    async def talk() -> None:
        async with Talk(smollm2_server, max_tokens=150) as talk:
            await talk.say(STORY)
            await talk.until(lambda: len(talk.voice.spoken) >= 12)
            await talk.say(QUESTION)
            await talk.until(lambda: talk.voice.usage)
            heard = talk.messages[1]["content"]
            assert 12 <= len(heard.split()) < 60
            first, second = turns_of(smollm2_server, talk.session)
            assert first["output_text"] == heard  # tokens that were sampled, not the text encoded again
            assert QUESTION in second["input_text"]
            (usage,) = talk.voice.usage
            assert usage.cache_read_input_tokens > second["start"]  # more than the history: the draft
            await talk.until(lambda: len(talk.messages) == 4)
            assert talk.messages[3]["content"] == second["output_text"].removesuffix(END)

    asyncio.run(talk())
    assert not open_sessions(smollm2_server)


def test_a_pipeline_that_ends_in_the_middle_of_an_answer_leaves_nothing(smollm2_server: Server) -> None:
    async def talk() -> None:
        async with Talk(smollm2_server, max_tokens=1000) as talk:
            await talk.say(STORY)
            await talk.until(lambda: talk.voice.spoken)
            assert talk.session in open_sessions(smollm2_server)

    asyncio.run(talk())
    assert not open_sessions(smollm2_server)


def test_a_function_is_called_and_its_result_is_the_next_turn(smollm2_server: Server) -> None:
    async def temperature(params: FunctionCallParams) -> None:
        asked.append(params.arguments)
        talk.context.set_tool_choice("none")
        await params.result_callback("13 degrees")

    asked: list[Any] = []
    day = {"day": {"enum": [3]}}
    schema = FunctionSchema("temperature", "The temperature of a day.", day, ["day"])
    talk = Talk(smollm2_server, max_tokens=64, tools=ToolsSchema(standard_tools=[schema]))

    async def run() -> None:
        async with talk:
            talk.service.register_function("temperature", temperature)
            talk.context.set_tool_choice("required")
            await talk.say("How warm is it on day 3?")
            await talk.until(lambda: len(talk.voice.usage) == 2)
            assert asked[0]["day"] == 3
            assert "13 degrees" in turns_of(smollm2_server, talk.session)[1]["input_text"]
            call, answer = talk.voice.usage
            assert answer.cache_read_input_tokens >= call.prompt_tokens

    asyncio.run(run())
    assert not open_sessions(smollm2_server)
