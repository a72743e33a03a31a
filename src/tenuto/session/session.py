"""A session: committed history and policy. Its tokens define it; memory only caches the state of a prefix of them."""

from __future__ import annotations

import secrets
from array import array
from typing import TYPE_CHECKING

from tenuto.base.checks import whole
from tenuto.base.errors import IllegalTransition, SessionBusy, SessionClosed
from tenuto.base.options import Policy, Scope
from tenuto.base.turns import TurnState
from tenuto.base.views import SessionKey, SessionState
from tenuto.base.wire.document import Conversation
from tenuto.memory.session_memory import SessionMemory
from tenuto.memory.tiers.contents import Digests
from tenuto.session.common import common_prefix
from tenuto.session.records import Made, Origin, SavedSession, TurnRecord, cut_records
from tenuto.session.results import KeptTurns
from tenuto.session.suffixes import SessionSuffixes

if TYPE_CHECKING:  # a turn and its session refer to each other; the module of turns imports this one
    from tenuto.session.turn import Turn

SESSION_BYTES = 512
"""The approximate size in a journal of a session without turns."""
RECORD_BYTES = 192
"""The approximate size in a journal of a turn, without its tokens."""


class Session:
    """Committed history with its turn boundaries, the policy, and the memory that caches a prefix of the history.

    Invariant: `records` cover `history` without gaps; at rest `memory.computed <= max(0, len(history) - 1)`.
    """

    def __init__(
        self,
        session_id: str,
        policy: Policy,
        memory: SessionMemory,
        limit: int,
        now: float,
        system: str | None = None,
    ) -> None:
        self.id = session_id
        self.policy = policy
        self._scope = policy.scope  # never changes
        self.system = system  # the system message of its conversation
        self.memory = memory
        self.limit = limit  # the most tokens: the least of context window, own cap and what the pools can hold
        self.state = SessionState.OPEN
        self.history = array("i")
        self.records: list[TurnRecord] = []
        self._logprob_bytes = 0  # the size of the log-probabilities of all records
        self.birth = secrets.randbits(63)  # unique to this session
        self.origin: Origin | None = None  # where it was forked, if it was
        self.parent: Session | None = None  # the session of its origin, while that is open
        self.forks: dict[Session, None] = {}  # the open sessions whose parent it is
        self.epoch = 0  # of this replica's ownership in a fleet; written by the journal's thread, and at a restore
        self.version = 0  # raised by every commit, rewind and replacement
        self.held = (
            False  # whether it may soon be another replica's, so that nothing changes it; written by `Departures`
        )
        self.turn: Turn | None = None  # the open turn; set by the engine, cleared by the turn's end
        self.last_turn_end = now
        self.expected: float | None = None  # when its next turn is expected; written by the engine, as is the next
        self.calls: tuple[str, ...] = ()  # the names of the tools that its last turn called, if they are known
        self.rests = False  # whether it has been idle for `REST_SHARE` of its TTL; written by the registry
        self.counted = 0  # tokens counted for its tenant; written by the registry, as are the next two
        self.counted_units = 0
        self.counted_bytes = 0
        self.results = KeptTurns()
        self.digests = Digests(self._scope)  # of its history, to name the contents of its units
        self.suffixes: SessionSuffixes | None = None  # its index for guesses; written by the proposer

    def __repr__(self) -> str:
        return f"<session {self.id} {self.state.value}, {len(self.history)} tokens>"

    @property
    def scope(self) -> Scope:
        """The properties that it shares with sessions whose memory it may use."""
        return self._scope

    @property
    def key(self) -> SessionKey:
        """Tenant and id, under which the registry finds it."""
        return self.policy.tenant, self.id

    @property
    def context_left(self) -> int:
        """The number of tokens that still fit."""
        return self.limit - len(self.history)

    @property
    def conversation(self) -> Conversation | None:
        """The conversation so far; `None` if the last turn was given as tokens and not as messages."""
        return self.records[-1].conversation if self.records else None

    @property
    def cut(self) -> bool:
        """Whether the history ends inside the last turn's input because it was cut there."""
        return bool(self.records) and self.records[-1].cut

    @property
    def journal_bytes(self) -> int:
        """The approximate size of the session in a journal, as if it shared no pieces with others."""
        if not self.policy.lasting:
            return 0
        return SESSION_BYTES + len((self.system or "").encode()) + self.history_bytes + self.results.size

    @property
    def history_bytes(self) -> int:
        """The approximate size of the history in a journal, with its records."""
        return 4 * len(self.history) + RECORD_BYTES * len(self.records) + self._logprob_bytes

    @property
    def has_running_turn(self) -> bool:
        return self.turn is not None and self.turn.state is TurnState.RUNNING

    @property
    def turn_state(self) -> str:
        """The state of the open turn, or `idle`."""
        return self.turn.state.value if self.turn is not None else "idle"

    def require_open(self) -> None:
        if self.state is not SessionState.OPEN:
            raise SessionClosed(f"session {self.id} is {self.state.value}; allowed: an open session")

    def require_idle(self, operation: str) -> None:
        """Raises `SessionClosed` or `SessionBusy` unless the session is open and has no open turn."""
        self.require_open()
        if self.turn is not None:
            raise SessionBusy(
                f"cannot {operation} session {self.id}: its turn is {self.turn.state.value}; end or abort it first"
            )

    def commit(self, turn: Turn, output: array[int]) -> None:
        """Commits `turn`: adds its input and `output` to the history, and its memory, except for the last token, to the
        session's memory."""
        replaced = self.records.pop() if turn.replaces else None
        self._logprob_bytes -= replaced.logprob_bytes if replaced is not None else 0
        del self.history[turn.base_length :]
        start = replaced.start if replaced is not None else turn.base_length
        self._extend(start, turn.input, output, turn.conversation, made=turn.made(len(output)))
        valid = turn.base_length if turn.replaces else turn.prompt_length
        if self.memory.turn is not None:
            self.memory.turn.commit(self._last(), valid)
        else:
            self.memory.truncate(min(valid, self._last()))

    def adopt(
        self,
        tokens: array[int],
        output: array[int],
        now: float,
        conversation: Conversation | None = None,
        cut: bool = False,
        made: Made | None = None,
    ) -> None:
        """Commits a turn that was computed elsewhere and ends now; only its tokens, and how they were `made`, are known
        here."""
        self._extend(len(self.history), tokens, output, conversation, cut=cut, made=made)
        self.memory.lost = "adopted"
        self.turn_ended(now)

    def _extend(
        self,
        start: int,
        tokens: array[int],
        output: array[int],
        conversation: Conversation | None,
        *,
        cut: bool = False,
        made: Made | None = None,
    ) -> None:
        """Adds `tokens` and `output` to the history, and the record of their turn, which begins at `start`."""
        self.digests.cut(len(self.history))  # there may have been others
        self.history.extend(tokens)
        input_end = len(self.history)
        self.history.extend(output)
        if len(self.history) > start:  # an empty append leaves no record
            self.records.append(TurnRecord(start, input_end, len(self.history), conversation, cut, made))
            self._logprob_bytes += self.records[-1].logprob_bytes
        self.version += 1

    def _set_records(self, records: list[TurnRecord]) -> None:
        self.records = records
        self._logprob_bytes = sum(record.logprob_bytes for record in records)

    def saved(self) -> SavedSession:
        """Returns the session as its last commit left it."""
        return SavedSession(
            self.id,
            self.policy,
            self.system,
            self.version,
            self.history[:],
            tuple(self.records),
            results=self.results.all(),
            birth=self.birth,
            origin=self.origin,
        )

    def restore(self, saved: SavedSession) -> None:
        """Fills this new session with the saved history."""
        self.history.extend(saved.tokens)
        self._set_records(list(saved.records))
        self.version = saved.version
        self.results = KeptTurns(saved.results)
        self.birth, self.origin = saved.birth if saved.birth is not None else self.birth, saved.origin
        self.epoch = saved.epoch
        self.memory.lost = "restored"

    def turn_ended(self, now: float) -> None:
        """Ends the open turn, which has committed or aborted."""
        self.turn = None
        self.last_turn_end, self.rests = now, False
        if self.memory.computed > self._last():  # the turn began with memory of its input, shared by another session
            self.memory.truncate(self._last())

    def _last(self) -> int:
        return max(0, len(self.history) - 1)

    # -- operations on history

    def turn_boundary(self, turns: int) -> int:
        """Returns the number of tokens in the first `turns` turns."""
        turns = whole(f"turn of session {self.id}", turns, 0, len(self.records), param="turn")
        return self.records[turns - 1].end if turns else 0

    def check_position(self, position: int) -> int:
        """Returns `position` if it is a token position in the history. Raises `InvalidRequest` otherwise."""
        return whole(f"position in session {self.id}", position, 0, len(self.history), param="position")

    def resume_cost(self, position: int) -> int:
        """Returns the number of tokens that a session cut or forked to the first `position` tokens has to compute
        again, not counting the last one, which is always computed again. Changes nothing."""
        last = max(0, position - 1)
        return last - self.memory.resumable(last)

    def rewind(self, position: int) -> None:
        """Cuts the history to its first `position` tokens."""
        self.require_idle("rewind")
        self.check_position(position)
        del self.history[position:]
        self._set_records(cut_records(self.records, position))
        self.version += 1
        if self.suffixes is not None:
            self.suffixes.cut(position)
        self.memory.truncate(self._last())

    def fork(self, child: Session, position: int) -> None:
        """Fills the new session `child` with the first `position` tokens of the history and a share of their memory. An
        open turn is not part of it."""
        self.check_position(position)
        child.history = self.history[:position]
        child._set_records(cut_records(self.records, position))
        child.origin = Origin(self.id, self.birth, position, len(child.records))
        child.join(self)
        if self.suffixes is not None:
            child.suffixes = self.suffixes.fork(position)
        self.memory.fork(child.memory, max(0, position - 1))

    def join(self, parent: Session) -> None:
        """Becomes one of the open forks of its parent."""
        self.parent = parent
        parent.forks[self] = None

    def replace_history(self, source: Session) -> tuple[int, int]:
        """Replaces the history by that of `source`, whose memory is shared if it can be resumed farther than the own
        memory of their common prefix. Returns the numbers of leading tokens and records that stay."""
        self.require_idle("replace the history of")
        kept = common_prefix(self.history, source.history, min(len(self.history), len(source.history)))
        same = 0
        for mine, its in zip(self.records, source.records, strict=False):
            if mine != its:
                break
            same += 1
        self.history[kept:] = source.history[kept:]
        self._set_records(self.records[:same] + source.records[same:])
        self.version += 1
        self.digests.cut(kept)
        if self.suffixes is not None:
            self.suffixes.cut(kept)
        last = self._last()
        if source.memory.resumable(last) > self.memory.resumable(min(kept, last)):
            self.memory.drop()
            source.memory.fork(self.memory, last)
        else:
            self.memory.truncate(min(kept, last))
            self.memory.lost = "adopted"
        return kept, same

    def regenerated_turn(self) -> TurnRecord:
        """Returns the record of the last turn, whose output can be generated again. Raises `IllegalTransition` if it
        generated nothing."""
        if not self.records or self.records[-1].end == self.records[-1].input_end:
            raise IllegalTransition(f"cannot regenerate in session {self.id}: its last turn generated nothing")
        return self.records[-1]

    def wipe(self) -> int:
        """Overwrites the tokens of this closed session, and drops its records and results. Returns the number of
        tokens."""
        tokens = len(self.history)
        self.history[:] = array("i", bytes(self.history.itemsize * tokens))
        del self.history[:]
        self._set_records([])
        self.results, self.suffixes = KeptTurns(), None
        return tokens

    def close(self) -> None:
        """Closes the session; its memory stays, to be shared as a prefix, until it is dropped. Raises `SessionBusy` if
        it has an open turn."""
        if self.turn is not None:
            raise SessionBusy(f"cannot close session {self.id}: its turn is {self.turn.state.value}")
        self.state = SessionState.CLOSED
        if self.parent is not None:
            del self.parent.forks[self]
        for child in self.forks:
            child.parent = None
        self.parent, self.forks = None, {}
        self.memory.holder_kind = "prefix"
