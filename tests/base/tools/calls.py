"""Formats, functions and calls that several tests use, and a reader of whole answers."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tenuto.base.tools.answer_part import AnswerPart
from tenuto.base.tools.answers import AnswerReader
from tenuto.base.tools.definitions import ModelHabits

TAGS, JSON, LIST = ModelHabits("tags"), ModelHabits("json"), ModelHabits("list")
FUNCTION_TAGS, CHANNEL_MARKS = ModelHabits("functions"), ModelHabits("channels")
LATER_MISTRAL = ModelHabits("named", marks=(("[TOOL_CALLS]", 1), ("[CALL_ID]", 2), ("[ARGS]", 3)))
NEMO, GRANITE = ModelHabits("json", marks=(("[TOOL_CALLS]", 1),)), ModelHabits("json", marks=(("<|tool_call|>", 1),))
LLAMA, NAMED = ModelHabits("json", "parameters"), ModelHabits("named")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS = {"weather": SCHEMA, "stop": None}
ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
STOP = '{"name": "stop", "arguments": {}}'


def read(habits: ModelHabits, pieces: Sequence[str], names: Sequence[str] = tuple(FUNCTIONS)) -> AnswerPart:
    reader, whole = AnswerReader(habits, names), AnswerPart()
    for said in [*map(reader.push, pieces), reader.finish()]:
        whole.text += said.text
        whole.reasoning += said.reasoning
        whole.calls += said.calls
    return whole


def parts_of(said: AnswerPart) -> tuple[str, str, list[tuple[str, dict]]]:
    return said.text, said.reasoning, [(call.name, json.loads(call.arguments)) for call in said.calls]


CALLED = ("weather", {"city": "Rome"})
IN_TAGS = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
NO_ARGUMENTS = "<tool_call>\n<function=stop>\n</function>\n</tool_call>"
