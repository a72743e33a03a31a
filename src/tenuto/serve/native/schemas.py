"""The native interface's requests."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Header, Path
from pydantic import ConfigDict, Field, model_validator

from tenuto.base.checks import MAX_COUNT, MAX_SECONDS
from tenuto.base.compaction import ASKED, SUMMARY_TOKENS
from tenuto.base.errors import InvalidRequest
from tenuto.base.options import MAX_PRIORITY, OF_PREFILL, OPTIONS, TOOL_OPTIONS
from tenuto.base.tools.definitions import MAX_TOOLS, ToolCall, flat_call
from tenuto.base.tools.grammar import Grammar
from tenuto.base.tools.tool_use import NAME, ToolUse, unwrapped
from tenuto.base.turns import Message, TurnInput
from tenuto.serve.shared.grammars import GrammarField, only_one
from tenuto.serve.shared.schemas import (
    ID_LENGTH,
    ID_PATTERN,
    Id,
    Items,
    Messages,
    Object,
    TokenId,
    at_most,
    field_of,
    required,
)
from tenuto.serve.shared.turn_request import TurnRequest, with_options

MAX_TRIM_TURNS = 100_000
MAX_FILE_TURNS = 100_000
SessionId = Annotated[str, Path(pattern=ID_PATTERN, max_length=ID_LENGTH, description="The session's id.")]
TurnId = Annotated[str, Path(pattern=r"^turn-[0-9a-f]{24}$", description="The turn's id.")]
NewId = Annotated[Id | None, Field(description="Chosen by the server if not given; an id in use is refused.")]
IfMatch = Annotated[
    str | None,
    Header(description="The version the session must have, as in its `ETag`; otherwise refused with 412."),
]
TurnNumber = Annotated[int, Field(ge=1, le=MAX_COUNT)]
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class Call(Object):
    """A call of a function. `arguments`: a JSON object as text."""

    name: str = Field(max_length=256)
    arguments: str = "{}"
    id: str = Field("", max_length=256)

    _unwrap = model_validator(mode="before")(flat_call)


class NewMessage(Object):
    """A chat message."""

    role: str = Field(min_length=1, max_length=64, examples=["user"])
    content: str | None = Field(
        examples=["Hello!"], description="`null` only if an assistant's message has just calls."
    )
    tool_calls: Annotated[list[Call], Field(fail_fast=True, max_length=MAX_TOOLS)] = Field(
        default_factory=list, description="Calls in an assistant's message."
    )
    tool_call_id: str = Field("", max_length=256, description="In a tool's message, the call that it answers.")
    name: str = Field("", max_length=256, description="In a tool's message, the name of the function.")
    reasoning: str = Field("", description="An assistant's thoughts before its answer.")

    @model_validator(mode="before")
    @classmethod
    def _says_something(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("content", "") is None and given.get("role") != "assistant":
            raise required("content")
        return given

    def message(self) -> Message:
        """Returns the message in the engine's form. Raises `InvalidRequest`."""
        calls = tuple(ToolCall(call.name, call.arguments, call.id) for call in self.tool_calls)
        return Message(self.role, self.content or "", calls, self.tool_call_id, self.name, self.reasoning)


Input = Annotated[
    str | Items[TokenId] | Messages[NewMessage],
    Field(description="Text, token ids or chat messages. Empty continues where the history ends.", examples=["Hello"]),
]


class NewSession(Object):
    """A session to open."""

    id: NewId = None
    system: str | None = Field(None, description="A system message, put before the first messages.")
    ttl: float | None = field_of("ttl")
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="Priority of its turns; higher runs first.")
    max_tokens: int | None = field_of("max_tokens")
    pinned: bool = Field(
        default=False,
        description="Its memory never yields to others. Room for `max_tokens` is set aside; refused without room.",
    )
    adapter: str | None = Field(
        None, min_length=1, max_length=128, description="A loaded adapter, with which all its turns are computed."
    )
    metadata: Annotated[dict[MetadataKey, MetadataValue], at_most(16)] = Field(
        default_factory=dict,
        description="Stored and shown with the session: up to 16 entries, keys of 64 and values of 512 characters.",
    )

    model_config = ConfigDict(json_schema_extra={"examples": [{"system": "Be brief.", "ttl": 3600}]})


class NewFunction(Object):
    """A function that the model may call. `parameters`: a JSON schema of its arguments, an object."""

    name: str = Field(pattern=NAME, examples=["get_weather"])
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="Arguments of forced calls always follow the schema.")

    _unwrap = model_validator(mode="before")(unwrapped)


class NamedFunction(Object):
    """The function that must be called."""

    name: str = Field(pattern=NAME)

    _unwrap = model_validator(mode="before")(unwrapped)


class WithTools(TurnRequest):
    """A request that may define functions for the model to call."""

    usual: ClassVar[dict[str, Any]] = {"temperature": 0.0}
    tools: Annotated[list[NewFunction], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = Field(
        None, description="Functions that answers may call. They become part of the prompt with the first messages."
    )

    @cached_property
    def tool_use(self) -> ToolUse | None:
        return ToolUse.among(self.model_dump(include=set(TOOL_OPTIONS)))


class CallingTools(WithTools):
    """A request that may define functions, and rules for calling them."""

    tool_choice: Literal["auto", "none", "required"] | NamedFunction | None = Field(
        None, description="`auto` if not given. `required`, or a function, is enforced."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="Whether an answer may have several calls; true if not given."
    )


@with_options(*OPTIONS)
class NewTurn(CallingTools):
    """A turn to start, with its options; options not given have the engine's defaults. With `tools`, even an empty
    list, the answer is parsed into content, reasoning and calls."""

    input: Input = ""
    stream: bool = Field(default=True, description="Whether to send events as they come, or one answer at the end.")
    if_busy: Literal["reject", "queue"] = Field(
        "reject", description="If another turn of the session is open, refuse with 409 or wait for its end."
    )
    on_disconnect: Literal["abort", "continue"] = Field(
        "abort", description="When the last reader leaves, roll the turn back or continue without readers."
    )

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"input": [{"role": "user", "content": "Hello!"}], "max_new_tokens": 32, "stream": False}]
        }
    )

    def grammar_field(self) -> GrammarField | None:
        return only_one(("grammar", Grammar.of, self.given().get("grammar")))


@with_options(*OF_PREFILL)
class NewAppend(WithTools):
    """Input to append without an answer."""

    input: Input = ""
    if_busy: Literal["reject", "queue"] = "reject"


class NewDraft(Object):
    """The whole text of the draft so far."""

    input: Input


class Abort(Object):
    """The turn to end, and the part of it to commit."""

    keep: Literal["none", "delivered", "all"] | int = Field(
        "none",
        description="`none` commits nothing. `delivered` commits the input and the output tokens sent so far, `all` the"
        " input and all output tokens, a number the input and that many output tokens.",
        examples=["delivered"],
    )
    turn_id: str | None = Field(None, description="Ends only this turn. If not given, ends the open one.")


class Position(Object):
    """A place in the history: after the first `turn` turns, or the first `position` tokens."""

    turn: int | None = Field(None, ge=0, le=MAX_COUNT, examples=[1])
    position: int | None = Field(None, ge=0, le=MAX_COUNT)


class NewFork(Position):
    """The place at which to fork; the end if not given."""

    id: NewId = None


class NewTrim(Object):
    """The turns to copy to the new session."""

    turns: Annotated[list[TurnNumber], Field(fail_fast=True, max_length=MAX_TRIM_TURNS)] = Field(
        description="Numbers of the turns, ascending.", examples=[[1]]
    )
    id: NewId = None


class Expectation(Object):
    """When the session's next turn is expected."""

    within: float | None = Field(
        gt=0, le=MAX_SECONDS, description="Seconds from now; `null` if nothing is expected any more.", examples=[20.0]
    )


@with_options("max_new_tokens", "temperature", "priority")
class NewCompaction(WithTools):
    """The turns that a summary replaces, and the summary: a text, the input of a turn, or else written by the
    model."""

    first: int = Field(1, ge=1, description="Number of the first turn to replace.", examples=[2])
    last: int | None = Field(None, ge=1, description="Number of the last turn to replace; the latest if not given.")
    summary: str | None = Field(None, min_length=1, description="The summary, as the assistant's words.")
    input: Input | None = Field(None, description="In place of `summary`: text, token ids or chat messages.")
    instructions: str | None = Field(
        None, min_length=1, description="What asks the model for a summary, or stands before a given one."
    )

    @cached_property
    def tool_use(self) -> ToolUse:
        functions = ToolUse.among(self.model_dump(include={"tools"})) or ToolUse()
        return replace(functions, choice="none")

    @property
    def asked(self) -> Message:
        """The message that the summary answers."""
        return Message("user", self.instructions or ASKED)

    def given(self) -> dict[str, Any]:
        return {"max_new_tokens": SUMMARY_TOKENS, **super().given()}

    def turn(self) -> TurnInput | None:
        """Returns the input of the turn with the given summary; `None` if the model writes it. Raises
        `InvalidRequest`."""
        if self.summary is not None and self.input is not None:
            raise InvalidRequest("summary and input are given; allowed: one of them", param="input")
        if self.summary is not None:
            return [self.asked, Message("assistant", self.summary)]
        if self.input is None:
            return None
        if not self.input:
            raise InvalidRequest("input is empty; allowed: the input of a turn", param="input")
        return turn_input(self.input)


class FileStanding(Object):
    """The state of the conversation at a turn's end: whether it has a system message and other messages, the last role,
    and a digest of its tools."""

    system: bool
    dialogue: bool
    role: str = Field(min_length=1, max_length=64, examples=["assistant"])
    tools: str = Field("", max_length=64)


class FileTurn(Object):
    """A committed turn. `conversation`: `null` if the turn is not made of messages. `cut`: the history was cut inside
    its input."""

    input: Items[TokenId]
    output: Items[TokenId]
    conversation: FileStanding | None
    cut: bool


class FileAdapter(Object):
    """The adapter of a session in a file, with the digest of its weights."""

    name: str = Field(min_length=1, max_length=128)
    digest: str = Field(min_length=1, max_length=128)


class SessionFile(Object):
    """A whole session as a file, without its memory. `model`: fingerprint of the model's tokens. `sha256`: digest of
    all other fields."""

    format: Literal["tenuto-session-1"]
    model: str = Field(max_length=128)
    id: Id
    system: str | None
    version: int = Field(ge=0, le=MAX_COUNT)
    priority: int = Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    ttl: Annotated[float | None, field_of("ttl")]
    max_tokens: Annotated[int | None, field_of("max_tokens")]
    metadata: Annotated[dict[MetadataKey, MetadataValue], at_most(16)]
    turns: Annotated[list[FileTurn], Field(fail_fast=True, max_length=MAX_FILE_TURNS)]
    adapter: FileAdapter = Field(default=None, description="Missing if it has none.")  # type: ignore[assignment]
    sha256: str = Field(max_length=128)


def version_of(if_match: str | None) -> int | None:
    """Returns the version in an `If-Match` header, or `None` if any version will do."""
    if if_match is None or if_match.strip() == "*":
        return None
    bare = if_match.strip().strip('"')
    if not (bare.isascii() and bare.isdigit() and len(bare) < 16):
        raise InvalidRequest(f"if-match is {if_match[:40]!r}; allowed: a version, as in the session's ETag")
    return int(bare)


def turn_input(given: str | list[int] | list[NewMessage]) -> TurnInput:
    """Returns the input in the engine's form."""
    if isinstance(given, str):
        return given
    return [part.message() if isinstance(part, NewMessage) else part for part in given]
