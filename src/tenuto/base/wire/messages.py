"""Messages of the edge to the engine, encoded as MessagePack by msgspec.

A request declares the type of its answer. Its sender chooses a call number, which answers, refusals and a turn's deltas
repeat; see `base.wire.replies`. A session is identified by its tenant and its id among that tenant's sessions.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

import msgspec

import tenuto.base.wire.fleet_messages  # its requests are among `AnyRequest`
import tenuto.base.wire.trainer_messages  # noqa: F401 - and so are these
from tenuto.base.config import Limits
from tenuto.base.map_views import MapPart, TraceView
from tenuto.base.options import Policy, TurnParams
from tenuto.base.tokens import PackedTokens
from tenuto.base.tools.answers import Reading
from tenuto.base.tools.definitions import NO_TOOLS, Tools
from tenuto.base.tools.variables import NO_VARIABLES, Variables
from tenuto.base.turns import Keep, TurnInput, TurnKind
from tenuto.base.views import (
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
)
from tenuto.base.wire.document import SessionDocument
from tenuto.base.wire.request import OfSession, Request


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
    """Replace the history by that of the session `source`, and share its memory. `source` stays as it is; a hidden one
    does not count towards the `limits`, since it is to be closed."""

    source: str
    version: int | None = None
    limits: Limits = Limits()


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
