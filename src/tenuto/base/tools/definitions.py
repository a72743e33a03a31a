"""Functions that a model may call, and its calls of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from tenuto.base.checks import check_nesting, check_unicode, shown
from tenuto.base.errors import InvalidRequest

MAX_TOOLS = 128
MAX_TOOLS_SIZE = 2**20
"""Characters of all tools' definitions as JSON."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function. `arguments`: a JSON object as text. `id`: what its result refers to."""

    name: str
    arguments: str = "{}"
    id: str = ""

    def __post_init__(self) -> None:
        """Raises `InvalidRequest`."""
        for name in ("name", "arguments", "id"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise InvalidRequest(f"a tool call's {name} is {shown(value)}; allowed: text", param="tool_calls")
            check_unicode(f"the {name} of a tool call", value)
        arguments = json.dumps(self.parsed(), ensure_ascii=False)
        check_unicode("the arguments of a tool call", arguments)  # which may have been escaped

    @classmethod
    def of(cls, given: object) -> ToolCall:
        """From a client's object, in which name and arguments may be those of its `function`, as others write it.
        Raises `InvalidRequest`."""
        if isinstance(given, cls):
            return given
        given = flat_call(given)
        if not isinstance(given, Mapping) or not {"name"} <= set(given) <= set(cls.__annotations__):
            raise InvalidRequest(f"a tool call is {shown(given)}; allowed: name, arguments and id", param="tool_calls")
        return cls(**given)

    def parsed(self) -> dict[str, Any]:
        """The arguments. Raises `InvalidRequest`."""
        try:
            arguments = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"a tool call's arguments are not JSON: {error}", param="tool_calls") from None
        if not isinstance(arguments, dict):
            raise InvalidRequest(
                f"a tool call's arguments are {shown(arguments)}; allowed: a JSON object", param="tool_calls"
            )
        check_nesting("a tool call's arguments", arguments, "tool_calls")
        return arguments


def flat_call(given: object) -> object:
    """A call in the form `{"id": ..., "type": "function", "function": {...}}`, as others write it, as we do."""
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(function, Mapping) or given.get("type") != "function":
        return given
    rest = {key: value for key, value in given.items() if key not in ("function", "type", "index")}
    return {**rest, **function}


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions a model is told of: a JSON list, each entry as templates expect it, `{"type": "function",
    "function": {"name", "description", "parameters"}}`."""

    source: str = ""

    def __post_init__(self) -> None:
        """Raises `InvalidRequest`."""
        if not isinstance(self.source, str):
            raise InvalidRequest(f"tools are {shown(self.source)}; allowed: JSON text", param="tools")
        if len(self.source) > MAX_TOOLS_SIZE:
            raise InvalidRequest(
                f"tools have {len(self.source)} characters; allowed: at most {MAX_TOOLS_SIZE}", param="tools"
            )
        check_unicode("tools", self.source)

    @classmethod
    def of(cls, functions: list[Mapping[str, Any]]) -> Tools:
        """From the definitions of functions: `name`, and if they have them `description` and `parameters`."""
        if not functions:
            return cls()
        wrapped = [{"type": "function", "function": dict(function)} for function in functions]
        try:
            tools = cls(json.dumps(wrapped, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"tools cannot be written as JSON: {error}", param="tools") from None
        check_nesting("tools", wrapped, "tools")
        return tools

    def parsed(self) -> list[dict[str, Any]]:
        """The list. Raises `InvalidRequest`."""
        if not self.source:
            return []
        try:
            tools = json.loads(self.source)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"tools are not JSON: {error}", param="tools") from None
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise InvalidRequest("tools are not a list of objects", param="tools")
        check_nesting("tools", tools, "tools")
        return tools

    @property
    def digest(self) -> str:
        """Tells them from others; empty if there are none."""
        return hashlib.sha256(self.source.encode()).hexdigest()[:16] if self.source else ""

    def __bool__(self) -> bool:
        return bool(self.source)


NO_TOOLS = Tools()

ToolFormat = Literal["json", "named", "tags", "list", "functions", "channels"]
"""How a model writes calls:

- json: an object or a list of objects that is the whole answer (Llama 3, models that know of no tools), or all that
  follows a control token (Mistral's Nemo, Granite 3)
- named: names, each followed by its arguments, with control tokens around them (later models of Mistral)
- tags: objects between `<tool_call>` and `</tool_call>` (Hermes, Qwen)
- list: a list of objects between `<TOOLCALL>` and `</TOOLCALL>` (Nemotron Nano 2)
- functions: `<function=name>` and its `<parameter=name>`s, whose values are text, between the same tags as objects
  (Qwen3-Coder, Nemotron 3)
- channels: messages that are addressed to `functions.name`, beside others with thoughts and with what is said (gpt-oss)
"""
TAGS: dict[ToolFormat, tuple[str, str]] = {
    "tags": ("<tool_call>", "</tool_call>"),
    "list": ("<TOOLCALL>", "</TOOLCALL>"),
    "functions": ("<tool_call>", "</tool_call>"),
}
"""What stands around calls, in the formats in which that is text."""
MARKS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|tool_call|>", "<|/tool_call|>")
"""Control tokens that stand around calls, or within them, in the other formats."""
THOUGHTS = ("<think>", "</think>")
"""What stands around thoughts. Some models have control tokens for these tags, and for those around calls."""
CHANNELS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")
"""Control tokens that stand around messages, and within what precedes their content."""

Thinks = Literal["no", "tags", "opened"]


@dataclass(frozen=True, slots=True)
class ModelHabits:
    """How a model writes what is not text for its readers. `arguments`: the key of a call's arguments. `thinks`:
    between `<think>` and `</think>`, `opened` if the template writes the first. `marks`: the control tokens that the
    template writes around calls and thoughts, and within them, by their texts. `short_ids`: the ids of calls are nine
    letters and digits, which the model writes itself. `switches`: variables of the template, their values and how it
    thinks with each, where that is otherwise. `after_result`: how it thinks after a tool's result, where that is
    otherwise. `late_system`: system messages may follow others."""

    tools: ToolFormat = "json"
    arguments: str = "arguments"
    thinks: Thinks = "no"
    marks: tuple[tuple[str, int], ...] = ()
    short_ids: bool = False
    switches: tuple[tuple[str, bool, Thinks], ...] = ()
    after_result: Thinks | None = None
    late_system: bool = True

    def mark(self, text: str) -> int | None:
        """The control token with this text, if calls are written with it."""
        return dict(self.marks).get(text)

    @property
    def opens(self) -> str:
        """The text of the control token that precedes calls, if one does."""
        return next((text for text in ("[TOOL_CALLS]", "<|tool_call|>") if self.mark(text) is not None), "")

    def after(self, role: str) -> ModelHabits:
        """The habits in an answer to a message of this role."""
        if role != "tool" or self.after_result is None:
            return self
        return replace(self, thinks=self.after_result, switches=())

    def told(self, variables: Mapping[str, Any]) -> ModelHabits:
        """The habits where the template is told `variables`."""
        for name, value, thinks in self.switches:
            if variables.get(name) is value:
                return replace(self, thinks=thinks)
        return self
