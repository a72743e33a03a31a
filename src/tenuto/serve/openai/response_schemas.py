"""Requests for OpenAI's Responses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from tenuto.base.checks import MAX_COUNT
from tenuto.base.compaction import ASKED, SUMMARY_TOKENS
from tenuto.base.errors import InvalidRequest
from tenuto.base.options import MAX_NEW_TOKENS
from tenuto.base.sampling import MAX_TOKEN_ID
from tenuto.base.tools.definitions import ModelHabits, ToolCall
from tenuto.base.tools.grammar import Grammar
from tenuto.base.tools.tool_use import ToolUse
from tenuto.base.turns import Message
from tenuto.serve.openai.summaries import Summary
from tenuto.serve.openai.templates import Templated
from tenuto.serve.openai.tools import KINDS, FlatChoice, FlatTool, custom_call, tool_use
from tenuto.serve.shared.grammars import GrammarField, only_one
from tenuto.serve.shared.objects import NOTHING, ForeignObject
from tenuto.serve.shared.placing import placed
from tenuto.serve.shared.schemas import Id, Messages, ModelName, Prompts, field_of, unsupported
from tenuto.serve.shared.turn_request import RUN_FIELD, TurnRequest, options_but, with_options
from tenuto.serve.shared.undone import ToolList, leave_undone, of_type

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class ResponsePart(ForeignObject):
    """A piece of an item's content."""

    has_kinds = True
    ignored = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


def text_of(content: str | list[ResponsePart] | None) -> str:
    """Returns the texts of content, one per line."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())


ItemType = Literal[
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "reasoning",
    "compaction",
]
RESULTS = ("function_call_output", "custom_tool_call_output")
"""Types of items with the result of a call."""


class Item(ForeignObject):
    """A message, a call, the result of a call, or thoughts, written by the client or copied from an earlier
    response."""

    has_kinds = True
    ignored = frozenset({"id", "status", "phase", "created_by", "namespace", "caller"})

    type: ItemType = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Messages[ResponsePart] | None = None
    summary: Messages[ResponsePart] | None = None
    call_id: str = Field("", max_length=256)
    name: str = Field("", max_length=256)
    arguments: str = "{}"
    input: str = ""
    output: str | Messages[ResponsePart] | None = None
    encrypted_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_someone(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("type", "message") == "message" and "role" not in given:
            raise unsupported("role", "is required of a message")
        return given

    @model_validator(mode="after")
    def _readable(self) -> Self:
        if self.type == "compaction" and Summary.of(self.encrypted_content or "") is None:
            raise unsupported("encrypted_content", "is not a summary of this server; allowed: its own")
        return self

    def call(self) -> ToolCall:
        """Returns a call in the engine's form. Raises `InvalidRequest`."""
        if self.type == "custom_tool_call":
            return custom_call(self.name, self.input, self.call_id)
        return ToolCall(self.name, self.arguments or "{}", self.call_id)


class TextFormat(ForeignObject):
    """The format of the answer. A schema is always enforced."""

    ignored = frozenset({"description", "strict"})

    type: Literal["text", "json_object", "json_schema"]
    name: str = Field("", max_length=256)
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class TextConfig(ForeignObject):
    """Requirements for the answer's text."""

    undone: ClassVar[dict[str, tuple[Any, ...]]] = {"verbosity": (None,)}

    format: TextFormat | None = None


class ConversationName(ForeignObject):
    """A conversation by its id."""

    id: str = Field(max_length=256)


class Management(ForeignObject):
    """A way to shorten a long conversation."""

    has_kinds = True

    type: Literal["compaction"]
    compact_threshold: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="Number of tokens above which it is compacted; never if not given."
    )


LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that asks for log-probabilities."""


@with_options(*options_but("grammar", "input_logprobs", "logprobs"))
class ResponseBody(Templated, TurnRequest):
    """Input to answer."""

    apis = ("responses", "openai")
    too_long = "This model's maximum context length is {limit} tokens"
    ignored = frozenset(
        (
            *("client_metadata", "max_tool_calls", "request_id", "safety_identifier", "stream_options"),
            *("prompt_cache_options", "prompt_cache_retention"),
        )
    )
    undone: ClassVar[dict[str, tuple[Any, ...]]] = {
        "reasoning": (*NOTHING, {"effort": None}, {"effort": None, "summary": None}),
        "service_tier": (None, "auto", "default"),
        "truncation": (None, "disabled"),
    }
    not_supported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **dict.fromkeys(("moderation", "prompt", "enable_response_messages"), NOTHING),
        **dict.fromkeys(("kv_transfer_params", "mm_processor_kwargs", "previous_input_messages"), NOTHING),
        **dict.fromkeys(("structured_outputs", "vllm_xargs"), NOTHING),
        "cache_salt": (None, ""),
        "skip_special_tokens": (None, True),
    }

    model: ModelName = None
    input: str | Messages[Item] = Field(description="With `previous_response_id`, only the new items.")
    instructions: str | None = Field(None, description="A system message.")
    previous_response_id: Id | None = Field(None, description="The response to continue, on a fork of its session.")
    conversation: str | ConversationName | None = Field(
        None, description="The conversation to continue, or its id; input and output are added to it."
    )
    store: bool | None = Field(None, description="Keep the response, so that it can be continued; true if not given.")
    stream: bool | None = None
    background: bool | None = Field(
        None, description="Answer at once, and write the response without a client. Read it until it has ended."
    )
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_NEW_TOKENS, description="As many as fit if not given.")
    temperature: float | None = field_of("temperature", "1 if not given.")
    top_p: float | None = field_of("top_p")
    seed: int | None = Field(None, description="Chosen by the server if not given.")
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKEN_ID, description="-1 and 0 keep all tokens.")
    top_logprobs: int | None = field_of("logprobs", f"Number of likeliest tokens to show, with `include` `{LOGPROBS}`.")
    include: Prompts[str] | None = Field(
        None, description=f"`{LOGPROBS}` shows the logprob of every token of the text."
    )
    metadata: Metadata | None = None
    prompt_cache_key: Any = RUN_FIELD
    user: Any = RUN_FIELD
    tools: ToolList[Annotated[FlatTool, of_type(*KINDS)]] | None = Field(
        None,
        description="Functions and custom tools. Tools of other types are left out, and a header of the answer names"
        " them.",
    )
    tool_choice: FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    context_management: Annotated[list[Management], Field(max_length=16)] | None = Field(
        None, description="Replaces a long conversation by a summary, which the response then begins with."
    )

    @property
    def compact_threshold(self) -> int | None:
        """The number of tokens above which the conversation is compacted; `None` for never."""
        given = [each.compact_threshold for each in self.context_management or ()]
        return min((each for each in given if each is not None), default=None)

    @cached_property
    def tool_use(self) -> ToolUse:
        """The request's tools and rules in the engine's form. Raises `InvalidRequest`."""
        return tool_use(self.tools or (), self.tool_choice, self.parallel_tool_calls)

    @field_validator("include")
    @classmethod
    def _known(cls, include: list[str] | None) -> list[str] | None:
        if set(include or ()) - {LOGPROBS}:
            leave_undone("include")
        return include

    def given(self) -> dict[str, Any]:
        asked = self.include is not None and LOGPROBS in self.include
        return {**super().given(), "logprobs": (self.top_logprobs or 0) if asked else None}

    def asking(self, length: int | None = None) -> Self:
        """Returns a request for a summary, of at most `length` tokens, to follow the items of this one. It stores
        nothing."""
        alone = {"store": False, "background": None, "tool_choice": "none", "text": None, "expect_within": None}
        asked = {"input": ASKED, "max_output_tokens": length or SUMMARY_TOKENS, **alone}
        made = self.model_copy(update=asked)
        for name in ("items", "tool_use"):
            made.__dict__.pop(name, None)
        return made

    def check(self) -> None:
        """Raises `InvalidRequest` for conflicting fields."""
        if self.background and self.store is False:
            raise InvalidRequest("background can only be used when `store` is true; store is false", param="background")

    @cached_property
    def items(self) -> list[Item]:
        """The request's input as items."""
        return (
            [Item.model_validate({"role": "user", "content": self.input})]
            if isinstance(self.input, str)
            else self.input
        )

    @property
    def conversation_id(self) -> str | None:
        """Id of the conversation to continue, if any. Raises `InvalidRequest`."""
        if self.conversation is None:
            return None
        if self.previous_response_id is not None:
            raise InvalidRequest(
                "conversation and previous_response_id are given; allowed: one of them", param="conversation"
            )
        return self.conversation if isinstance(self.conversation, str) else self.conversation.id

    def rendered(self, habits: ModelHabits, earlier: Sequence[Item] = (), *, instructed: bool = False) -> list[Message]:
        """Returns `earlier` items and the input as messages in the engine's form. `instructed`: the session has these
        instructions already."""
        return placed(self._messages(earlier, instructed=instructed), habits)

    def run_name(self) -> str | None:
        given = (self.conversation_id, self.prompt_cache_key, self.user)
        return next((name for name in given if isinstance(name, str)), None)

    def _messages(self, earlier: Sequence[Item], *, instructed: bool) -> list[Message]:
        messages = messages_of([*earlier, *self.items])
        if not self.instructions or instructed:
            return messages
        if messages and messages[0].role == "system":
            first = Message("system", f"{self.instructions}\n\n{messages[0].content}")
            return [first, *messages[1:]]
        return [Message("system", self.instructions), *messages]

    def grammar_field(self) -> GrammarField | None:
        shape = self.text.format if self.text is not None else None
        schema: Any = None
        if shape is not None and shape.type != "text":
            schema = {"type": "object"} if shape.type == "json_object" else shape.schema_
            schema = True if schema is None else schema
        return only_one(("text.format.schema", Grammar.of_schema, schema))

    @property
    def answers_call(self) -> bool:
        """Whether the input ends with a call's result."""
        items = self.items
        return bool(items) and items[-1].type in RESULTS

    def field(self, option: str | None) -> str | None:
        return self.input_field if option == "items" else super().field(option)

    def echoed(self) -> dict[str, Any]:
        """Returns the fields of a response that repeat the request."""
        choice = self.tool_choice.model_dump() if isinstance(self.tool_choice, ForeignObject) else self.tool_choice
        text = self.text.model_dump(by_alias=True, exclude_none=True) if self.text is not None else {}
        return {
            "background": bool(self.background),
            "conversation": {"id": self.conversation_id} if self.conversation is not None else None,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": self.store is not False,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": choice or "auto",
            "tools": [tool.echoed() for tool in self.tools or ()],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": "disabled",
        }


class InputBody(ResponseBody):
    """Input that is not answered."""

    input: str | Messages[Item] = Field(default=[], description="With `previous_response_id`, only the new items.")


class CompactBody(InputBody):
    """A conversation to summarize."""

    usual: ClassVar[dict[str, Any]] = {"temperature": 0.0}


def since_compaction(items: Sequence[Item]) -> list[Item]:
    """Returns the items with the last summary in the place of those that it covers, except messages of the user."""
    place = next((n for n in range(len(items) - 1, -1, -1) if items[n].type == "compaction"), None)
    if place is None:
        return list(items)
    summary = Summary.of(items[place].encrypted_content or "")
    begin = max(0, place - (summary.after if summary is not None else 0))
    users = [item for item in items[:begin] if item.type == "message" and item.role == "user"]
    return [*users, items[place], *items[begin:place], *items[place + 1 :]]


def messages_of(items: Sequence[Item]) -> list[Message]:
    """Converts items to messages. Thoughts and calls become part of the assistant's message beside them."""
    messages: list[Message] = []
    thoughts = ""
    for item in since_compaction(items):
        last = messages[-1] if messages else None
        if item.type == "reasoning":
            thoughts = text_of(item.content) or text_of(item.summary)
        elif item.type == "compaction":
            summary = Summary.of(item.encrypted_content or "")
            text = summary.text if summary is not None else ""
            messages.append(Message("system", f"The conversation before this was summarized:\n\n{text}"))
        elif item.type in RESULTS:
            messages.append(Message("tool", text_of(item.output), tool_call_id=item.call_id))
        elif item.type in ("function_call", "custom_tool_call"):
            calls = (item.call(),)
            if last is not None and last.role == "assistant":
                messages.pop()
                messages.append(Message("assistant", last.content, last.tool_calls + calls, reasoning=last.reasoning))
            else:
                messages.append(Message("assistant", "", calls, reasoning=thoughts))
                thoughts = ""
        else:
            role = "system" if item.role == "developer" else item.role or "user"
            own, thoughts = (thoughts, "") if role == "assistant" else ("", thoughts)
            messages.append(Message(role, text_of(item.content), reasoning=own))
    return messages
