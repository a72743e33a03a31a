"""What the edge and the engine say to each other: typed messages, encoded as MessagePack by msgspec.

A request names the type of its answer. It has a call number that its sender chose; answers, refusals and a turn's
deltas name it. A session is named by its tenant and its id among the sessions of that tenant.
"""

from __future__ import annotations

from functools import cache
from typing import Generic, TypeVar, cast, get_args

import msgspec

from tenuto.base.config import EngineOptions, Limits, engine_config
from tenuto.base.errors import TenutoError
from tenuto.base.options import Policy, TurnParams
from tenuto.base.turns import Delta, Keep, TurnInput, TurnKind
from tenuto.base.views import (
    AuditReport,
    ModelView,
    RecordPage,
    SessionInfo,
    SessionKey,
    SessionPage,
    StateFilter,
    Stats,
    Ticket,
)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class WireMessage(msgspec.Struct, array_like=True, tag=True, frozen=True, kw_only=True):
    """Base of all messages; on the wire an array that begins with the message's name."""


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is made; the first message to an engine process, which logs what is of `log_level` and above, as
    the edge does. Raises `ConfigError` if `config` is wrong whatever the model is."""

    model: str
    device: str = "cpu"
    dtype: str | None = None
    memory_bytes: int | None = None
    page_size: int = 16
    config: EngineOptions = {}
    log_level: str = "info"

    def __post_init__(self) -> None:
        engine_config(self.config)


class Request(WireMessage, Generic[T_co], frozen=True, kw_only=True):
    """Edge to engine, to be answered with a `T_co`. `call` is set by the link."""

    call: int = 0


class OfSession(Request[T_co], Generic[T_co], frozen=True, kw_only=True):
    """A request about one session."""

    tenant: str
    session: str


@cache
def answer_of(request: type[Request[T]]) -> type[T]:
    """The type that a kind of request is answered with."""
    (answer,) = get_args(request.__orig_bases__[0])  # type: ignore[attr-defined] # every generic class has them
    return cast("type[T]", answer)


class Describe(Request[ModelView], frozen=True, kw_only=True):
    """What runs."""


class OpenSession(Request[SessionInfo], frozen=True, kw_only=True):
    """A new session. `session` `None`: the engine makes up an id. `limits`: its tenant's."""

    session: str | None
    policy: Policy
    system: str | None = None
    limits: Limits = Limits()

    @property
    def tenant(self) -> str:
        return self.policy.tenant


class GetSession(OfSession[SessionInfo], frozen=True, kw_only=True):
    """A session as it is."""


class ListSessions(Request[SessionPage], frozen=True, kw_only=True):
    """Up to `limit` of `tenant`, by id, those after `after` that are not hidden; in `state`, if it is given."""

    tenant: str
    after: str = ""
    limit: int = 100
    state: StateFilter | None = None


class ListTurns(OfSession[RecordPage], frozen=True, kw_only=True):
    """Up to `limit` committed turns from number `first` (1 is the oldest) on."""

    first: int = 1
    limit: int = 100


class StartTurn(Request[Ticket], frozen=True, kw_only=True):
    """Start a turn. After the answer come `Delta`s under the same call, the last with a result, or a `Refusal` if the
    engine stops.

    `session` `None`: the only turn of an ephemeral session of `tenant`.
    `version`: the session's must be that. `keep_bos` false: a beginning-of-sequence token at the start of an input to a
    session with a history is dropped, if the tokenizer adds one by itself. `echo`: the ticket has the prompt's tokens
    and text. `markup`: control tokens that are written out in a text are those tokens. `name`: by which it can be
    withdrawn, unlike any other.
    """

    kind: TurnKind
    tenant: str
    session: str | None = None
    input: TurnInput = ()
    params: TurnParams = TurnParams()
    version: int | None = None
    keep_bos: bool = True
    echo: bool = False
    limits: Limits = Limits()
    markup: bool = False
    name: str = ""

    @property
    def key(self) -> SessionKey | None:
        """The session, if it has one."""
        return (self.tenant, self.session) if self.session is not None else None


class Draft(OfSession[SessionInfo], frozen=True, kw_only=True):
    """The whole draft as it reads now. `name`: as of `StartTurn`."""

    input: TurnInput
    version: int | None = None
    limits: Limits = Limits()
    name: str = ""


class Withdraw(Request[bool], frozen=True, kw_only=True):
    """Nobody waits any more for the `StartTurn` or `Draft` of this name: if its input is not in the engine yet, it is
    refused, and otherwise nothing changes: whether it was still on its way."""

    name: str


class AbortTurn(OfSession[bool], frozen=True, kw_only=True):
    """Whether a turn was ended. `turn`: only if that is the open one. `keep`: as `Engine.abort`."""

    turn: int | None = None
    keep: Keep = None


class Fork(OfSession[SessionInfo], frozen=True, kw_only=True):
    """The child, with the history up to a place. `child`: its id, as of `OpenSession`."""

    child: str | None
    turn: int | None = None
    position: int | None = None
    version: int | None = None
    limits: Limits = Limits()


class Trim(OfSession[SessionInfo], frozen=True, kw_only=True):
    """The child, with some of the turns. `child`: its id, as of `OpenSession`."""

    child: str | None
    turns: list[int]
    version: int | None = None
    limits: Limits = Limits()


class Rewind(OfSession[SessionInfo], frozen=True, kw_only=True):
    """Cut the history back."""

    turn: int | None = None
    position: int | None = None
    version: int | None = None


class CloseSession(OfSession[None], frozen=True, kw_only=True):
    """Close a session; with `finish` its turn may end first."""

    finish: bool = False
    version: int | None = None


class DropMemory(Request[int], frozen=True, kw_only=True):
    """Drop what is not running to its tokens: how many sessions held something."""


class Audit(Request[AuditReport], frozen=True, kw_only=True):
    """Recount every unit of memory."""


class GetStats(Request[Stats], frozen=True, kw_only=True):
    """What the engine counts."""


class Detokenize(Request[str], frozen=True, kw_only=True):
    """The text of tokens, with the control tokens written out if `special`."""

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


class Answer(WireMessage, frozen=True, kw_only=True):
    """Engine to edge: what was asked for, encoded on its own."""

    call: int
    value: msgspec.Raw


class Refusal(WireMessage, frozen=True, kw_only=True):
    """Engine to edge: a `TenutoError`."""

    call: int
    code: str
    message: str
    param: str | None = None


class Updates(WireMessage, frozen=True, kw_only=True):
    """Engine to edge: what a step has brought, by call."""

    updates: list[tuple[int, Delta]]


class Stopped(WireMessage, frozen=True, kw_only=True):
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
