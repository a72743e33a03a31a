"""Anthropic-compatible requests."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from tenuto.base.errors import InvalidRequest
from tenuto.base.options import MAX_NEW_TOKENS
from tenuto.base.tools.definitions import ModelHabits, Tools
from tenuto.base.tools.grammar import Grammar
from tenuto.base.tools.tool_use import ToolChoice as Choice
from tenuto.base.tools.tool_use import ToolUse
from tenuto.base.turns import Message
from tenuto.serve.anthropic.content import Block, NewMessage, since_compaction, text_of
from tenuto.serve.anthropic.edits import ContextManagement
from tenuto.serve.anthropic.threads import ThreadField
from tenuto.serve.shared.grammars import GrammarField, only_one
from tenuto.serve.shared.objects import NOTHING, ForeignObject
from tenuto.serve.shared.placing import placed
from tenuto.serve.shared.schemas import Messages, ModelName
from tenuto.serve.shared.turn_request import TurnRequest, text_in, with_options
from tenuto.serve.shared.undone import ToolList, of_type

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$", examples=["get_weather"])]


class Tool(ForeignObject):
    """A function that the model may call. `input_schema`: JSON schema of its arguments, an object."""

    ignored = frozenset({"cache_control", "defer_loading", "eager_input_streaming", "input_examples", "strict"})

    type: str | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]

    @classmethod
    def of(cls, function: Mapping[str, Any]) -> Tool:
        """Returns the tool whose definition for the model is `function`."""
        given = {"name": function["name"], "description": function.get("description"), "type": None}
        return cls.model_construct(**given, input_schema=function["parameters"])

    def definition(self) -> dict[str, Any]:
        """Returns the function's definition for the model."""
        described = {"description": self.description} if self.description is not None else {}
        return {"name": self.name, **described, "parameters": self.input_schema}


class ToolChoice(ForeignObject):
    """Rules for calling tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(ForeignObject):
    """The format of the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(ForeignObject):
    """Requirements for the answer."""

    undone: ClassVar[dict[str, tuple[Any, ...]]] = {"effort": NOTHING, "task_budget": NOTHING}

    format: OutputFormat | None = None


class Conversation(ForeignObject, TurnRequest):
    """The fields that make up the prompt."""

    apis = ("anthropic",)
    input_field = "messages"
    too_long = "prompt is too long"
    ignored = frozenset({"betas", "cache_control", "diagnostics", "user_profile_id", "workspace_id"})
    undone: ClassVar[dict[str, tuple[Any, ...]]] = {
        **dict.fromkeys(("container", "fallbacks", "inference_geo", "mcp_servers"), NOTHING),
        "service_tier": (None, "auto", "standard_only"),
        "speed": (None, "standard"),
        "thinking": (None, {"type": "disabled"}),
    }
    not_supported = dict.fromkeys(("chat_template_kwargs", "kv_transfer_params"), NOTHING)

    model: ModelName = None
    messages: Messages[NewMessage] = Field(min_length=1)
    system: str | Messages[Block] | None = None
    tools: ToolList[Annotated[Tool, of_type("custom")]] | None = Field(
        None,
        description="The client's tools. Tools with other types are left out, and a header of the answer names them.",
    )
    tool_choice: ToolChoice | None = Field(None, description="`any`, or a tool, is enforced.")
    output_config: OutputConfig | None = Field(None, description="A JSON schema, which is enforced.")
    context_management: ContextManagement | None = Field(None, description="What to clear from older messages.")
    metadata: Any = Field(None, description="Its `user_id` helps to find the conversation's session.")

    @field_validator("messages")
    @classmethod
    def _since_compaction(cls, messages: list[NewMessage]) -> list[NewMessage]:
        return since_compaction(messages)

    def run_name(self) -> str | None:
        return text_in(self.metadata, "user_id")

    @cached_property
    def tool_use(self) -> ToolUse:
        """The request's tools and rules in the engine's form. Raises `InvalidRequest`."""
        told, choice = tuple(tool.definition() for tool in self.tools or ()), self.tool_choice
        if choice is None:
            return ToolUse(told)
        if (choice.type == "tool") != (choice.name is not None):
            raise InvalidRequest(
                "tool_choice has a name without type tool, or no name with it; allowed: type tool with a name",
                param="tool_choice.name",
            )
        kind: Choice = "required" if choice.type in ("any", "tool") else "none" if choice.type == "none" else "auto"
        return ToolUse(told, kind, choice.name or "", parallel=not choice.disable_parallel_tool_use)

    def rendered(self, habits: ModelHabits, *, begun: bool = False) -> list[Message]:
        """Returns the messages in the engine's form. `begun`: they continue a conversation. Raises `InvalidRequest`."""
        if self.messages[-1].role == "assistant":
            raise InvalidRequest(
                "messages end with one of the assistant's; allowed: a user's message at the end", param="messages"
            )
        system = text_of(self.system)
        messages = [Message("system", system)] if system else []
        return placed(messages + [one for message in self.messages for one in message.rendered()], habits, begun=begun)

    def grammar_field(self) -> GrammarField | None:
        shape = self.output_config.format if self.output_config is not None else None
        return only_one(
            ("output_config.format.schema", Grammar.of_schema, shape.schema_ if shape is not None else None)
        )


@with_options("top_k", "top_p", "expect_within", temperature="1 if not given.")
class MessagesBody(Conversation):
    """Messages to answer."""

    thread: ThreadField | None = Field(
        None, description="Keeps the conversation, or continues it: then only the new messages are sent."
    )
    max_tokens: int = Field(ge=1, le=MAX_NEW_TOKENS)
    stream: bool | None = None
    stop_sequences: list[str] | None = None

    def take(self, tools: Tools) -> None:
        """Takes the tools of the thread that the request continues. Raises `InvalidRequest`."""
        for name in ("system", "tools"):
            if getattr(self, name) is not None:
                raise InvalidRequest(
                    f"{name} is given; a thread keeps its own: leave {name} out, or create a thread", param=name
                )
        functions = [tool["function"] for tool in tools.parsed()]
        self.tools = [Tool.of(function) for function in functions] or None
