"""Messages between the edge and the engine, encoded as MessagePack by msgspec.

A request declares the type of its answer. Its sender chooses a call number, which answers, refusals and a turn's deltas
repeat. A session is identified by its tenant and its id among that tenant's sessions.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

import msgspec

import tenuto.base.wire.fleet_messages  # noqa: F401 - its requests are among `AnyRequest`
from tenuto.base.config import Limits
from tenuto.base.errors import EngineStopped, TenutoError
from tenuto.base.map_views import MapPart, TraceView
from tenuto.base.options import Policy, TurnParams
from tenuto.base.plan import MemoryPart
from tenuto.base.tokens import PackedTokens
from tenuto.base.tools.answers import Reading
from tenuto.base.tools.definitions import NO_TOOLS, Tools
from tenuto.base.tools.variables import NO_VARIABLES, Variables
from tenuto.base.turns import Delta, Keep, TurnInput, TurnKind
from tenuto.base.views import (
    AdapterView,
    AuditReport,
    Erased,
    FoundTurn,
    ModelView,
    RecordPage,
    SessionInfo,
    SessionKey,
    SessionPage,
    StateFilter,
    Stats,
    Ticket,
    TokenizerView,
    WeightsView,
)
from tenuto.base.wire.document import SessionDocument
from tenuto.base.wire.request import OfSession, Request, WireMessage


class Describe(Request[ModelView], frozen=True, kw_only=True):
    """Describe the model and its settings."""


class OpenSession(Request[SessionInfo], frozen=True, kw_only=True):
    """Open a session. `session` `None`: the engine generates an id. `limits`: those of its tenant."""

    session: str | None
    policy: Policy
    system: str | None = None
    limits: Limits = Limits()

    @property
    def tenant(self) -> str:
        return self.policy.tenant


class GetSession(OfSession[SessionInfo], frozen=True, kw_only=True):
    """Describe a session."""


class ExportSession(OfSession[SessionDocument], frozen=True, kw_only=True):
    """Export a session as it was at its last commit. `state`: the path of a file to write, with the session and its
    state; see `base.wire.state_file`."""

    state: str | None = None


class ImportSession(Request[SessionInfo], frozen=True, kw_only=True):
    """Import a session that this or another server exported. `session`: its id here. `policy` replaces the policy in
    the document. `state`: the path of a file with the document and its state."""

    session: str
    policy: Policy
    document: SessionDocument
    state: str | None = None
    limits: Limits = Limits()

    @property
    def tenant(self) -> str:
        return self.policy.tenant


class ListSessions(Request[SessionPage], frozen=True, kw_only=True):
    """List up to `limit` sessions of `tenant` after id `after`, by id, excluding hidden ones. `state` filters them."""

    tenant: str
    after: str = ""
    limit: int = 100
    state: StateFilter | None = None


class ListTurns(OfSession[RecordPage], frozen=True, kw_only=True):
    """List up to `limit` committed turns from number `first` on (1 is the oldest)."""

    first: int = 1
    limit: int = 100


class GetTokens(OfSession[PackedTokens], frozen=True, kw_only=True):
    """List all committed tokens with who made them, and the session's place in the tree of forks."""


class StartTurn(Request[Ticket], frozen=True, kw_only=True):
    """Start a turn. After the answer `Delta`s follow under the same call, the last with a result, or a `Refusal` if the
    engine stops.

    `session` `None`: the only turn of an ephemeral session of `tenant`. `version`: the version that the session must
    have. `keep_bos` false: a beginning-of-sequence token that the tokenizer adds to the input is dropped if the session
    has a history. `echo`: the ticket contains the prompt's tokens and text. `markup`: control tokens spelled out in a
    text input are encoded as control tokens. `name`: a unique name by which the turn can be withdrawn. `tools`: the
    functions that the model may call, rendered with the first messages; later turns may repeat them. `variables`: those
    of the chat template in this turn. `once`: an idempotency key and a digest of the client's request; the committed
    turn is kept for `FindTurn`. `adapter`: the name of the adapter, and "" for none; a session that is given must have
    the same. `None`: that of the session. `continues`: the output continues the last message of the input, which is one
    of the assistant. `closed`, of an ephemeral session: the input ends where the template ends its last message, and
    nothing asks for an answer. `most`, of an ephemeral session: only so many of the prompt's tokens are used, the last
    ones, or, if it is negative, the first. `resumable`: the journal of the fleet has the request before it is answered,
    and another replica that takes the session over begins the turn again. `reading`: how its answer is parsed, for that
    replica. `about`: what its interface wants to know there; kept with the committed turn.
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
    tools: Tools = NO_TOOLS
    variables: Variables = NO_VARIABLES
    once: tuple[str, bytes] | None = None
    adapter: str | None = None
    continues: bool = False
    closed: bool = False
    most: int | None = None
    resumable: bool = False
    reading: Reading | None = None
    about: bytes = b""

    @property
    def key(self) -> SessionKey | None:
        """The key of the session; `None` for an ephemeral one."""
        return (self.tenant, self.session) if self.session is not None else None


class FindTurn(OfSession[FoundTurn], frozen=True, kw_only=True):
    """Find a committed turn of this session that was started with an idempotency key, in this or another process: by
    the key, or without one by its name; see `StartTurn`."""

    once: str | None = None
    name: str = ""


class Draft(OfSession[SessionInfo], frozen=True, kw_only=True):
    """Replace the session's draft with `input`. `name`: as in `StartTurn`."""

    input: TurnInput
    version: int | None = None
    limits: Limits = Limits()
    name: str = ""


class Expect(OfSession[SessionInfo], frozen=True, kw_only=True):
    """Expect the next turn of an idle session `within` seconds from now; `None`: in the time that the tools took
    before whose names are in `calls`, which its last turn has called; without these, expect nothing any more."""

    within: float | None = None
    calls: tuple[str, ...] = ()
    version: int | None = None


class Withdraw(Request[bool], frozen=True, kw_only=True):
    """Refuse the `StartTurn` or `Draft` of this name if its input has not reached the engine yet; answers whether it
    was refused. Sent when its caller no longer waits."""

    name: str


class AbortTurn(OfSession[bool], frozen=True, kw_only=True):
    """Abort the open turn, or only turn number `turn`; answers whether a turn was aborted. `keep`: as in
    `TurnOperations.abort`."""

    turn: int | None = None
    keep: Keep = None


class Fork(OfSession[SessionInfo], frozen=True, kw_only=True):
    """Open a child with the history up to a turn or position. `child`: its id, as `session` in `OpenSession`.
    `metadata` and `hidden` replace those of the parent."""

    child: str | None
    turn: int | None = None
    position: int | None = None
    metadata: tuple[tuple[str, str], ...] | None = None
    hidden: bool | None = None
    version: int | None = None
    limits: Limits = Limits()


class Trim(OfSession[SessionInfo], frozen=True, kw_only=True):
    """Open a child with some of the turns. `child`: its id, as `session` in `OpenSession`."""

    child: str | None
    turns: list[int]
    version: int | None = None
    limits: Limits = Limits()


class CopyTurns(OfSession[SessionInfo], frozen=True, kw_only=True):
    """Append copies of the turns of the session `source`, from turn number `first` on, to a session with a history.
    They are computed when needed. `version`: that of `source`."""

    source: str
    first: int
    version: int | None = None


class ReplaceHistory(OfSession[SessionInfo], frozen=True, kw_only=True):
    """Replace the history by that of the session `source`, and share its memory. `source` stays as it is."""

    source: str
    version: int | None = None


class Rewind(OfSession[SessionInfo], frozen=True, kw_only=True):
    """Cut the history back to a turn or position."""

    turn: int | None = None
    position: int | None = None
    version: int | None = None


class CloseSession(OfSession[None], frozen=True, kw_only=True):
    """Close a session; `finish` lets its turn end first."""

    finish: bool = False
    version: int | None = None


class EraseSession(OfSession[Erased], frozen=True, kw_only=True):
    """Close a session and overwrite what it leaves in memory, tiers and journal. An open turn is aborted."""

    version: int | None = None


class DropMemory(Request[int], frozen=True, kw_only=True):
    """Drop the memory of every session without a running turn, but keep its tokens; answers the number of sessions that
    held memory."""


class Pause(Request[None], frozen=True, kw_only=True):
    """Stop stepping until `Resume`. Open turns wait, or with `release` lose the memory they have acquired and compute
    it again. Sessions may be changed meanwhile."""

    release: bool = False


class Resume(Request[None], frozen=True, kw_only=True):
    """Continue after `Pause`."""


class ReleaseMemory(Request[None], frozen=True, kw_only=True):
    """Return these parts of the model's memory to the system. Sessions keep their tokens, and turns are refused."""

    parts: list[MemoryPart]


class ResumeMemory(Request[None], frozen=True, kw_only=True):
    """Allocate these parts again. Turns continue once all parts are allocated."""

    parts: list[MemoryPart]


MAX_WEIGHT_VERSION = 256
"""The most characters of the version of weights."""


class NewWeights(msgspec.Struct, frozen=True, kw_only=True):
    """How other weights are put to use. `version`: their name, by default the number of updates. With `abort` open
    turns are aborted; otherwise they continue. With `keep_state` sessions keep the state that earlier weights computed;
    otherwise it is dropped."""

    version: str | None = None
    abort: bool = False
    keep_state: bool = False


class UpdateWeights(Request[WeightsView], frozen=True, kw_only=True):
    """Compute with the weights at `path` from now on."""

    path: str
    use: NewWeights = NewWeights()


class NameWeights(Request[None], frozen=True, kw_only=True):
    """Call the weights in use `version` from now on. With `abort` open turns are aborted."""

    version: str
    abort: bool = False


class UpdateTensors(Request[WeightsView], frozen=True, kw_only=True):
    """Like `UpdateWeights`, with some tensors in place of those in use; see `read_tensors` (`bucket`: its
    `flattened`)."""

    pickled: bytes
    bucket: bool = False
    use: NewWeights = NewWeights()


class JoinGroup(Request[None], frozen=True, kw_only=True):
    """Join a group of processes in which a trainer broadcasts weights; see `WeightGroups.join`."""

    group: str
    address: str
    port: int
    rank: int
    size: int


class LeaveGroup(Request[None], frozen=True, kw_only=True):
    """Leave a group of processes."""

    group: str


class ReceiveTensors(Request[WeightsView], frozen=True, kw_only=True):
    """Like `UpdateTensors`, with tensors that the trainer broadcasts; see `WeightGroups.receive`."""

    group: str
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    bucket: bool = False
    use: NewWeights = NewWeights()


class GetWeight(Request[list[Any]], frozen=True, kw_only=True):
    """Return the first `most` numbers or rows of a tensor of the weights in use, as nested lists."""

    name: str
    most: int


class LoadAdapter(Request[AdapterView], frozen=True, kw_only=True):
    """Read the adapter in the directory `path`, and load it as `name`. `replace`: it takes the place of the loaded one
    of this name."""

    name: str
    path: str
    replace: bool = False


class UnloadAdapter(Request[AdapterView], frozen=True, kw_only=True):
    """Unload an adapter; answers which it was."""

    name: str


class Audit(Request[AuditReport], frozen=True, kw_only=True):
    """Recount every unit of memory."""


class GetStats(Request[Stats], frozen=True, kw_only=True):
    """Return the engine's counters."""


class Look(Request[MapPart], frozen=True, kw_only=True):
    """Return what has changed on the map since the last look, also what is not acknowledged yet. `fresh`: all of it.
    `again`: the numbers of sessions to describe in any case. `end`: nobody looks any more."""

    fresh: bool = False
    again: list[int] = msgspec.field(default_factory=list)
    end: bool = False


class BeginTrace(Request[None], frozen=True, kw_only=True):
    """Begin to record steps."""


class EndTrace(Request[TraceView], frozen=True, kw_only=True):
    """Return the steps since `BeginTrace`, and stop recording."""


class ParkSession(OfSession[SessionInfo], frozen=True, kw_only=True):
    """Move an idle session off the device: to a tier, or if none has room, to its tokens."""

    version: int | None = None


class Detokenize(Request[str], frozen=True, kw_only=True):
    """Return the text of tokens; `special` writes control tokens out. `tenant`: that of the caller."""

    tenant: str = ""
    tokens: list[int]
    special: bool = True


class TokenTexts(Request[list[str]], frozen=True, kw_only=True):
    """Return the text of each token, with control tokens written out, or its entry in the vocabulary, which may write
    blanks and other bytes differently. `tenant`: that of the caller."""

    tenant: str = ""
    tokens: list[int]
    entries: bool = False


class DescribeTokenizer(Request[TokenizerView], frozen=True, kw_only=True):
    """Describe the model's tokenizer."""


class Tokenize(Request[bytes], frozen=True, kw_only=True):
    """Return the tokens of an input that opens a session as the bytes of an `array("i")`, since there may be millions.
    `markup`, `tools` and `variables`: as in `StartTurn`. `generate`: messages end where the assistant's answer begins;
    otherwise with the last content, or, if `closed`, after the end of the last message. `tenant`: that of the caller.
    """

    tenant: str = ""
    input: TurnInput
    tools: Tools = NO_TOOLS
    variables: Variables = NO_VARIABLES
    markup: bool = False
    generate: bool = True
    closed: bool = False


AnyRequest: Any = reduce(or_, {*Request.__subclasses__(), *OfSession.__subclasses__()} - {OfSession})
"""The union of all kinds of requests."""


class Answer(WireMessage, frozen=True, kw_only=True):
    """Engine to edge: a request's answer, encoded on its own."""

    call: int
    value: msgspec.Raw


class Refusal(WireMessage, frozen=True, kw_only=True):
    """Engine to edge: a `TenutoError`."""

    call: int
    code: str
    message: str
    param: str | None = None
    detail: str = ""
    details: dict[str, Any] | None = None


class Updates(WireMessage, frozen=True, kw_only=True):
    """Engine to edge: the deltas of a step, by call."""

    updates: list[tuple[int, Delta]]


MAYBE_DONE = "the request may have been carried out, and its turn may be in the session once that is served again"
"""The end of an error message for a request that was under way when the engine stopped."""


class Stopped(WireMessage, frozen=True, kw_only=True):
    """Engine to edge: the last message, with the reason why the engine has stopped. `detail`: see `TenutoError`."""

    reason: str
    detail: str = ""

    def error(self) -> EngineStopped:
        """The error of every later request."""
        return EngineStopped(self.reason, detail=self.detail)

    def interrupted(self) -> EngineStopped:
        """The error of a request that was under way."""
        return EngineStopped(f"{self.reason}; {MAYBE_DONE}", detail=self.detail)


AnyReply = Answer | Refusal | Updates | Stopped


def _by_code(kind: type[TenutoError]) -> dict[str, type[TenutoError]]:
    found = {kind.code: kind}
    for child in kind.__subclasses__():
        found |= _by_code(child)
    return found


_ERRORS = _by_code(TenutoError)


def refusal_of(call: int, error: TenutoError) -> Refusal:
    """Returns the message for an error."""
    return Refusal(
        call=call,
        code=error.code,
        message=error.message,
        param=error.param,
        detail=error.detail,
        details=dict(error.details) if error.details is not None else None,
    )


def error_of(refusal: Refusal) -> TenutoError:
    """Returns the error of a refusal."""
    kind = _ERRORS.get(refusal.code, TenutoError)
    return kind(refusal.message, param=refusal.param, detail=refusal.detail, details=refusal.details)
