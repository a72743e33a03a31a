"""The native interface's answers."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from tenuto.base.views import Record


class TokenSpan(BaseModel):
    """Output tokens that the same weights have sampled: those up to the first `output_tokens` of the turn's output,
    after the span before."""

    output_tokens: int
    weight_version: str


class TokenState(BaseModel):
    """Tokens whose state in memory the same weights have computed: those from `start` on, up to the next span."""

    start: int
    weight_version: str


class TokenTurn(BaseModel):
    """A committed turn. `output_ids` were sampled, `input_ids` were not. `logprobs`: of the output tokens, or `null` if
    the turn did not ask for them. `seed`: `null` if the likeliest tokens were chosen. `weight_versions`: empty if they
    are not known."""

    turn: int
    input_ids: list[int]
    output_ids: list[int]
    logprobs: list[float] | None
    seed: int | None
    weight_versions: list[TokenSpan]


class TokenFork(BaseModel):
    """The other session of a fork, and where the two part: after `turn` turns and `position` tokens."""

    session: str
    turn: int
    position: int
    open: bool


class TokenList(BaseModel):
    """A session's committed tokens, with who made them. `weight_version`: of the weights in use. `state`: the weights
    that computed the state of the first `computed_tokens` tokens, which is in memory. `children`: open forks."""

    session: str
    version: int
    weight_version: str
    computed_tokens: int
    state: list[TokenState]
    turns: list[TokenTurn]
    parent: TokenFork | None
    children: list[TokenFork]


class Session(BaseModel):
    """The current state of a session. The state of its first `computed` tokens, out of `tokens`, is in memory.
    `memory`: units that the session and its turn need, by group. `cached`: further units they hold, which only save
    work. `version` counts commits and rewinds. `turn`: state of its open turn. `expected_in`: seconds until its next
    turn is expected, negative if it is late."""

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
    pinned: bool
    adapter: str | None
    ttl: float | None
    idle_seconds: float
    memory: dict[str, int]
    cached: dict[str, int]
    metadata: dict[str, str]
    expected_in: float | None


class Sharing(BaseModel):
    """A session that still has a part of an erased one: `tokens` at the beginning of both, `units` of memory by group,
    and `copies` in host memory or on disk. They stay until it is closed or erased too."""

    session: str
    tokens: int
    units: dict[str, int]
    copies: int


class ErasedSession(BaseModel):
    """The receipt for an erased session. `held`: units that it held, by group. `overwritten`: units of the device, all
    that were free and had been used. `copies`: overwritten in host memory. `rows`: overwritten in files of the disk
    tier. `journal_rows`: removed and overwritten. `answers`: ended turns that the server had kept for returning
    readers. `failed`: what could not be overwritten or removed, and why; empty if nothing is left."""

    session: str
    tokens: int
    held: dict[str, int]
    overwritten: dict[str, int]
    copies: int
    rows: int
    shared: list[Sharing]
    failed: list[str]
    journal_rows: int
    answers: int


class SessionList(BaseModel):
    """Sessions by id, up to the limit or a page of about a megabyte. Pass `next` as `after` to get the following
    ones."""

    data: list[Session]
    next: str | None


class Compaction(Session):
    """A session after its compaction. `summary`: the text that the model wrote, if it did. `computed_tokens` and
    `completion_tokens`: the numbers of tokens computed and generated for the compaction."""

    summary: str | None
    computed_tokens: int
    completion_tokens: int


class RecordList(BaseModel):
    """Committed turns, oldest first: at least one, up to the limit or a page of 65,536 tokens. Pass `next` as `first`
    to get the following ones."""

    data: list[Record]
    next: int | None


class Usage(BaseModel):
    """Exact numbers of tokens. `cached_tokens`: prompt tokens that did not have to be computed. Guessed tokens are
    accepted, and part of the output, or rejected. `recomputed_tokens`: those computed again, by the reason why their
    state was lost."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    computed_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    recomputed_tokens: dict[str, int]


class Turn(BaseModel):
    """A turn. Once it has ended, its `reason` is stop, length, appended, abort, deadline, grammar or failed, and `kept`
    is the number of output tokens committed. `message`: the parsed answer, if the request had `tools`.
    `weight_versions`: which weights sampled its output. `queued_seconds`: how long it waited in the engine until it
    began to compute."""

    id: str
    session_id: str
    state: str
    text: str
    message: dict[str, Any] | None = None
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
    weight_versions: list[TokenSpan] | None = None
    queued_seconds: float | None = None


EVENT = {
    "type": "object",
    "description": "An event; its data is JSON.",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "id": {"type": "string"}, "data": {"type": "string"}},
}
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The turn, or its events: `started`, `delta`, `call`, last `committed`, `aborted` or `error`",
        "model": Turn,
        "content": {"text/event-stream": {"schema": EVENT}},
    }
}


def etag(version: int | None) -> str:
    """Returns a session's version as an `ETag`."""
    return f'"{version}"'
