"""What the native interface takes and answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Header, Path
from pydantic import BaseModel, ConfigDict, Field

from tenuto.base.options import MAX_PRIORITY, OF_PREFILL
from tenuto.base.views import Record
from tenuto.serve.shared.schemas import Items, Messages, Object, at_most, field_of, with_options

ID_PATTERN = r"^(\.{0,2}[A-Za-z0-9_:-]|\.{3})[A-Za-z0-9._:-]*$"
"""Of a session's id: whatever needs no quoting in a URL. Clients leave `.` and `..` out of URLs, so they are no ids."""
ID_LENGTH = 64
SessionId = Annotated[str, Path(pattern=ID_PATTERN, max_length=ID_LENGTH, description="The session's id.")]
TurnId = Annotated[str, Path(pattern=r"^turn-[0-9a-f]{24}$", description="The turn's id.")]
NewId = Annotated[
    str | None,
    Field(
        pattern=ID_PATTERN,
        max_length=ID_LENGTH,
        description="Made up by the server if not given; taken ones are refused.",
    ),
]
IfMatch = Annotated[
    str | None,
    Header(description="The version the session must have, as in its `ETag`; refused with 412 if it has another."),
]
IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=200,
        description="While the first request with this key runs, others attach to its turn; once that has committed,"
        " they get its result. After an abort the key is free. With another body it is refused with 422.",
    ),
]


MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class Body(Object):
    """What requests are made of: unknown fields and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Message(Body):
    """A chat message."""

    role: str = Field(min_length=1, max_length=64, examples=["user"])
    content: str = Field(examples=["Hello!"])


Input = Annotated[
    str | Items[int] | Messages[Message],
    Field(description="Text, token ids or chat messages. Empty continues where the history ends.", examples=["Hello"]),
]


class NewSession(Body):
    """A session to be opened."""

    id: NewId = None
    system: str | None = Field(None, description="A system message, put before the first messages.")
    ttl: float | None = field_of("ttl", "Seconds without a turn until it is closed; by default as the server has it.")
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="Of its turns; higher runs first.")
    max_tokens: int | None = field_of("max_tokens")
    metadata: Annotated[dict[MetadataKey, MetadataValue], at_most(16)] = Field(
        default_factory=dict,
        description="Noted with it, and shown: up to 16 entries, of 64 and 512 characters.",
    )

    model_config = ConfigDict(json_schema_extra={"examples": [{"system": "Be brief.", "ttl": 3600}]})


@with_options()
class NewTurn(Body):
    """A turn to be started: how it generates, and what is not given is as the engine has it."""

    input: Input = ""
    stream: bool = Field(default=True, description="Send events as they come; otherwise one answer at the end.")
    if_busy: Literal["reject", "queue"] = Field(
        "reject", description="While another turn of the session is open: refuse with 409, or wait for its end."
    )
    on_disconnect: Literal["abort", "continue"] = Field(
        "abort", description="When the last reader goes: roll the turn back, or go on without."
    )

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"input": [{"role": "user", "content": "Hello!"}], "max_new_tokens": 32, "stream": False}]
        }
    )


@with_options(*OF_PREFILL)
class NewAppend(Body):
    """Input to be appended without an answer."""

    input: Input = ""
    if_busy: Literal["reject", "queue"] = "reject"


class NewDraft(Body):
    """The whole draft as it reads now."""

    input: Input


class Abort(Body):
    """Which turn to end, and what of it to commit."""

    keep: Literal["none", "delivered", "all"] | int = Field(
        "none",
        description="Nothing; its input and the output tokens that were sent; all of them; or so many.",
        examples=["delivered"],
    )
    turn_id: str | None = Field(None, description="Only if this is the turn; else whichever is open.")


class Position(Body):
    """A place in the history: after its first `turn` turns, or its first `position` tokens."""

    turn: int | None = Field(None, ge=0, examples=[1])
    position: int | None = Field(None, ge=0)


class NewFork(Position):
    """Where to fork; at the end if no place is given."""

    id: NewId = None


class NewTrim(Body):
    """Which turns the new session has."""

    turns: Items[int] = Field(min_length=0, max_length=100_000, description="Their numbers, ascending.", examples=[[1]])
    id: NewId = None


class Session(BaseModel):
    """A session as it is now. Of its `tokens`, the first `computed` have their state in memory. `memory`: units that it
    holds, by group. `version` counts commits and rewinds."""

    id: str
    state: str
    turn: str | None
    turn_id: str | None
    version: int
    turns: int
    tokens: int
    computed: int
    context_left: int
    max_tokens: int
    priority: int
    ttl: float | None
    idle_seconds: float
    memory: dict[str, int]
    metadata: dict[str, str]


class SessionList(BaseModel):
    """Sessions by id, as many as were asked for, or as fit a page of about a megabyte; `next`: what to give as `after`
    for the following ones."""

    data: list[Session]
    next: str | None


class RecordList(BaseModel):
    """Committed turns, the oldest first, as many as were asked for, or as fit a page of 65,536 tokens, or one turn;
    `next`: what to give as `first` for the following ones."""

    data: list[Record]
    next: int | None


class Usage(BaseModel):
    """Exact counts. `cached_tokens`: of the prompt, what did not have to be computed."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    computed_tokens: int


class Turn(BaseModel):
    """A turn. Once it has ended, its `reason` is stop, length, appended, abort, deadline or failed, and `kept` are the
    output tokens that were committed."""

    id: str
    session_id: str
    state: str
    text: str
    tokens: list[int]
    logprobs: list[dict[str, Any]] | None = None
    input_logprobs: list[dict[str, Any] | None] | None = None
    reason: str | None = None
    stop: str | int | None = None
    committed: bool = False
    kept: int | None = None
    version: int | None = None
    context_left: int | None = None
    max_new_tokens: int | None = None
    usage: Usage | None = None


class Error(BaseModel):
    """What was wrong, and what is allowed."""

    error: dict[str, Any]


REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Error, "description": text}
    for status, text in {
        400: "Malformed, or more than the context has room for",
        401: "No valid key",
        403: "This needs an admin key",
        404: "No such session or turn",
        409: "Busy, taken, or not possible in this state",
        410: "The session is closing",
        412: "The session has another version",
        408: "The body did not come in time",
        413: "The body is too large",
        415: "The body is not declared as JSON",
        422: "The idempotency key was used with another body",
        429: "As much as is allowed; see `Retry-After`",
        431: "The headers are too large, or too many",
        500: "The server failed",
        504: "The turn waited for its session until its deadline",
        503: "There is no engine, or the server is ending; see `Retry-After`",
    }.items()
}
EVENT = {
    "type": "object",
    "description": "An event; its data is JSON.",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "id": {"type": "string"}, "data": {"type": "string"}},
}
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The turn, or its events: `started`, `delta`, and last `committed`, `aborted` or `error`",
        "model": Turn,
        "content": {"text/event-stream": {"schema": EVENT}},
    }
}
