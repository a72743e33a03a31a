"""A session: committed history and policy. The truth is its tokens; memory only caches a prefix of them.

A turn: one transaction on a session. It appends input, generates output, then commits whole or rolls back whole."""

from __future__ import annotations

from array import array

from tenuto.base.checks import whole
from tenuto.base.errors import IllegalTransition, SessionBusy, SessionClosed
from tenuto.base.options import Policy, TurnParams
from tenuto.base.sampling import TokenLogprob
from tenuto.base.turns import Delta, EndReason, TurnResult, TurnState, Usage
from tenuto.base.views import SessionKey, SessionState
from tenuto.memory.session_memory import SessionMemory
from tenuto.session.records import SavedSession, TurnRecord, cut_records
from tenuto.session.results import KeptTurns, Once
from tenuto.session.turn import TRANSITIONS, Rank
from tenuto.text.chat import Conversation
from tenuto.text.constraint import Constraint
from tenuto.text.stream import TextStream

SESSION_BYTES = 512
"""About what a journal has of a session without turns."""
RECORD_BYTES = 192
"""About what a journal has of a turn, besides its tokens."""


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
        self.rests = False  # has been idle for a good part of its TTL; written by the registry
        self.counted = 0  # tokens counted for its tenant; written by the registry, as the next two
        self.counted_units = 0
        self.counted_bytes = 0
        self.results = KeptTurns()

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
    def journal_bytes(self) -> int:
        """About how much a journal has of it, as if it shared nothing."""
        if not self.policy.lasting:
            return 0
        fixed = SESSION_BYTES + len((self.system or "").encode())
        return fixed + 4 * len(self.history) + RECORD_BYTES * len(self.records) + self.results.size

    @property
    def has_running_turn(self) -> bool:
        return self.turn is not None and self.turn.state is TurnState.RUNNING

    @property
    def turn_state(self) -> str:
        """Of the open turn, or idle."""
        return self.turn.state.value if self.turn is not None else "idle"

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
        self._extend(start, turn.input, output, turn.conversation)
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
    ) -> None:
        """Commit a turn that was computed elsewhere, and ends now: only its tokens are here."""
        self._extend(len(self.history), tokens, output, conversation, cut=cut)
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
    ) -> None:
        """A turn that begins at `start` joins the history, which has its tokens up to the new ones."""
        self.history.extend(tokens)
        input_end = len(self.history)
        self.history.extend(output)
        if len(self.history) > start:  # an empty append leaves no record
            self.records.append(TurnRecord(start, input_end, len(self.history), conversation, cut))
        self.version += 1

    def saved(self) -> SavedSession:
        """The session as of its last commit."""
        return SavedSession(
            self.id,
            self.policy,
            self.system,
            self.version,
            tuple(self.history),
            tuple(self.records),
            results=self.results.all(),
        )

    def restore(self, saved: SavedSession) -> None:
        """Fill this fresh session with what was saved."""
        self.history.extend(saved.tokens)
        self.records = list(saved.records)
        self.version = saved.version
        self.results = KeptTurns(saved.results)
        self.memory.lost = "restored"

    def turn_ended(self, now: float) -> None:
        """The open turn has committed or aborted."""
        self.turn = None
        self.last_turn_end, self.rests = now, False
        if self.memory.computed > self._last():  # it began with memory of its input that was found elsewhere
            self.memory.truncate(self._last())

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

    def resume_cost(self, position: int) -> int:
        """Tokens that a session which is cut, or forked, to the first `position` tokens computes again, besides the
        last of them, which always is. Changes nothing."""
        last = max(0, position - 1)
        return last - self.memory.resumable(last)

    def rewind(self, position: int) -> None:
        """Cut the history to its first `position` tokens."""
        self.require_idle("rewind")
        self.check_position(position)
        del self.history[position:]
        self.records = cut_records(self.records, position)
        self.version += 1
        self.memory.truncate(self._last())

    def fork(self, child: Session, position: int) -> None:
        """Fill the fresh session `child` with the first `position` tokens of the history and a share of their memory.
        A turn running meanwhile is not seen."""
        self.check_position(position)
        child.history = self.history[:position]
        child.records = cut_records(self.records, position)
        self.memory.fork(child.memory, max(0, position - 1))

    def regenerated_turn(self) -> TurnRecord:
        """The last turn, if its output can be generated again."""
        if not self.records or self.records[-1].end == self.records[-1].input_end:
            raise IllegalTransition(f"cannot regenerate in session {self.id}: its last turn generated nothing")
        return self.records[-1]

    def close(self) -> None:
        """Close it; its memory stays, as a prefix of other sequences, until it is dropped. It must have no open
        turn."""
        if self.turn is not None:
            raise SessionBusy(f"cannot close session {self.id}: its turn is {self.turn.state.value}")
        self.state = SessionState.CLOSED
        self.memory.holder_kind = "prefix"


class Turn:
    """One transaction. Its fields are written by itself, except where a comment says who else."""

    def __init__(self, number: int, session: Session, base_length: int, params: TurnParams, arrival: float) -> None:
        self.number = number
        self.session = session
        self.base_length = base_length  # history tokens it builds on; fewer than there are if it regenerates
        self.params = params  # replaced when a draft is submitted
        self.priority = params.priority if params.priority is not None else session.policy.priority
        self.arrival = arrival
        self.changed = arrival  # when its draft last changed; written by the life cycle
        self.input = array("i")
        self.output = array("i")
        self.max_new_tokens = 0  # effective; 0: prefill only
        self.state = TurnState.QUEUED
        self.replaces = False  # regenerates the session's last turn
        self.started = False  # has run as a submitted turn
        self.failures = 0  # failed steps with it alone, until it comes to `failed_end`; written by `Suspects`
        self.failed_end = 0  # where the last failed step with it was to end; lowered when a draft changes
        self.sought = -1  # version of the prefix index it was last looked for in; written by `Sharing`, as the next
        self.looked = ""  # what came of that: one of its `HITS` and `MISSES`
        self.cached = -1  # prompt tokens found in memory when it first ran; set by the life cycle, as the next
        self.computed_before = 0  # tokens it had computed then, as a draft
        self.computed_tokens = 0  # what was dropped included; written by the batch when it leaves its row
        self.conversation: Conversation | None = None  # what the messages come to with it; set where it is submitted
        self.text: TextStream | None = None  # set where it is submitted, as the next
        self.constraint: Constraint | None = None  # what its output has to follow
        self.stop: str | int | None = None  # what ended it; written by the settler, as the two below
        self.output_logprobs: list[TokenLogprob] = []  # one an output token if asked for
        self.input_scores: list[TokenLogprob] = []  # of the leading input tokens that something precedes, if asked for
        self.result: TurnResult | None = None
        self.once: Once | None = None  # its idempotency key; set where it is submitted

    def __repr__(self) -> str:
        return f"<{self.name} {self.state.value}>"

    @property
    def name(self) -> str:
        return f"turn {self.number} of {self.session.id}"

    @property
    def drafting(self) -> bool:
        return self.state is TurnState.DRAFTING

    @property
    def running(self) -> bool:
        return self.state is TurnState.RUNNING

    @property
    def preempted(self) -> bool:
        return self.state is TurnState.PREEMPTED

    def rank(self, aging_seconds: float) -> Rank:
        """Sorts turns of one tenant, waiting or running: the lower rank runs first and yields last. Drafts come after
        every turn that someone waits for.

        A turn's effective priority is its priority plus one for every `aging_seconds` since it arrived. All turns age
        alike, so the order of two turns never changes, and arrival minus `aging_seconds` times priority sorts them once
        and for all."""
        return self.drafting, self.arrival - self.priority * aging_seconds, self.number

    @property
    def generates(self) -> bool:
        return self.max_new_tokens > 0

    @property
    def generating(self) -> bool:
        """Whether it generates when it runs: a draft does not yet."""
        return self.max_new_tokens > 0 and not self.drafting

    @property
    def prompt_length(self) -> int:
        """History and input, tokens."""
        return self.base_length + len(self.input)

    @property
    def length(self) -> int:
        """History, input and output so far, tokens."""
        return self.prompt_length + len(self.output)

    @property
    def last_position(self) -> int:
        """No token at or past this position is computed: the last one never is (`computed <= length - 1`)."""
        return max(0, self.prompt_length + self.max_new_tokens - 1)

    @property
    def resume_position(self) -> int:
        """The end of input as a resumable position: computing the last input token gives the first output token."""
        return max(0, self.prompt_length - 1)

    @property
    def next_scored(self) -> int:
        """The position of the next input token to be scored; that at position 0 never is."""
        return max(1, self.base_length) + len(self.input_scores)

    @property
    def input_logprobs(self) -> tuple[TokenLogprob | None, ...]:
        """Of the leading input tokens, as far as scored: all once there is output. The first of the whole sequence has
        `None`. Empty if not asked for."""
        if self.params.input_logprobs is None:
            return ()
        first = (None,) if self.base_length == 0 and self.input else ()
        return (*first, *self.input_scores)

    @property
    def delivered(self) -> int:
        """Output tokens the caller has been given, with all their text."""
        return self.text.delivered_tokens if self.text is not None else len(self.output)

    def tokens(self, start: int, stop: int) -> array[int]:
        """Tokens [start, stop) of the sequence: history, input, output."""
        base, prompt = self.base_length, self.prompt_length
        part = self.session.history[start : min(stop, base)] if start < base else array("i")
        if stop > base and start < prompt:
            part = part + self.input[max(0, start - base) : stop - base]
        if stop > prompt:
            part = part + self.output[max(0, start - prompt) : stop - prompt]
        return part

    def submit(self, params: TurnParams, now: float) -> None:
        """The draft is complete: from now on it is a turn that waits."""
        self.go("submit")
        self.params, self.arrival = params, now
        self.priority = params.priority if params.priority is not None else self.session.policy.priority

    def go(self, transition: str) -> None:
        """Make a transition, or raise `IllegalTransition`."""
        allowed, target = TRANSITIONS[transition]
        if self.state not in allowed:
            states = ", ".join(sorted(state.value for state in allowed))
            raise IllegalTransition(f"cannot {transition} {self.name}: it is {self.state.value}; allowed: {states}")
        self.state = target

    # -- finish and abort paths: the owner of the memory ends it

    def preempt(self) -> None:
        """Lose what it acquired, keep its tokens, and queue again."""
        self.go("preempt")
        self.lose_memory()

    def pause(self) -> None:
        """Leave the row and queue again; what it has acquired stays."""
        self.go("preempt")

    def lose_memory(self) -> None:
        """Others need what it holds: it will start again. What it had found cached counts only if it has computed
        something on top of that."""
        self.release_memory()
        if self.computed_tokens == self.computed_before:
            self.cached = -1

    def release_memory(self) -> None:
        """Give back everything it holds; its session's memory is untouched."""
        memory = self.session.memory.turn
        if memory is not None:
            memory.abort()

    def commit(self, reason: EndReason, now: float, keep: int | None = None) -> TurnResult:
        """Make input and the first `keep` (`None`: all) output tokens part of the history."""
        kept = self.output[: len(self.output) if keep is None else keep]
        self.go("commit")
        self.session.take_in(self, kept)
        return self._end(reason, now, committed=True, kept=len(kept))

    def abort(self, reason: EndReason, now: float) -> TurnResult:
        """Roll back: the session is what it was."""
        self.go("abort")
        self.release_memory()
        return self._end(reason, now, committed=False, kept=0)

    def _end(self, reason: EndReason, now: float, *, committed: bool, kept: int) -> TurnResult:
        session = self.session
        session.turn_ended(now)
        usage = Usage(self.prompt_length, max(0, self.cached), len(self.output), self.computed_tokens)
        self.result = TurnResult(
            reason, committed, session.version, kept, usage, self.max_new_tokens, session.context_left, self.stop
        )
        return self.result

    def said(self, kept: int) -> Delta:
        """What its client has been told, or will be, of its output, if that ends after `kept` tokens."""
        text = self.text.text(kept) if self.text is not None else ""
        return Delta(
            tuple(self.output[:kept]),
            text,
            min(self.delivered, kept),
            None,
            tuple(self.output_logprobs[:kept]),
            self.input_logprobs,
        )
