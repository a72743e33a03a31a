"""OpenAI's agents from the package index keep their history in a session that is backed by the server's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pydantic import BaseModel, Field

from tests.integrations.heard import turns_of
from tests.serve.server import Server

pytest.importorskip("agents", reason="openai-agents is not installed")

import agents
from agents import Agent, ModelSettings, Runner, function_tool

from tenuto.integrations.openai_agents import TenutoSession

agents.set_tracing_disabled(disabled=True)  # it would be sent to OpenAI


class Word(BaseModel):
    word: str = Field(max_length=12)


def brief(**options: Any) -> Any:
    """Returns an agent whose answers end soon, by their schema."""
    settings = ModelSettings(parallel_tool_calls=False, max_tokens=64, temperature=0)
    given = {"instructions": "Be brief.", "model_settings": settings, "output_type": Word, **options}
    return Agent(name="brief", model="smollm2", **given)


@asynccontextmanager
async def opened(server: Server, **options: Any) -> AsyncIterator[TenutoSession]:
    session = TenutoSession(url=server.url, **options)
    try:
        yield session
    finally:
        await session.close()


async def asked(session: TenutoSession, text: str, agent: Any = None) -> Any:
    """Runs the agent, and returns the usage of the run."""
    run = await Runner.run(agent or brief(), text, session=session, run_config=session.run_config())
    return run.context_wrapper.usage


def gone(server: Server, session: str) -> bool:
    with server.client() as http:
        return http.get(f"/v1/sessions/{session}").status_code == 404


def test_runs_go_on_in_one_session_of_the_server_also_from_another_object(smollm2_server: Server) -> None:
    async def talk() -> None:
        async with opened(smollm2_server) as session:
            first = await asked(session, "Name a fruit.")
            second = await asked(session, "What colour is it?")
            assert second.input_tokens_details.cached_tokens >= first.total_tokens - 1
            (state,) = session.states
            async with opened(smollm2_server, conversation_id=session.session_id) as again:
                third = await asked(again, "Where does it grow?")
                assert again.states == [state]
            assert third.input_tokens_details.cached_tokens >= second.total_tokens - 1
            turns = turns_of(smollm2_server, state)
            assert [item["role"] for item in await session.get_items()] == ["user", "assistant"] * 3
            assert len(turns) == 3
            assert "Where does it grow?" in turns[2]["input_text"]
            await session.clear_session()
            assert gone(smollm2_server, state)
            assert await session.get_items() == []

    asyncio.run(talk())


def test_a_correction_after_popped_items_forks_the_state_before_them(smollm2_server: Server) -> None:
    async def talk() -> None:
        async with opened(smollm2_server) as session:
            first = await asked(session, "Name a fruit.")
            await asked(session, "What colour is it?")
            assert (await session.pop_item())["role"] == "assistant"
            assert (await session.pop_item())["role"] == "user"
            other = await asked(session, "Where does it grow?")
            assert other.input_tokens_details.cached_tokens >= first.total_tokens - 1
            before, after = (turns_of(smollm2_server, state) for state in session.states)
            assert before[0]["output_text"] == after[0]["output_text"]
            assert "What colour" in before[1]["input_text"]
            assert "Where does" in after[1]["input_text"]
            await session.clear_session()

    asyncio.run(talk())


def test_a_forked_session_shares_the_state_and_leaves_the_other_as_it_was(smollm2_server: Server) -> None:
    async def talk() -> None:
        async with opened(smollm2_server) as session:
            first = await asked(session, "Name a fruit.")
            child = await session.fork()
            answers = [await asked(each, "What colour is it?") for each in (child, session)]
            assert all(answer.input_tokens_details.cached_tokens >= first.total_tokens - 1 for answer in answers)
            assert answers[0].output_tokens == answers[1].output_tokens
            assert child.states != session.states
            await child.clear_session()
            await child.close()
            assert [item["role"] for item in await session.get_items()] == ["user", "assistant"] * 2
            assert len(turns_of(smollm2_server, session.states[-1])) == 2
            await session.clear_session()

    asyncio.run(talk())


def test_a_streamed_run_goes_on_in_the_session(smollm2_server: Server) -> None:
    async def talk() -> None:
        async with opened(smollm2_server) as session:
            first = await asked(session, "Name a fruit.")
            run = Runner.run_streamed(brief(), "What colour is it?", session=session, run_config=session.run_config())
            pieces = [
                event.data.delta
                async for event in run.stream_events()
                if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
            ]
            assert Word.model_validate_json("".join(pieces)) == run.final_output
            cached = run.context_wrapper.usage.input_tokens_details.cached_tokens
            assert cached >= first.total_tokens - 1
            assert len(session.states) == 1
            await session.clear_session()

    asyncio.run(talk())


def test_the_result_of_a_tool_is_the_next_turn(smollm2_server: Server) -> None:
    @function_tool
    def temperature(day: int) -> str:
        """The temperature of a day, 1 to 9."""
        agent.model_settings.tool_choice = "none"
        return f"{10 + day} degrees"

    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=64, temperature=0)
    agent = brief(tools=[temperature], model_settings=settings, reset_tool_choice=False)

    async def talk() -> None:
        async with opened(smollm2_server) as session:
            usage = await asked(session, "How warm is it on day 3?", agent)
            items = await session.get_items()
            assert [item.get("role") or item["type"] for item in items][:3] == [
                "user", "function_call", "function_call_output",
            ]  # fmt: skip
            call, answer = usage.request_usage_entries[:2]
            assert answer.input_tokens_details.cached_tokens >= call.total_tokens - 1
            assert len(session.states) == 1
            assert "degrees" in turns_of(smollm2_server, session.states[0])[1]["input_text"]
            await session.clear_session()

    asyncio.run(talk())
