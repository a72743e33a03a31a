"""Functions that a model may call, and its calls of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from tenuto.base.checks import check_json_text, check_nesting, check_unicode, json_text, parsed_json, shown, wrong
from tenuto.base.errors import InvalidRequest

MAX_TOOLS = 128
MAX_TOOLS_SIZE = 2**20
"""Maximum size of all tools' definitions, in characters of JSON."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function. `arguments`: a JSON object as text. `id`: the name by which its result refers to it."""

    name: str
    arguments: str = "{}"
    id: str = ""

    def __post_init__(self) -> None:
        """Raises `InvalidRequest`."""
        for name in ("name", "arguments", "id"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise wrong(f"a tool call's {name}", value, "text", param="tool_calls")
            check_unicode(f"the {name} of a tool call", value)
        arguments = json.dumps(self.parsed(), ensure_ascii=False)
        check_unicode("the arguments of a tool call", arguments)  # JSON escapes can hide surrogates

    @classmethod
    def of(cls, given: object) -> ToolCall:
        """Reads a client's object. Name and arguments may be inside `function`, as in OpenAI's API. Raises
        `InvalidRequest`."""
        if isinstance(given, cls):
            return given
        given = flat_call(given)
        if not isinstance(given, Mapping) or not {"name"} <= set(given) <= set(cls.__annotations__):
            raise wrong("a tool call", given, "name, arguments and id", param="tool_calls")
        return cls(**given)

    def body(self) -> dict[str, str]:
        """Returns the call as a part of an assistant's message."""
        return {"id": self.id, "name": self.name, "arguments": self.arguments}

    def parsed(self) -> dict[str, Any]:
        """Parses the arguments. Raises `InvalidRequest`."""
        arguments = parsed_json("a tool call's arguments are not JSON", self.arguments or "{}", "tool_calls")
        if not isinstance(arguments, dict):
            raise InvalidRequest(
                f"a tool call's arguments are {shown(arguments)}; allowed: a JSON object", param="tool_calls"
            )
        check_nesting("a tool call's arguments", arguments, "tool_calls")
        return arguments


def flat_call(given: object) -> object:
    """Converts a call in OpenAI's form, `{"id": ..., "type": "function", "function": {...}}`, to a flat object."""
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(function, Mapping) or given.get("type") != "function":
        return given
    rest = {key: value for key, value in given.items() if key not in ("function", "type", "index")}
    return {**rest, **function}


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions that a model may call, for its template: a JSON list of `{"type": "function", "function": {"name",
    "description", "parameters"}}`."""

    source: str = ""

    def __post_init__(self) -> None:
        """Raises `InvalidRequest`."""
        check_json_text("tools", self.source, MAX_TOOLS_SIZE)

    @classmethod
    def of(cls, functions: list[Mapping[str, Any]]) -> Tools:
        """Converts definitions of functions with `name` and optionally `description` and `parameters`."""
        if not functions:
            return cls()
        wrapped = [{"type": "function", "function": dict(function)} for function in functions]
        tools = cls(json_text("tools", wrapped, "tools"))
        check_nesting("tools", wrapped, "tools")
        return tools

    def parsed(self) -> list[dict[str, Any]]:
        """Parses the list. Raises `InvalidRequest`."""
        if not self.source:
            return []
        tools = parsed_json("tools are not JSON", self.source, "tools")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise InvalidRequest("tools are not a list of objects", param="tools")
        check_nesting("tools", tools, "tools")
        return tools

    @property
    def digest(self) -> str:
        """A digest of the definitions; empty without tools."""
        return hashlib.sha256(self.source.encode()).hexdigest()[:16] if self.source else ""

    def __bool__(self) -> bool:
        return bool(self.source)


NO_TOOLS = Tools()

ToolFormat = Literal["json", "named", "tags", "list", "functions", "channels"]
"""Formats in which models write calls:

- json: an object or a list of objects that is the whole answer (Llama 3, models without tools), or the whole text after
  a control token (Mistral's Nemo, Granite 3)
- named: names, each followed by its arguments, with control tokens around them (later models of Mistral)
- tags: objects between `<tool_call>` and `</tool_call>` (Hermes, Qwen)
- list: a list of objects between `<TOOLCALL>` and `</TOOLCALL>` (Nemotron Nano 2)
- functions: `<function=name>` and its `<parameter=name>`s, whose values are text, between the same tags as objects
  (Qwen3-Coder, Nemotron 3)
- channels: messages addressed to `functions.name`, beside others with thoughts and text (gpt-oss)
"""
TAGS: dict[ToolFormat, tuple[str, str]] = {
    "tags": ("<tool_call>", "</tool_call>"),
    "list": ("<TOOLCALL>", "</TOOLCALL>"),
    "functions": ("<tool_call>", "</tool_call>"),
}
"""The tags around calls, in the formats in which these are text."""
MARKS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|tool_call|>", "<|/tool_call|>")
"""Control tokens around or within calls, in the other formats."""
THOUGHTS = ("<think>", "</think>")
"""The tags around thoughts. Some models have control tokens for these tags, and for those around calls."""
CHANNELS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")
"""Control tokens around messages and within their headers."""

Thinks = Literal["no", "tags", "opened"]


@dataclass(frozen=True, slots=True)
class ModelHabits:
    """The formats in which a model writes calls and thoughts. `arguments`: the key of a call's arguments. `thinks`:
    whether thoughts stand between `<think>` and `</think>`; `opened` if the template writes the first tag. `marks`: the
    control tokens around and within calls and thoughts, by their texts. `short_ids`: the model writes the ids of calls
    itself, as nine alphanumeric characters. `switches`: each variable of the template and its value that change
    `thinks`, with the changed value. `after_result`: the value of `thinks` after a tool's result, if it differs.
    `late_system`: system messages may follow others."""

    tools: ToolFormat = "json"
    arguments: str = "arguments"
    thinks: Thinks = "no"
    marks: tuple[tuple[str, int], ...] = ()
    short_ids: bool = False
    switches: tuple[tuple[str, bool, Thinks], ...] = ()
    after_result: Thinks | None = None
    late_system: bool = True

    def mark(self, text: str) -> int | None:
        """Returns the control token with this text, or `None` if calls do not use it."""
        return dict(self.marks).get(text)

    @property
    def opens(self) -> str:
        """The text of the control token that precedes calls; empty for models without one."""
        return next((text for text in ("[TOOL_CALLS]", "<|tool_call|>") if self.mark(text) is not None), "")

    def after(self, role: str) -> ModelHabits:
        """Returns the formats of an answer to a message of this role; see `after_result`."""
        if role != "tool" or self.after_result is None:
            return self
        return replace(self, thinks=self.after_result, switches=())

    def with_variables(self, variables: Mapping[str, Any]) -> ModelHabits:
        """Returns the formats of an answer if the template is rendered with `variables`; see `switches`."""
        for name, value, thinks in self.switches:
            if variables.get(name) is value:
                return replace(self, thinks=thinks)
        return self
