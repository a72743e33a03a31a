"""Ollama's requests."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tenuto.base.errors import InvalidRequest
from tenuto.base.sampling import MAX_LOGPROBS
from tenuto.base.tools.definitions import ModelHabits, ToolCall
from tenuto.base.tools.grammar import Grammar
from tenuto.base.tools.tool_use import NAME, ToolUse
from tenuto.base.tools.variables import Variables
from tenuto.base.turns import Message
from tenuto.serve.shared.grammars import GrammarField, Schema, only_one
from tenuto.serve.shared.objects import NOTHING, ForeignObject
from tenuto.serve.shared.schemas import Items, Messages, TokenId
from tenuto.serve.shared.turn_request import TurnRequest, with_options
from tenuto.serve.shared.undone import ToolList, leave_undone, of_type

PICTURES = dict.fromkeys(("images",), NOTHING)
LATEST = ":latest"
"""A tag that clients add to names without one."""


@with_options(
    "seed", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "stop", temperature="0.8 if not given."
)
class Options(ForeignObject, TurnRequest):
    """Options of an answer. Those that tell Ollama how to load a model are ignored."""

    apis = ("ollama",)
    usual: ClassVar[dict[str, Any]] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
    unset_below: ClassVar[dict[str, int]] = {"num_predict": 1, "seed": 0}
    ignored = frozenset(
        (
            *("num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_gqa", "numa", "low_vram", "f16_kv"),
            *("vocab_only", "use_mmap", "use_mlock", "logits_all", "embedding_only", "penalize_newline"),
            *("mirostat_eta", "mirostat_tau"),
        )
    )
    undone: ClassVar[dict[str, tuple[Any, ...]]] = {"draft_num_predict": (None, 0), "repeat_last_n": (None, -1, 0, 64)}
    not_supported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "mirostat": (None, 0),
        "tfs_z": (None, 1),
        "typical_p": (None, 1),
    }

    num_ctx: int | None = Field(None, ge=1, description="At most the server's context.")
    num_predict: int | None = Field(None, description="Maximum number of output tokens; 0 and less: as many as fit.")
    seed: int | None = Field(None, description="-1: chosen by the server.")
    top_k: int | None = Field(None, ge=-1, description="40 if not given; 0 keeps all.")


class Function(ForeignObject):
    """A function that the model may call. `parameters`: a JSON schema of its arguments, an object."""

    ignored = frozenset({"strict"})

    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(ForeignObject):
    """A tool that the model may call."""

    ignored = frozenset({"items"})

    type: Literal["function"] = "function"
    function: Function

    def definition(self) -> dict[str, Any]:
        """Returns the function's definition for the model."""
        return self.function.model_dump(exclude_none=True)


class CalledFunction(ForeignObject):
    """The function of a call, with its arguments."""

    ignored = frozenset({"description"})

    index: int | None = None
    name: str
    arguments: dict[str, Any]


class Call(ForeignObject):
    """A call in an assistant's message."""

    ignored = frozenset({"type"})

    id: str = Field("", max_length=256)
    function: CalledFunction


class ChatMessage(ForeignObject):
    """A message."""

    not_supported = PICTURES

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Messages[Call] | None = None
    tool_name: str | None = Field(None, max_length=256, description="In a tool's message, the function.")
    name: str | None = Field(None, max_length=256, description="An older name of `tool_name`.")
    tool_call_id: str | None = Field(None, max_length=256)

    def rendered(self) -> Message:
        """Returns the message in the engine's form."""
        calls = tuple(
            ToolCall(call.function.name, json.dumps(call.function.arguments, ensure_ascii=False), call.id)
            for call in self.tool_calls or ()
        )
        name, thought = self.tool_name or self.name or "", self.thinking or ""
        return Message(self.role, self.content or "", calls, self.tool_call_id or "", name, thought)


class Asked(ForeignObject, TurnRequest):
    """The fields that both kinds of request share."""

    usual = Options.usual
    undone: ClassVar[dict[str, tuple[Any, ...]]] = {
        "keep_alive": (None, *("5m", 300, -1, "-1")),
        **dict.fromkeys(("shift", "truncate"), (None, True)),
    }
    not_supported: ClassVar[dict[str, tuple[Any, ...]]] = {"template": (None, "")}

    model: str = Field(description="A name listed by `/api/tags`.")
    stream: bool | None = Field(None, description="Lines of JSON; true if not given.")
    format: Literal["", "json"] | Schema | None = Field(None, description="`json`, or a JSON schema; enforced.")
    options_: Options | None = Field(None, alias="options")
    think: bool | str | None = Field(None, description="Whether a model that can should think first, or how much.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def chosen(self) -> Options:
        """The options."""
        return self.options_ or Options.model_validate({})

    def check(self, habits: ModelHabits, context_length: int) -> None:
        """Checks what the model can do. Raises `InvalidRequest`."""
        if (asked := self.chosen.num_ctx or 0) > context_length:
            raise InvalidRequest(
                f"options.num_ctx is {asked}; allowed: at most {context_length}, the server's context",
                param="options.num_ctx",
            )
        if self.think and habits.thinks == "no" and not habits.switches:
            leave_undone("think")

    def variables(self) -> Variables:
        """Returns the variables for the chat template."""
        if self.think is None:
            return Variables()
        level = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return Variables.of({"enable_thinking": bool(self.think), **level})

    def given(self) -> dict[str, Any]:
        shown = {"logprobs": self.top_logprobs or 0} if self.logprobs or self.top_logprobs else {}
        return {**self.chosen.given(), **shown}

    def grammar_field(self) -> GrammarField | None:
        if self.format == "json":
            return GrammarField("format", Grammar("json_object"))
        return only_one(("format", Grammar.of_schema, self.format or None))

    def field(self, option: str | None) -> str | None:
        if option in ("grammar", "input", None):
            return super().field(option)
        name = self.chosen.field(option)
        return f"options.{name}" if name in type(self.chosen).model_fields else name


class ChatBody(Asked):
    """Messages to answer."""

    input_field = "messages"

    messages: Messages[ChatMessage] = Field(default_factory=list)
    tools: ToolList[Annotated[Tool, of_type("function")]] | None = None

    @cached_property
    def tool_use(self) -> ToolUse:
        """The functions that the answer may call. Raises `InvalidRequest`."""
        return ToolUse(tuple(tool.definition() for tool in self.tools or ()))


class GenerateBody(Asked):
    """A text to answer or, with `raw`, to continue."""

    input_field = "prompt"
    not_supported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **Asked.not_supported,
        **PICTURES,
    }

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = Field(None, description="The prompt is continued as it is, without the chat template.")
    suffix: str | None = Field(None, description="The text after the answer, for models that fill in the middle.")
    context: Items[TokenId] | None = Field(None, description="The tokens that the last answer came with.")

    @property
    def tool_use(self) -> ToolUse | None:
        return None if self.raw or self.suffix else ToolUse()

    def messages(self) -> list[Message]:
        """Returns the prompt as messages."""
        system = [Message("system", self.system)] if self.system else []
        return [*system, Message("user", self.prompt or "")]


class ShowBody(ForeignObject):
    """A model to describe."""

    ignored = frozenset({"verbose", "system", "template", "options"})

    model: str | None = None
    name: str | None = Field(None, description="An older name of `model`.")
