"""A session: committed history and policy. The truth is its tokens; memory only caches a prefix of them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from itertools import pairwise

from tenuto.base.checks import whole
from tenuto.base.errors import IllegalTransition, InvalidRequest, SessionBusy, SessionClosed
from tenuto.base.options import Policy
from tenuto.base.turns import TurnState
from tenuto.base.views import SessionKey, SessionState
from tenuto.memory.session_memory import SessionMemory
from tenuto.session.turn import Turn
from tenuto.text.chat import Conversation


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """A committed turn in the history: input is tokens [start, input_end), output [input_end, end). `conversation`:
    what the messages up to its end come to; `None` if it is made of tokens that are no messages. `cut`: the history was
    cut inside its input."""

    start: int
    input_end: int
    end: int
    conversation: Conversation | None = None
    cut: bool = False


@dataclass(frozen=True, slots=True)
class SavedSession:
    """All that a session is, except for its memory, which can be computed again. Plain data: a session is rebuilt from
    it, in the same engine or in another, and goes on in the same way."""

    session: str
    policy: Policy
    system: str | None
    version: int
    tokens: tuple[int, ...]
    records: tuple[TurnRecord, ...]

    def __post_init__(self) -> None:
        """Raises `InvalidRequest` if the records do not cover the tokens."""
        bounds = [0, *(at for record in self.records for at in (record.start, record.input_end, record.end))]
        gaps = any(before.end != after.start for before, after in pairwise(self.records))
        if gaps or bounds != sorted(bounds) or bounds[:2] not in ([0], [0, 0]) or bounds[-1] != len(self.tokens):
            raise InvalidRequest(
                f"session {self.session!r} cannot be restored: its records do not cover its {len(self.tokens)} tokens"
            )


class Session:
    """Committed history, its boundaries, and the memory that caches a prefix of it.

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
        self.system = system  # opens its conversation
        self.memory = memory
        self.limit = limit  # tokens: context window, own cap and what the pools can hold, the least
        self.state = SessionState.OPEN
        self.history = array("i")
        self.records: list[TurnRecord] = []
        self.version = 0  # raised by every commit and rewind
        self.turn: Turn | None = None  # the open turn; set by the engine, cleared by the turn's end
        self.last_turn_end = now
        self.counted = 0  # tokens counted for its tenant; written by the registry

    def __repr__(self) -> str:
        return f"<session {self.id} {self.state.value}, {len(self.history)} tokens>"

    @property
    def key(self) -> SessionKey:
        """What it is found by."""
        return self.policy.tenant, self.id

    @property
    def context_left(self) -> int:
        """Tokens that still fit."""
        return self.limit - len(self.history)

    @property
    def conversation(self) -> Conversation | None:
        """What the messages in the history come to; `None` if the last turn is not made of messages."""
        return self.records[-1].conversation if self.records else None

    @property
    def cut(self) -> bool:
        """Whether the history ends inside the last turn's input because it was cut there."""
        return bool(self.records) and self.records[-1].cut

    @property
    def has_running_turn(self) -> bool:
        return self.turn is not None and self.turn.state is TurnState.RUNNING

    def require_open(self) -> None:
        if self.state is not SessionState.OPEN:
            raise SessionClosed(f"session {self.id} is {self.state.value}; allowed: an open session")

    def require_idle(self, operation: str) -> None:
        """Raise unless the session is open and has no open turn."""
        self.require_open()
        if self.turn is not None:
            raise SessionBusy(
                f"cannot {operation} session {self.id}: its turn is {self.turn.state.value}; end or abort it first"
            )

    def take_in(self, turn: Turn, output: array[int]) -> None:
        """Commit: the turn's input and `output` join the history, its memory up to the last token joins the memory."""
        replaced = self.records.pop() if turn.replaces else None
        del self.history[turn.base_length :]
        start = replaced.start if replaced is not None else turn.base_length
        self.history.extend(turn.input)
        input_end = len(self.history)
        self.history.extend(output)
        if len(self.history) > start:  # an empty append leaves no record
            self.records.append(TurnRecord(start, input_end, len(self.history), turn.conversation))
        self.version += 1
        if self.memory.turn is not None:
            self.memory.turn.commit(self._last())
        else:
            self.memory.truncate(min(turn.base_length, self._last()))

    def adopt(
        self,
        tokens: array[int],
        output: array[int],
        now: float,
        conversation: Conversation | None = None,
        cut: bool = False,
    ) -> None:
        """Commit a turn that was computed elsewhere, and ends now: only its tokens are here."""
        start = len(self.history)
        self.history.extend(tokens)
        input_end = len(self.history)
        self.history.extend(output)
        if len(self.history) > start:
            self.records.append(TurnRecord(start, input_end, len(self.history), conversation, cut))
        self.version += 1
        self.memory.lost = "adopted"
        self.turn_ended(now)

    def saved(self) -> SavedSession:
        """The session as of its last commit."""
        return SavedSession(self.id, self.policy, self.system, self.version, tuple(self.history), tuple(self.records))

    def restore(self, saved: SavedSession) -> None:
        """Fill this fresh session with what was saved."""
        self.history.extend(saved.tokens)
        self.records = list(saved.records)
        self.version = saved.version
        self.memory.lost = "restored"

    def turn_ended(self, now: float) -> None:
        """The open turn has committed or aborted."""
        self.turn = None
        self.last_turn_end = now

    def _last(self) -> int:
        return max(0, len(self.history) - 1)

    # -- operations on history

    def turn_boundary(self, turns: int) -> int:
        """Tokens in the first `turns` turns."""
        turns = whole(f"turn of session {self.id}", turns, 0, len(self.records))
        return self.records[turns - 1].end if turns else 0

    def check_position(self, position: int) -> int:
        """A token position in the history."""
        return whole(f"position in session {self.id}", position, 0, len(self.history))

    def rewind(self, position: int) -> None:
        """Cut the history to its first `position` tokens."""
        self.require_idle("rewind")
        self.check_position(position)
        del self.history[position:]
        self.records = _cut(self.records, position)
        self.version += 1
        self.memory.truncate(self._last())

    def fork(self, child: Session, position: int) -> None:
        """Fill the fresh session `child` with the first `position` tokens of the history and a share of their memory.
        A turn running meanwhile is not seen."""
        self.check_position(position)
        child.history = self.history[:position]
        child.records = _cut(self.records, position)
        self.memory.fork(child.memory, max(0, position - 1))

    def regenerated_turn(self) -> TurnRecord:
        """The last turn, if its output can be generated again."""
        if not self.records or self.records[-1].end == self.records[-1].input_end:
            raise IllegalTransition(f"cannot regenerate in session {self.id}: its last turn generated nothing")
        return self.records[-1]

    def close(self) -> None:
        """Release everything. The session must have no open turn."""
        if self.turn is not None:
            raise SessionBusy(f"cannot close session {self.id}: its turn is {self.turn.state.value}")
        self.state = SessionState.CLOSED
        self.memory.drop()


def _cut(records: list[TurnRecord], position: int) -> list[TurnRecord]:
    kept = [r for r in records if r.start < position]
    if kept and kept[-1].end > position:
        last = kept.pop()
        cut = last.cut or position < last.input_end
        kept.append(replace(last, input_end=min(last.input_end, position), end=position, cut=cut))
    return kept
