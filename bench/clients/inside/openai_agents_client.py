"""OpenAI's agents: a tool loop over both interfaces, and a conversation that the server stores."""

import asyncio
import sys

import agents
from agents import Agent, OpenAIChatCompletionsModel, OpenAIConversationsSession, OpenAIResponsesModel, Runner
from openai import AsyncOpenAI

ANSWER = "All of it is done."
agents.set_tracing_disabled(True)
asked: list[str] = []


@agents.function_tool
def look_up(city: str) -> str:
    """Looks a city up."""
    asked.append(city)
    return "It is large."


async def main() -> None:
    """Runs the agents."""
    client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        agent = Agent(name="a", instructions="Look it up.", model=kind("gpt-4o", client), tools=[look_up])
        assert (await Runner.run(agent, "Which city?")).final_output == ANSWER
        assert asked.pop() == "Rome"
    session = OpenAIConversationsSession(openai_client=client)
    for _ in range(3):
        assert (await Runner.run(agent, "Which city?", session=session)).final_output == ANSWER
    assert asked == ["Rome"]  # the later turns have its result in their conversation
    items = await session.get_items()
    assert [item.get("role") or item["type"] for item in items] == [
        "user", "function_call", "function_call_output", "assistant", "user", "assistant", "user", "assistant",
    ]  # fmt: skip
    run = await Runner.run(agent, "Which city?", conversation_id=session.session_id)
    assert run.final_output == ANSWER
    await session.clear_session()


asyncio.run(main())
