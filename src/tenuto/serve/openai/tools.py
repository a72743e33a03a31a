"""Functions that clients let the model call, and what they ask for of its calls."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tenuto.base.checks import shown
from tenuto.base.errors import InvalidRequest
from tenuto.base.grammar import Grammar
from tenuto.base.tools import MAX_TOOLS, ModelHabits, ToolCall, Tools
from tenuto.serve.shared.objects import NOTHING, ForeignObject
from tenuto.serve.shared.schemas import unsupported
from tenuto.serve.shared.tool_calls import shape_of

NAME = r"^[A-Za-z0-9_.-]{1,64}$"
Name = Annotated[str, Field(pattern=NAME, examples=["get_weather"])]


class Function(ForeignObject):
    """A function that the model may call. `parameters`: a JSON schema of its arguments, an object."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="Arguments of forced calls always follow the schema.")

    def told(self) -> dict[str, Any]:
        """What the model is told of it."""
        given = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {name: value for name, value in given.items() if value is not None}


class Tool(ForeignObject):
    """A tool; only functions can be."""

    type: Literal["function"]
    function: Function

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise unsupported("type", f"is {shown(kind)}; that is not supported, allowed: 'function'")
        return given


class NamedFunction(ForeignObject):
    """A function by its name."""

    name: Name


class NamedTool(ForeignObject):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(ForeignObject):
    """A function and the arguments of a call, as JSON text."""

    name: str = Field(max_length=256)
    arguments: str = "{}"


class GivenCall(ForeignObject):
    """A call in an assistant's message."""

    ignored = frozenset({"index"})

    id: str = Field("", max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction

    def call(self) -> ToolCall:
        """As the engine takes it. Raises `InvalidRequest`."""
        return ToolCall(self.function.name, self.function.arguments or "{}", self.id)


Calls = Annotated[list[GivenCall], Field(fail_fast=True, max_length=MAX_TOOLS)]
Choice = Literal["none", "auto", "required"] | NamedTool


class WithTools(ForeignObject):
    """The fields of a request about tools."""

    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = Field(
        None, description="Functions the model may call. A session is told of them with its first messages."
    )
    tool_choice: Choice | None = Field(None, description="`auto` if not given. `required`, or a function, is enforced.")
    parallel_tool_calls: bool | None = Field(None, description="Whether there may be several calls; true if not given.")

    @property
    def chosen(self) -> list[Function]:
        """The functions that may be called."""
        if self.tool_choice == "none":
            return []
        functions = [tool.function for tool in self.tools or ()]
        if isinstance(self.tool_choice, NamedTool):
            return [function for function in functions if function.name == self.tool_choice.function.name]
        return functions

    def told_tools(self) -> Tools:
        """What the model is told of."""
        if self.tool_choice == "none":
            return Tools()
        return Tools.of([tool.function.told() for tool in self.tools or ()])

    def check_tools(self) -> None:
        """Raises `InvalidRequest` for conflicting fields."""
        names = [tool.function.name for tool in self.tools or ()]
        for number, name in enumerate(names):
            if name in names[:number]:
                raise InvalidRequest(
                    f"tools[{number}].function.name is {name!r} again; allowed: every name once",
                    param=f"tools[{number}].function.name",
                )
        if self.tool_choice not in (None, "none", "auto") and not self.chosen:
            raise InvalidRequest(
                "tool_choice asks for a call of a function that tools does not have; allowed: one of them",
                param="tool_choice",
            )

    def calls_grammar(self, habits: ModelHabits, answer: Grammar | None) -> Grammar | None:
        """What an answer must follow: `answer`, if that is given, or calls, where they are forced or may come instead.
        Raises `InvalidRequest`."""
        forced = self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)
        parallel = self.parallel_tool_calls is not False and not isinstance(self.tool_choice, NamedTool)
        functions = {function.name: function.parameters for function in self.chosen}
        return shape_of(habits, answer, functions, forced=forced, parallel=parallel)


NO_CALLS = dict.fromkeys(("annotations", "audio", "function_call", "refusal"), NOTHING)
"""Fields of messages that are accepted if they say nothing."""
