"""Functions that the model may call, and rules for calling them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tenuto.base.errors import InvalidRequest
from tenuto.base.tools.definitions import MAX_TOOLS, ToolCall
from tenuto.base.tools.tool_use import NAME, ToolUse
from tenuto.serve.shared.objects import NOTHING, ForeignObject
from tenuto.serve.shared.turn_request import TurnRequest
from tenuto.serve.shared.undone import ToolList, of_type

Name = Annotated[str, Field(pattern=NAME, examples=["get_weather"])]


class Function(ForeignObject):
    """A function that the model may call. `parameters`: a JSON schema of its arguments, an object."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="Arguments of forced calls always follow the schema.")

    def told(self) -> dict[str, Any]:
        """Returns the function's definition for the model."""
        given = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {name: value for name, value in given.items() if value is not None}


class Tool(ForeignObject):
    """A function that the model may call."""

    ignored = frozenset({"cache_control"})

    type: Literal["function"]
    function: Function


class FlatTool(Function):
    """A tool in the form of Responses."""

    ignored: ClassVar[frozenset[str]] = frozenset({"defer_loading", "output_schema", "allowed_callers"})

    type: Literal["function"]


class NamedFunction(ForeignObject):
    """A function by its name."""

    name: Name


class NamedTool(ForeignObject):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class FlatNamedTool(ForeignObject):
    """The function that must be called, in the form of Responses."""

    type: Literal["function"]
    name: Name


class CalledFunction(ForeignObject):
    """A function and the arguments of a call, as JSON text."""

    name: str = Field(max_length=256)
    arguments: str = "{}"


class GivenCall(ForeignObject):
    """A call in an assistant's message."""

    ignored = frozenset({"index", "provider_specific_fields"})

    id: str = Field("", max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction

    def call(self) -> ToolCall:
        """Returns the call in the engine's form. Raises `InvalidRequest`."""
        return ToolCall(self.function.name, self.function.arguments or "{}", self.id)


Calls = Annotated[list[GivenCall], Field(fail_fast=True, max_length=MAX_TOOLS)]
Choice = Literal["none", "auto", "required"] | NamedTool


class WithTools(ForeignObject, TurnRequest):
    """The fields of a request about tools."""

    tools: ToolList[Annotated[Tool, of_type("function")]] | None = Field(
        None,
        description="Functions the model may call. They become part of the prompt with the first messages. Other"
        " types of tools are left out, and a header of the answer names them.",
    )
    tool_choice: Choice | None = Field(None, description="`auto` if not given. `required`, or a function, is enforced.")
    parallel_tool_calls: bool | None = Field(
        None, description="Whether an answer may have several calls; true if not given."
    )

    @cached_property
    def tool_use(self) -> ToolUse:
        """The request's tools and rules in the engine's form. Raises `InvalidRequest`."""
        try:
            return tool_use([tool.function for tool in self.tools or ()], self.tool_choice, self.parallel_tool_calls)
        except InvalidRequest as error:
            if error.param is not None and error.param.endswith("].name"):
                error.param = error.param.removesuffix("name") + "function.name"
            raise


def tool_use(
    functions: Sequence[Function], choice: str | NamedTool | FlatNamedTool | None, parallel: bool | None
) -> ToolUse:
    """Returns a request's tools and rules in the engine's form. Raises `InvalidRequest`."""
    told = tuple(function.told() for function in functions)
    if isinstance(choice, str | None):
        chosen = choice or "auto"
        return ToolUse(told, chosen, parallel=parallel is not False)  # type: ignore[arg-type] # checked when it is made
    only = choice.function.name if isinstance(choice, NamedTool) else choice.name
    return ToolUse(told, "required", only, parallel=parallel is not False)


NO_CALLS = dict.fromkeys(("annotations", "audio", "function_call", "refusal"), NOTHING)
"""Fields of messages that are accepted with values that mean the same as their absence."""
