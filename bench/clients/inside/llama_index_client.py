"""LlamaIndex's model of OpenAI's interface: messages, streams, and an agent with a tool."""

import asyncio
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

ANSWER = "All of it is done."
asked: list[str] = []
model = OpenAILike(
    model="gpt-4o",
    api_base=f"{sys.argv[1]}/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    max_retries=0,
)


def look_up(city: str) -> str:
    """Looks a city up."""
    asked.append(city)
    return "It is large."


async def agent() -> str:
    """Returns the answer of an agent with a tool."""
    runner = FunctionAgent(tools=[look_up], llm=model, system_prompt="Be brief.", streaming=True)
    return str(await runner.run("Which city?"))


messages = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Which city?")]
assert model.chat(messages).message.content == ANSWER
assert "".join(chunk.delta or "" for chunk in model.stream_chat(messages)) == ANSWER
assert model.complete("Which city?").text == ANSWER
assert asyncio.run(agent()) == ANSWER
assert asked == ["Rome"]
