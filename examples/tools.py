"""An agent's loop: the model calls functions, and each result is the next turn, so nothing is computed twice."""

import json

import tenuto

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"name": "weather", "description": "The weather in a city today.", "parameters": CITY},
    {"name": "population", "description": "The number of people in a city.", "parameters": CITY},
]
ANSWERS = {"weather": "Sunny, 24 degrees.", "population": "2.8 million people."}


def run(call: tenuto.ToolCall) -> dict[str, str]:
    """Carry out one call."""
    print(f"-> {call.name}({json.loads(call.arguments)['city']})")
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": ANSWERS[call.name]}


with tenuto.Engine(context_length=2048) as engine:
    session = engine.session(system="You answer questions about cities.")
    messages = [{"role": "user", "content": "What is the weather in Rome, and how many people live there?"}]
    for choice in ("required", {"name": "population"}, "none"):  # "auto" lets the model decide
        turn = session.turn(messages, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, max_new_tokens=48)
        usage = turn.result().usage
        messages = [run(call) for call in turn.tool_calls]
        print(f"[{usage.cached} of {usage.prompt} prompt tokens were there already]")
    print(turn.message["content"])
