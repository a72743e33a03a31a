"""LangChain's models of OpenAI's and Anthropic's interfaces: messages, streams, tools, and embeddings."""

import sys
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

ANSWER = "All of it is done."
url = sys.argv[1]


@tool
def look_up(city: str) -> str:
    """Looks a city up."""
    return f"{city} is large."


openai: dict[str, Any] = {"model": "gpt-4o", "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
claude = ChatAnthropic(model="claude-x", base_url=url, api_key="none", max_retries=0, max_tokens=99)
for model in (ChatOpenAI(**openai), ChatOpenAI(**openai, use_responses_api=True), claude):
    answer = model.invoke([("system", "Be brief."), ("user", "Which city?")])
    assert answer.text == ANSWER, answer
    assert answer.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.text for chunk in model.stream("Which city?")) == ANSWER
    asked = model.bind_tools([look_up]).invoke("Which city?")
    (made,) = asked.tool_calls
    assert (made["name"], made["args"]) == ("look_up", {"city": "Rome"})
    result = ToolMessage(look_up.invoke(made["args"]), tool_call_id=made["id"])
    assert model.bind_tools([look_up]).invoke([HumanMessage("Which city?"), asked, result]).text == ANSWER

embedded = OpenAIEmbeddings(model="gpt-4o", base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False)
first, second = embedded.embed_documents(["a", "b"])
assert len(first) == len(second) == len(embedded.embed_query("a"))
