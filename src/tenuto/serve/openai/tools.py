"""Functions and custom tools that the model may call, and rules for calling them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, model_validator

from tenuto.base.errors import InvalidRequest
from tenuto.base.tools.definitions import MAX_TOOLS, ToolCall
from tenuto.base.tools.tool_use import NAME, ToolUse
from tenuto.serve.shared.objects import NOTHING, ForeignObject
from tenuto.serve.shared.schemas import required
from tenuto.serve.shared.turn_request import TurnRequest
from tenuto.serve.shared.undone import ToolList, leave_undone, of_type

T = TypeVar("T")

KINDS = ("function", "custom")
"""The types of tools that the model may call. Others run on OpenAI's servers."""

Name = Annotated[str, Field(pattern=NAME, examples=["get_weather"])]


class Function(ForeignObject):
    """A function that the model may call. `parameters`: a JSON schema of its arguments, an object."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="Arguments of forced calls always follow the schema.")

    def definition(self) -> dict[str, Any]:
        """Returns the function's definition for the model."""
        given = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {name: value for name, value in given.items() if value is not None}


class InputGrammar(ForeignObject):
    """A grammar of a custom tool's input."""

    definition: str
    syntax: Literal["lark", "regex"]


class InputFormat(ForeignObject):
    """The form of a custom tool's input. In the form of Responses, the grammar's fields are beside `type`."""

    type: Literal["text", "grammar"]
    grammar: InputGrammar | None = None

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("type") != "grammar" or "grammar" in given:
            return given
        return {"type": "grammar", "grammar": {name: value for name, value in given.items() if name != "type"}}

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.type == "grammar" and self.grammar is None:
            raise required("grammar")
        return self


class Custom(ForeignObject):
    """A tool whose calls have any text as input. For the model it is a function with one argument, `input`."""

    name: Name
    description: str | None = None
    format: InputFormat | None = None

    def definition(self) -> dict[str, Any]:
        """Returns the definition for the model. A regular expression becomes part of the schema. Another grammar only
        describes the input."""
        grammar, lines = self.format.grammar if self.format is not None else None, [self.description or ""]
        text: dict[str, Any] = {"type": "string"}
        if grammar is not None and grammar.syntax == "regex":
            text["pattern"] = f"^(?:{grammar.definition})$"
        elif grammar is not None:
            leave_undone("tools.custom.format")
            lines.append(f"The input follows this grammar:\n{grammar.definition}")
        schema = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
        told = {"name": self.name, "description": "\n".join(filter(None, lines)), "parameters": schema}
        return {name: value for name, value in told.items() if value}


class Tool(ForeignObject):
    """A function or a custom tool that the model may call."""

    ignored = frozenset({"cache_control"})

    type: Literal["function", "custom"]
    function: Function | None = None
    custom: Custom | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        return _of_its_type(self)

    def definition(self) -> dict[str, Any]:
        """See `Function.definition`."""
        made = self.custom if self.type == "custom" else self.function
        assert made is not None
        return made.definition()


class FlatTool(Function):
    """A tool in the form of Responses."""

    ignored: ClassVar[frozenset[str]] = frozenset({"defer_loading", "output_schema", "allowed_callers", "async"})

    type: Literal["function", "custom"]
    format: InputFormat | None = None

    def definition(self) -> dict[str, Any]:
        if self.type == "function":
            return super().definition()
        return Custom(name=self.name, description=self.description, format=self.format).definition()

    def echoed(self) -> dict[str, Any]:
        """Returns the tool in the form in which a response repeats it."""
        if self.type == "function":
            return self.model_dump(exclude={"format"})
        form = self.format.model_dump(exclude={"grammar"}) if self.format is not None else {"type": "text"}
        grammar = (
            self.format.grammar.model_dump() if self.format is not None and self.format.grammar is not None else {}
        )
        return {**self.model_dump(include={"type", "name", "description"}), "format": {**form, **grammar}}


class NamedFunction(ForeignObject):
    """A function or a custom tool by its name."""

    ignored = frozenset({"description", "format", "parameters", "strict"})

    name: Name


class NamedTool(ForeignObject):
    """The tool that must be called."""

    type: Literal["function", "custom"]
    function: NamedFunction | None = None
    custom: NamedFunction | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        return _of_its_type(self)

    @property
    def name(self) -> str:
        """The tool's name."""
        named = self.custom if self.type == "custom" else self.function
        assert named is not None
        return named.name


class FlatNamedTool(NamedFunction):
    """The tool that must be called, in the form of Responses."""

    type: Literal["function", "custom"]


class AllowedTools(ForeignObject):
    """The only tools that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: ToolList[Annotated[NamedTool, of_type(*KINDS)]]


class AllowedChoice(ForeignObject):
    """Tools that may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class FlatAllowedChoice(ForeignObject):
    """Tools that may be called, in the form of Responses."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: ToolList[Annotated[FlatNamedTool, of_type(*KINDS)]]


class CalledFunction(ForeignObject):
    """A function and the arguments of a call, as JSON text."""

    name: str = Field(max_length=256)
    arguments: str = "{}"


class CalledCustom(ForeignObject):
    """A custom tool and the input of a call."""

    name: str = Field(max_length=256)
    input: str


class GivenCall(ForeignObject):
    """A call in an assistant's message."""

    ignored = frozenset({"index", "provider_specific_fields"})

    id: str = Field("", max_length=256)
    type: Literal["function", "custom"] = "function"
    function: CalledFunction | None = None
    custom: CalledCustom | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        return _of_its_type(self)

    def call(self) -> ToolCall:
        """Returns the call in the engine's form. Raises `InvalidRequest`."""
        if self.type == "custom" and self.custom is not None:
            return custom_call(self.custom.name, self.custom.input, self.id)
        assert self.function is not None
        return ToolCall(self.function.name, self.function.arguments or "{}", self.id)


Calls = Annotated[list[GivenCall], Field(fail_fast=True, max_length=MAX_TOOLS)]
Choice = Literal["none", "auto", "required"] | NamedTool | AllowedChoice
FlatChoice = Literal["none", "auto", "required"] | FlatNamedTool | FlatAllowedChoice


class WithTools(ForeignObject, TurnRequest):
    """The fields of a request about tools."""

    tools: ToolList[Annotated[Tool, of_type(*KINDS)]] | None = Field(
        None,
        description="Functions and custom tools the model may call. They become part of the prompt with the first"
        " messages. Other types of tools are left out, and a header of the answer names them.",
    )
    tool_choice: Choice | None = Field(None, description="`auto` if not given. `required`, or a function, is enforced.")
    parallel_tool_calls: bool | None = Field(
        None, description="Whether an answer may have several calls; true if not given."
    )

    @cached_property
    def tool_use(self) -> ToolUse:
        """The request's tools and rules in the engine's form. Raises `InvalidRequest`."""
        try:
            return tool_use(self.tools or (), self.tool_choice, self.parallel_tool_calls)
        except InvalidRequest as error:
            if error.param is not None and error.param.endswith("].name"):
                tool = error.param.removesuffix(".name")
                error.param = f"{tool}.{(self.tools or [])[int(tool[6:-1])].type}.name"
            raise


def tool_use(tools: Sequence[Tool | FlatTool], choice: Choice | FlatChoice | None, parallel: bool | None) -> ToolUse:
    """Returns a request's tools and rules in the engine's form. Raises `InvalidRequest`."""
    told, many = tuple(tool.definition() for tool in tools), parallel is not False
    if isinstance(choice, AllowedChoice | FlatAllowedChoice):
        among = choice.allowed_tools if isinstance(choice, AllowedChoice) else choice
        names = tuple(tool.name for tool in among.tools)
        if not names and among.mode == "required":
            raise InvalidRequest(
                "tool_choice requires a call and allows none that can be made; allowed: functions that tools has",
                param="tool_choice",
            )
        return ToolUse(told, among.mode if names else "none", parallel=many, allowed=names)
    if isinstance(choice, NamedTool | FlatNamedTool):
        return ToolUse(told, "required", choice.name, parallel=many)
    return ToolUse(told, choice or "auto", parallel=many)


def _of_its_type(given: T) -> T:
    """Returns an object after checking that it has the field that its `type` names."""
    kind: str = getattr(given, "type")  # noqa: B009 - of several classes
    if getattr(given, kind) is None:
        raise required(kind)
    return given


# -- custom tools


def customs_of(tools: Sequence[Tool | FlatTool] | None) -> frozenset[str]:
    """Returns the names of the custom tools."""
    return frozenset(tool.definition()["name"] for tool in tools or () if tool.type == "custom")


def custom_call(name: str, given: str, call_id: str) -> ToolCall:
    """Returns the call of a custom tool in the engine's form. Raises `InvalidRequest`."""
    return ToolCall(name, json.dumps({"input": given}, ensure_ascii=False), call_id)


def input_of(call: ToolCall) -> str:
    """Returns the input of a custom tool's call; its arguments if these have another form."""
    found = call.parsed().get("input")
    return found if isinstance(found, str) else call.arguments


NO_CALLS = dict.fromkeys(("annotations", "audio", "function_call", "refusal"), NOTHING)
"""Fields of messages that are accepted with values that mean the same as their absence."""
