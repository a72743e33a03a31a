"""LiteLLM, over OpenAI's interface and Anthropic's."""

import sys

import litellm

ANSWER = "All of it is done."
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
litellm.telemetry = False

for model, base in (("openai/gpt-4o", f"{sys.argv[1]}/v1"), ("anthropic/claude-x", sys.argv[1])):
    options = {"model": model, "api_base": base, "api_key": "none", "num_retries": 0}
    messages = [{"role": "user", "content": "Which city?"}]
    asked = litellm.completion(messages=messages, tools=[TOOL], **options).choices[0].message
    (made,) = asked.tool_calls
    assert made.function.name == "look_up", made
    messages += [asked.model_dump(), {"role": "tool", "tool_call_id": made.id, "content": "large"}]
    stream = litellm.completion(messages=messages, tools=[TOOL], stream=True, **options)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == ANSWER, text
    try:
        litellm.completion(messages=[{"role": "user", "content": "long " * 60_000}], max_tokens=5, **options)
    except litellm.ContextWindowExceededError:
        pass
    else:
        raise AssertionError("a prompt that does not fit was answered")
