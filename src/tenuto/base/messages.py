"""What the edge and the engine say to each other: typed messages, encoded as MessagePack by msgspec.

A request has a call number that its sender chose; answers, refusals and a turn's updates name it. Session ids in
messages are the engine's, which the edge has made from a tenant's name and the id its users know.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tenuto.base.errors import TenutoError

HIDDEN = "~"
"""In the id of a session that the edge has made for its own use: it is not listed."""


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True, kw_only=True):
    """Base of all messages; on the wire an array that begins with the message's name."""


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is made; the first message to an engine process. `config`: fields of `EngineConfig`."""

    model: str
    device: str = "cpu"
    dtype: str | None = None
    memory_bytes: int | None = None
    page_size: int = 16
    config: dict[str, Any] = {}


class Request(Message, frozen=True, kw_only=True):
    """Edge to engine. `call` is set by the link."""

    call: int = 0


class Describe(Request, frozen=True, kw_only=True):
    """Answer: `ModelView`."""


class OpenSession(Request, frozen=True, kw_only=True):
    """Answer: `SessionView`. The limits are the tenant's, `None` for none."""

    session: str
    tenant: str
    system: str | None = None
    priority: int = 0
    ttl: float | None = None
    max_tokens: int | None = None
    metadata: dict[str, str] = {}
    most_sessions: int | None = None
    most_tokens: int | None = None


class GetSession(Request, frozen=True, kw_only=True):
    """Answer: `SessionView`."""

    session: str


class ListSessions(Request, frozen=True, kw_only=True):
    """Answer: `SessionPage`: up to `limit` of `tenant` (`None`: of all), by id, those after `after`, in `state` if
    given: open, closing, or a state of their turn (`idle`: none)."""

    tenant: str | None
    after: str = ""
    limit: int = 100
    state: str | None = None


class ListTurns(Request, frozen=True, kw_only=True):
    """Answer: `RecordPage`: up to `limit` committed turns from number `first` (1 is the oldest) on."""

    session: str
    first: int = 1
    limit: int = 100


class StartTurn(Request, frozen=True, kw_only=True):
    """Answer: `Ticket`; then `TurnUpdate`s under the same call, the last with a result, or a `Refusal` if the engine
    stops.

    `kind`: turn, append or regenerate. `session` `None`: the only turn of an ephemeral session of `tenant`. `input`:
    text, token ids or messages. `options`: fields of `TurnOptions`. `version`: the session's must be that.
    `keep_bos` false: a beginning-of-sequence token at the start of an input to a session with a history is dropped, if
    the tokenizer adds one by itself. `echo`: the ticket has the prompt's tokens and text. `markup`: control tokens that
    are written out in a text are those tokens. `name`: by which it can be withdrawn, unlike any other.
    """

    kind: str
    tenant: str
    session: str | None = None
    input: str | list[Any] = []
    options: dict[str, Any] = {}
    version: int | None = None
    keep_bos: bool = True
    echo: bool = False
    most_tokens: int | None = None
    markup: bool = False
    name: str = ""


class Draft(Request, frozen=True, kw_only=True):
    """Answer: `SessionView`. `name`: as of `StartTurn`."""

    session: str
    input: str | list[Any]
    version: int | None = None
    most_tokens: int | None = None
    name: str = ""


class Withdraw(Request, frozen=True, kw_only=True):
    """Nobody waits any more for the `StartTurn` or `Draft` of this name: if its input is not in the engine yet, it is
    refused, and otherwise nothing changes. Answer: whether it was still on its way."""

    name: str


class AbortTurn(Request, frozen=True, kw_only=True):
    """Answer: whether a turn was ended. `turn`: only if that is the open one. `keep`: as `Engine.abort`."""

    session: str
    turn: int | None = None
    keep: int | None = None


class Fork(Request, frozen=True, kw_only=True):
    """Answer: `SessionView` of the child."""

    session: str
    child: str
    turn: int | None = None
    position: int | None = None
    version: int | None = None
    most_sessions: int | None = None
    most_tokens: int | None = None


class Trim(Request, frozen=True, kw_only=True):
    """Answer: `SessionView` of the child."""

    session: str
    child: str
    turns: list[int]
    version: int | None = None
    most_sessions: int | None = None
    most_tokens: int | None = None


class Rewind(Request, frozen=True, kw_only=True):
    """Answer: `SessionView`."""

    session: str
    turn: int | None = None
    position: int | None = None
    version: int | None = None


class CloseSession(Request, frozen=True, kw_only=True):
    """Answer: `None`."""

    session: str
    finish: bool = False
    version: int | None = None


class DropMemory(Request, frozen=True, kw_only=True):
    """Drop what is not running to its tokens. Answer: how many sessions held something."""


class Audit(Request, frozen=True, kw_only=True):
    """Answer: `AuditView`."""


class GetStats(Request, frozen=True, kw_only=True):
    """Answer: `Stats`."""


class Detokenize(Request, frozen=True, kw_only=True):
    """Answer: text, with the control tokens written out if `special`."""

    tokens: list[int]
    special: bool = True


AnyRequest = (
    Describe
    | OpenSession
    | GetSession
    | ListSessions
    | ListTurns
    | StartTurn
    | Draft
    | Withdraw
    | AbortTurn
    | Fork
    | Trim
    | Rewind
    | CloseSession
    | DropMemory
    | Audit
    | GetStats
    | Detokenize
)


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what answers carry; also what HTTP answers are made of."""


class ModelView(View, frozen=True, kw_only=True):
    """The model that runs, and how."""

    model: str
    path: str
    vocab_size: int
    context_length: int
    max_context: int
    page_size: int
    capacity_tokens: int
    units: dict[str, int]
    adds_bos: bool
    bos_id: int | None
    eos_ids: list[int]
    has_text: bool
    has_chat: bool
    pid: int
    config: dict[str, Any]


class SessionView(View, frozen=True, kw_only=True):
    """A session as it is. `memory`: units it holds of each group. `idle_seconds`: since its last turn ended."""

    id: str
    tenant: str
    state: str
    turn: str | None
    version: int
    turns: int
    tokens: int
    computed: int
    context_left: int
    limit: int
    priority: int
    ttl: float | None
    idle_seconds: float
    memory: dict[str, int]
    metadata: dict[str, str]


class SessionPage(View, frozen=True, kw_only=True):
    """Sessions by id. `more`: others follow; a page ends early if it becomes large, but has one if there is one."""

    sessions: list[SessionView]
    more: bool


class RecordView(View, frozen=True, kw_only=True):
    """A committed turn; its tokens, and their text if there is a tokenizer."""

    number: int
    start: int
    input: list[int]
    output: list[int]
    input_text: str | None
    output_text: str | None


class RecordPage(View, frozen=True, kw_only=True):
    """Committed turns in order. `more`: as of `SessionPage`."""

    records: list[RecordView]
    more: bool


class Ticket(View, frozen=True, kw_only=True):
    """A turn that was accepted. `prompt` and `text` only if an echo was asked for."""

    turn: int
    session: str
    history: int
    prompt_tokens: int
    max_new_tokens: int
    version: int
    prompt: list[int] = []
    text: str | None = None


class PoolView(View, frozen=True, kw_only=True):
    """Units of one memory group."""

    name: str
    capacity: int
    free: int
    in_flight: int
    leased: int
    by_holder: dict[str, int] = {}


class AuditView(View, frozen=True, kw_only=True):
    """A clean audit."""

    summary: str
    pools: list[PoolView]
    holders: int
    leases: int


class Stats(View, frozen=True, kw_only=True):
    """Counts since the start, and how things are now. `recomputed`: tokens computed again, by why."""

    sessions: int
    running: int
    queued: int
    steps: int
    transitions: dict[str, int]
    pools: list[PoolView]
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    computed_tokens: int
    recomputed: dict[str, int]
    held_tokens: dict[str, int]


class Candidate(msgspec.Struct, array_like=True, frozen=True):
    """A token that may come next; `raw` is what it says, not always whole UTF-8."""

    token: int
    logprob: float
    raw: bytes


class LogprobView(msgspec.Struct, array_like=True, frozen=True):
    """A token's log probability, and the likeliest tokens at its place."""

    token: int
    logprob: float
    raw: bytes
    top: list[Candidate]


class ResultView(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """As `session.turn.TurnResult`. `stop`: the stop string or stop id that ended the turn, if one did."""

    reason: str
    committed: bool
    version: int
    kept: int
    prompt: int
    cached: int
    generated: int
    computed: int
    max_new_tokens: int
    context_left: int
    stop: str | int | None = None


class TurnUpdate(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a turn has brought since its last update. `delivered`: leading output tokens whose text is out, ever."""

    call: int
    tokens: list[int]
    text: str
    delivered: int
    result: ResultView | None = None
    logprobs: list[LogprobView] | None = None
    input_logprobs: list[LogprobView | None] | None = None


class Answer(Message, frozen=True, kw_only=True):
    """Engine to edge: what was asked for, encoded on its own."""

    call: int
    value: msgspec.Raw


class Refusal(Message, frozen=True, kw_only=True):
    """Engine to edge: a `TenutoError`."""

    call: int
    code: str
    message: str
    param: str | None = None


class Updates(Message, frozen=True, kw_only=True):
    """Engine to edge: what a step has brought."""

    updates: list[TurnUpdate]


class Stopped(Message, frozen=True, kw_only=True):
    """Engine to edge: the last message."""

    reason: str


AnyReply = Answer | Refusal | Updates | Stopped


def _by_code(kind: type[TenutoError]) -> dict[str, type[TenutoError]]:
    found = {kind.code: kind}
    for child in kind.__subclasses__():
        found |= _by_code(child)
    return found


_ERRORS = _by_code(TenutoError)


def error_of(refusal: Refusal) -> TenutoError:
    """The error that was refused with, to be raised on this side."""
    return _ERRORS.get(refusal.code, TenutoError)(refusal.message, param=refusal.param)
