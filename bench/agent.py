"""`python -m bench.agent [MODEL [CALLS]]`: tokens computed for an agent with 50 tool calls.

The model is forced to call a function, gets the result, calls again, and so on. This runs on one session, where each
result is the next turn, and as a client that resends the whole conversation, to servers without and with a prefix
cache. Answers are forced by a grammar and greedy, so that all three conversations are the same.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import httpx

from bench.server import server

SYSTEM = "You are an agent that reads the thermometers of a house, room by room, and reports what is too warm."
READ = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Read the thermometer of a room.",
        "parameters": {
            "type": "object",
            "properties": {"room": {"type": "integer", "minimum": 1, "maximum": 99}},
            "required": ["room"],
            "additionalProperties": False,
        },
    },
}


@dataclass(slots=True)
class Cost:
    """The total cost of an agent's calls."""

    prompt: int = 0  # tokens of all prompts
    computed: int = 0  # tokens computed for prompts and answers
    seconds: float = 0.0


def run(url: str, model: str, calls: int, session: str | None) -> Cost:
    """Runs an agent, on the session of this name or by resending the conversation."""
    cost, began = Cost(), time.perf_counter()
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Read all rooms, one after the other."},
    ]
    new = list(messages)
    with httpx.Client(base_url=url, timeout=600) as http:
        for call in range(calls):
            body: dict[str, Any] = {
                "model": model,
                "messages": new if session is not None else messages,
                "tools": [READ],
                "tool_choice": "required",
                "parallel_tool_calls": False,
                "temperature": 0,
                "max_tokens": 256,
            }
            if session is not None:
                body["session_id"] = session
            answer = http.post("/v1/chat/completions", json=body).raise_for_status().json()
            usage, message = answer["usage"], answer["choices"][0]["message"]
            cost.prompt += usage["prompt_tokens"]
            cost.computed += usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
            cost.computed += usage["completion_tokens"] - 1  # the last sampled token is computed in the next turn
            result = {
                "role": "tool",
                "tool_call_id": message["tool_calls"][0]["id"],
                "content": f"{15 + call % 9} degrees",
            }
            new = [result]
            messages += [{name: value for name, value in message.items() if value is not None}, result]
    cost.seconds = time.perf_counter() - began
    return cost


def main() -> None:
    """Prints the figures."""
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    calls = int(sys.argv[2]) if len(sys.argv) > 2 else 50
    ways: tuple[tuple[str, str | None, tuple[str, ...]], ...] = (
        ("on one session", "agent", ("--no-prefix-cache",)),
        ("resent", None, ("--no-prefix-cache",)),
        ("resent, prefix cache", None, ()),
    )
    print(f"{model}: an agent of {calls} tool calls")
    first = 0
    for name, session, options in ways:
        with server(model, 8192, *options) as running:
            cost = run(running.url, "default", calls, session)
        first = first or cost.computed
        ratio = cost.computed / first
        print(
            f"  {name:22} {cost.prompt:8} prompt tokens, {cost.computed:8} tokens computed ({ratio:.1f} times),"
            f" {cost.seconds:6.1f} s"
        )


if __name__ == "__main__":
    main()
