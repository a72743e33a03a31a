"""The functions that an answer may or must call, and the grammars that force it to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from tenuto.base.checks import check_unicode, flag, items, shown, wrong
from tenuto.base.errors import InvalidRequest
from tenuto.base.options import TOOL_OPTIONS
from tenuto.base.tools.answers import Reading
from tenuto.base.tools.call_grammars import has_thoughts, shape_of
from tenuto.base.tools.call_text import types_of
from tenuto.base.tools.definitions import MAX_TOOLS, THOUGHTS, ModelHabits, Tools
from tenuto.base.tools.grammar import Grammar

ToolChoice = Literal["auto", "none", "required"]
NAME = r"^[A-Za-z0-9_.-]{1,64}$"
"""The pattern of a function's name."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions in a model's prompt, each a mapping with `name` and optionally `description` and `parameters`, a
    JSON schema, and their use in the answer. With `choice` "auto" the model may call them. With "none" no text is
    parsed as a call. "required" forces a call by a grammar: of any function, or of the one named `only`. `parallel`
    allows several calls. `allowed`: names of the only functions that may be called; empty for all."""

    functions: tuple[Mapping[str, Any], ...] = ()
    choice: ToolChoice = "auto"
    only: str = ""
    parallel: bool = True
    allowed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises `InvalidRequest`."""
        if len(self.functions) > MAX_TOOLS:
            raise InvalidRequest(f"there are {len(self.functions)} tools; allowed: at most {MAX_TOOLS}", param="tools")
        names = [function["name"] for function in self.functions]
        for number, name in enumerate(names):
            if name in names[:number]:
                raise InvalidRequest(
                    f"two tools are called {name!r}; allowed: every name once", param=f"tools[{number}].name"
                )
        if self.choice not in get_args(ToolChoice):
            raise wrong("tool_choice", self.choice, f"{', '.join(get_args(ToolChoice))}, or a function's name")
        if unknown := [name for name in self.allowed if name not in names]:
            raise InvalidRequest(
                f"tool_choice allows {shown(unknown[0])}; allowed: functions that tools has", param="tool_choice"
            )
        if self.choice == "required" and not self.chosen:
            raise InvalidRequest(
                "tool_choice names a function that tools does not have; allowed: one of them", param="tool_choice"
            )
        _ = self.definitions  # raises `InvalidRequest` for definitions that cannot be written

    @classmethod
    def of(cls, tools: object, choice: object = None, parallel: object = None) -> ToolUse:
        """Reads the values of a Python client. A tool is a function's definition, or an object whose `function` is one.
        `choice`: "auto", "none", "required", or an object with the `name` of the function that must be called. Raises
        `InvalidRequest`."""
        functions = tuple(_function(number, given) for number, given in enumerate(items("tools", tools, "a list")))
        parallel = parallel is None or flag("parallel_tool_calls", parallel)
        only = unwrapped(choice)
        if isinstance(only, Mapping):
            name = only.get("name")
            if set(only) != {"name"} or not isinstance(name, str):
                raise wrong("tool_choice", choice, "an object with a function's name")
            return cls(functions, "required", name, parallel)
        chosen = "auto" if choice is None else choice
        return cls(functions, chosen, parallel=parallel)  # type: ignore[arg-type] # checked in `__post_init__`

    @classmethod
    def among(cls, options: Mapping[str, object]) -> ToolUse | None:
        """Reads a turn's options. Returns `None` if they do not mention tools. Raises `InvalidRequest`."""
        tools, choice, parallel = (options.get(name) for name in TOOL_OPTIONS)
        if tools is not None:
            return cls.of(tools, choice, parallel)
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice without tools; allowed: with tools", param="tool_choice")
        if parallel is not None:
            flag("parallel_tool_calls", parallel)
        return None

    @property
    def chosen(self) -> tuple[Mapping[str, Any], ...]:
        """The functions that may be called."""
        if self.choice == "none":
            return ()
        names = (self.only,) if self.only else self.allowed
        return tuple(each for each in self.functions if not names or each["name"] in names)

    @property
    def definitions(self) -> Tools:
        """The functions in the prompt. They do not depend on `choice`, which may change in a later turn."""
        return Tools.of(list(self.functions))

    def grammar(self, habits: ModelHabits, answer: Grammar | None) -> Grammar | None:
        """Returns the grammar of the answer, or `None` if it may be any text. It allows `answer`, if given, and calls;
        only calls if these are forced. Raises `InvalidRequest`."""
        functions = {each["name"]: each.get("parameters") for each in self.chosen}
        parallel = self.parallel and not self.only
        return shape_of(habits, answer, functions, forced=self.choice == "required", parallel=parallel)

    def reading(self, habits: ModelHabits, grammar: Grammar | None) -> Reading:
        """Returns the settings for parsing an answer. Thoughts are not expected if `grammar` has no place for them."""
        thinks = habits.thinks if grammar is None or has_thoughts(grammar) else "no"
        names = tuple(each["name"] for each in self.chosen)
        typed = {each["name"]: _types(each.get("parameters")) for each in self.chosen}
        types = {name: found for name, found in typed.items() if found and habits.tools == "functions"}
        return Reading(replace(habits, thinks=thinks), names, types, forced=self.choice == "required")

    def marks(self, habits: ModelHabits) -> tuple[tuple[str, int], ...]:
        """Returns the control tokens that must stay in the answer's text so that it can be parsed."""
        if self.chosen or habits.tools == "channels":
            return habits.marks
        return tuple((text, token) for text, token in habits.marks if text in THOUGHTS)


def _types(parameters: Any) -> dict[str, tuple[str, ...]]:
    """Returns the types of a function's parameters that have types."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    return {name: types for name, schema in properties.items() if (types := types_of(schema))}


def unwrapped(given: object) -> object:
    """Returns the inner object of `{"type": "function", "function": {...}}`, the form of OpenAI's API."""
    if isinstance(given, Mapping) and set(given) == {"type", "function"} and given["type"] == "function":
        return given["function"]
    return given


_FIELDS = ("name", "description", "parameters")


def _function(number: int, given: object) -> Mapping[str, Any]:
    """Checks a function's definition. Raises `InvalidRequest`."""
    field, function = f"tools[{number}]", unwrapped(given)
    if not isinstance(function, Mapping) or not {"name"} <= set(function) <= {*_FIELDS, "strict"}:
        raise wrong(field, given, "an object with name, and description and parameters", param=field)
    name = function["name"]
    if not isinstance(name, str) or re.fullmatch(NAME, name) is None:
        raise wrong(f"{field}.name", name, "1 to 64 letters, digits, '_', '.' and '-'", param=f"{field}.name")
    description, parameters = function.get("description"), function.get("parameters")
    if description is not None:
        if not isinstance(description, str):
            raise wrong(f"{field}.description", description, "text", param=f"{field}.description")
        check_unicode(f"{field}.description", description)
    if parameters is not None and not isinstance(parameters, Mapping):
        raise wrong(f"{field}.parameters", parameters, "a JSON schema", param=f"{field}.parameters")
    strict = function.get("strict")  # OpenAI's API has it; forced calls are always strict
    if not isinstance(strict, bool | None):
        raise wrong(f"{field}.strict", strict, "true or false", param=f"{field}.strict")
    return {key: function[key] for key in _FIELDS if function.get(key) is not None}
