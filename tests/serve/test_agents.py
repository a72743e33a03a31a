"""Agent frameworks from the package index run their tool loops on a server, unchanged. The model is too small to call
tools by itself, so grammars force the calls."""

from __future__ import annotations

import asyncio
from typing import Any

import agents
import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.serve.server import Server

agents.set_tracing_disabled(disabled=True)  # it would be sent to OpenAI


class Weather(BaseModel):
    warm: bool


def client_of(server: Server) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def model_of(client: AsyncOpenAI, kind: str) -> Any:
    if kind == "chat":
        return OpenAIChatCompletionsModel(model="smollm2", openai_client=client)
    return OpenAIResponsesModel(model="smollm2", openai_client=client)


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_openais_agents_call_a_tool_and_answer_in_a_schema(smollm2_server: Server, kind: str) -> None:
    asked: list[int] = []

    @function_tool(is_enabled=lambda _context, _agent: len(asked) < 2)
    def temperature(day: int) -> str:
        """The temperature of a day, 1 to 9."""
        asked.append(day)
        return f"{10 + day} degrees"

    async def run() -> Any:
        async with client_of(smollm2_server) as client:
            agent = Agent(
                name="weather",
                instructions="Call the tool, then say whether it is warm.",
                model=model_of(client, kind),
                tools=[temperature],
                model_settings=ModelSettings(
                    tool_choice="required", parallel_tool_calls=False, max_tokens=64, temperature=0
                ),
                output_type=Weather,  # after the first call, tool_choice is auto: a call, or an answer in this schema
            )
            return await Runner.run(agent, "Is it warm on day 3?", max_turns=5)

    done = asyncio.run(run())
    assert asked
    assert isinstance(done.final_output, Weather)
    assert [item.type for item in done.new_items][:2] == ["tool_call_item", "tool_call_output_item"]


def test_openais_agents_stream_and_continue_from_a_response(smollm2_server: Server) -> None:
    settings = ModelSettings(max_tokens=200, temperature=0)

    async def talk() -> tuple[str, Any]:
        async with client_of(smollm2_server) as client:
            model = model_of(client, "responses")
            agent = Agent(name="brief", instructions="Be brief.", model=model, model_settings=settings)
            first = await Runner.run(agent, "Name a fruit.")
            streamed = Runner.run_streamed(agent, "And another?", previous_response_id=first.last_response_id)
            pieces = [
                event.data.delta
                async for event in streamed.stream_events()
                if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
            ]
            return "".join(pieces), streamed.raw_responses[-1].usage

    text, usage = asyncio.run(talk())
    assert text
    assert usage.input_tokens_details.cached_tokens > 20  # the first turn was not computed again


def test_pydantics_agents_call_a_tool_and_answer_in_a_schema(smollm2_server: Server) -> None:
    asked: list[int] = []

    async def once(_: Any, tool: Any) -> Any:
        return tool if not asked else None

    async def run() -> Any:
        async with client_of(smollm2_server) as client:
            agent = PydanticAgent(
                OpenAIChatModel("smollm2", provider=OpenAIProvider(openai_client=client)),
                output_type=Weather,  # sent as a tool: calls are required
                system_prompt="Look the temperature up, then say whether it is warm.",
                model_settings={"max_tokens": 64, "temperature": 0, "parallel_tool_calls": False},
            )

            @agent.tool_plain(prepare=once)
            def temperature(day: int) -> str:
                """The temperature of a day."""
                asked.append(day)
                return f"{10 + day} degrees"

            return await agent.run("Is it warm on day 3?")

    done = asyncio.run(run())
    assert isinstance(done.output, Weather)
    assert done.usage.requests >= 1
