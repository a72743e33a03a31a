"""Anthropic's own client: messages, a stream, its tool runner, and the error for prompts that are too long."""

import sys

import anthropic

ANSWER = "All of it is done."
asked: list[str] = []
client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)


@anthropic.beta_tool
def look_up(city: str) -> str:
    """Looks a city up."""
    asked.append(city)
    return "It is large."


hello = [{"role": "user", "content": "Which city?"}]
answer = client.messages.create(model="claude-x", max_tokens=99, messages=hello)
assert (answer.content[0].text, answer.stop_reason) == (ANSWER, "end_turn")
with client.messages.stream(model="claude-x", max_tokens=99, messages=hello, system="Be brief.") as stream:
    assert "".join(stream.text_stream) == ANSWER

for streamed in (False, True):
    runner = client.beta.messages.tool_runner(
        model="claude-x", max_tokens=99, tools=[look_up], messages=hello, stream=streamed
    )
    answers = [turn.get_final_message() if streamed else turn for turn in runner]
    assert [one.stop_reason for one in answers] == ["tool_use", "end_turn"]
    assert answers[-1].content[0].text == ANSWER
    assert asked.pop() == "Rome"

refused = None
try:
    client.messages.create(model="claude-x", max_tokens=9, messages=[{"role": "user", "content": "long " * 60_000}])
except anthropic.BadRequestError as error:
    refused = error
assert refused is not None
assert "prompt is too long" in str(refused), refused
