"""OpenAI's own client."""

import sys

import openai

ANSWER = "All of it is done."
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)

assert [model.id for model in client.models.list()] == ["gpt-4o", "claude-x"]

messages = [{"role": "user", "content": "Which city?"}]
asked = client.chat.completions.create(model="gpt-4o", messages=messages, tools=[TOOL], reasoning_effort="low")
(made,) = asked.choices[0].message.tool_calls
assert (made.function.name, made.function.arguments) == ("look_up", '{"city": "Rome"}')
messages += [asked.choices[0].message, {"role": "tool", "tool_call_id": made.id, "content": "large"}]
stream = client.chat.completions.create(model="gpt-4o", messages=messages, tools=[TOOL], stream=True)
assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == ANSWER

web = {"type": "web_search"}
first = client.responses.with_raw_response.create(model="gpt-4o", input="Hello", tools=[web])
assert first.headers["x-tenuto-left-undone"] == "tools.web_search"
assert first.parse().output_text == ANSWER
conversation = client.conversations.create(items=[{"type": "message", "role": "user", "content": "Hello"}])
later = client.responses.create(model="gpt-4o", input="And now?", conversation=conversation.id)
assert later.output_text == ANSWER
assert len(client.conversations.items.list(conversation.id).data) == 3

refused = None
try:
    client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": "long " * 60_000}])
except openai.BadRequestError as error:
    refused = error
assert refused is not None
assert refused.code == "context_length_exceeded", refused
