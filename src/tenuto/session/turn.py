"""A turn: one transaction on a session, which appends input, generates output, and commits or rolls back as a whole."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice

import numpy as np

from tenuto.base.checks import shown
from tenuto.base.errors import ContextExceeded, IllegalTransition, InvalidRequest
from tenuto.base.options import TurnParams
from tenuto.base.sampling import TokenLogprob
from tenuto.base.turns import Delta, EndReason, OutputSpan, TurnResult, TurnState, Usage
from tenuto.base.wire.document import Conversation
from tenuto.session.pool import Pool
from tenuto.session.records import Made, Versions, cut_versions
from tenuto.session.results import Once
from tenuto.session.session import Session
from tenuto.text.constraint import Constraint
from tenuto.text.stream import TextStream

Rank = tuple[bool, float, int]
"""The sort key of `Turn.rank`."""

TRANSITIONS: dict[str, tuple[frozenset[TurnState], TurnState]] = {
    "submit": (frozenset({TurnState.DRAFTING}), TurnState.QUEUED),
    "start": (frozenset({TurnState.QUEUED, TurnState.PREEMPTED}), TurnState.RUNNING),
    "preempt": (frozenset({TurnState.RUNNING}), TurnState.PREEMPTED),
    "commit": (frozenset({TurnState.RUNNING, TurnState.PREEMPTED}), TurnState.COMMITTED),
    "abort": (
        frozenset({TurnState.DRAFTING, TurnState.QUEUED, TurnState.RUNNING, TurnState.PREEMPTED}),
        TurnState.ABORTED,
    ),
}
"""Every transition of an open turn: the states from which it is allowed, and the state to which it leads."""


class Turn:
    """One transaction on a session. It writes its own fields, except where a comment names another writer."""

    def __init__(
        self, number: int, session: Session, base_length: int, params: TurnParams, arrival: float, adapter: int = 0
    ) -> None:
        """`adapter`: the slot of the session's adapter; 0 without one."""
        self.number = number
        self.session = session
        self.base_length = base_length  # history tokens it continues; fewer than the history has if it regenerates
        self.params = params  # replaced when a draft is submitted
        self.priority = params.priority if params.priority is not None else session.policy.priority
        self.arrival = arrival
        self.adapter = adapter
        self.changed = arrival  # the time of the last change to its draft; written by the engine
        self.input = array("i")
        self.output = array("i")
        self.max_new_tokens = 0  # the limit after all caps; 0: prefill only
        self.state = TurnState.QUEUED
        self.replaces = False  # whether it regenerates the session's last turn
        self.started = False  # whether it has run as a submitted turn
        self.failures = 0  # failed steps in which it was alone, until it reaches `failed_end`; written by `Suspects`
        self.failed_end = 0  # the planned end of its last failed step; lowered when a draft changes
        self.sought = -1  # version of the prefix index at its last lookup; written by `Sharing`, as is the next
        self.looked = ""  # the outcome of that lookup: one of `HITS` and `MISSES`
        self.cached = -1  # prompt tokens found in memory when it first ran; set by the engine, as are the next two
        self.begun: float | None = None  # when it began to compute
        self.computed_before = 0  # tokens it had computed as a draft before that
        self.recomputed = Counter[str]()  # tokens computed again, by reason; written by the engine
        self.moved = 0  # tokens whose state came with it from another engine; its session holds that until it runs
        self.prediction = array("i")  # what the caller expects its output to be; set when it is submitted
        self.trail: object = None  # the proposer's notes, until it has ended
        self.outlook: object = None  # the guesses of the model's head, until it has ended
        self.guessed = 0  # guessed tokens that were computed; written by the settler, as is the next
        self.accepted = 0  # those that became output
        self.computed_tokens = 0  # includes dropped tokens; written by the batch when the turn leaves its row
        self.conversation: Conversation | None = None  # the conversation up to its input; set when it is submitted
        self.text: TextStream | None = None  # set when it is submitted, as is the next
        self.constraint: Constraint | None = None  # the grammar of its output, until it has ended
        self.versions: list[OutputSpan] = []  # see `Made`; of its output until the weights changed last
        self.stop: str | int | None = None  # the stop that ended it; written by the settler, as are the next two
        self.output_logprobs: list[TokenLogprob] = []  # one for each output token, if requested
        self.input_scores: list[TokenLogprob] = []  # of leading input tokens with a predecessor, if requested
        self.pool: Pool | None = None  # of its vector, if requested; set when it is submitted
        self.result: TurnResult | None = None
        self.once: Once | None = None  # its idempotency key; set when it is submitted
        self.recorded = False  # whether its request is in the journal; written by the life cycle

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
        """Returns the sort key of the tenant's turns, waiting or running: lower ranks run first and yield last. Drafts
        come after all submitted turns.

        A turn's effective priority is its priority plus one for every `aging_seconds` since it arrived. All turns age
        alike, so the order of two turns never changes: it is that of arrival minus `aging_seconds` times priority."""
        return self.drafting, self.arrival - self.priority * aging_seconds, self.number

    @property
    def generates(self) -> bool:
        return self.max_new_tokens > 0

    @property
    def generating(self) -> bool:
        """Whether it generates when it runs; a draft does not."""
        return self.max_new_tokens > 0 and not self.drafting

    @property
    def prompt_length(self) -> int:
        """The number of tokens in history and input."""
        return self.base_length + len(self.input)

    @property
    def length(self) -> int:
        """The number of tokens in history, input and output so far."""
        return self.prompt_length + len(self.output)

    @property
    def last_position(self) -> int:
        """The end of the tokens that are ever computed; the last token never is (`computed <= length - 1`)."""
        return max(0, self.prompt_length + self.max_new_tokens - 1)

    @property
    def resume_position(self) -> int:
        """The end of the input as a resumable position: computing the last input token gives the first output token."""
        return max(0, self.prompt_length - 1)

    @property
    def begins_at(self) -> int:
        """The position at or below which it begins to compute while it owns no memory."""
        return max(self.resume_position, self.moved)

    @property
    def next_scored(self) -> int:
        """The position of the next input token to be scored; the token at position 0 never is."""
        return max(1, self.base_length) + len(self.input_scores)

    @property
    def input_logprobs(self) -> tuple[TokenLogprob | None, ...]:
        """Log-probabilities of the leading input tokens scored so far; of all once there is output. The first token of
        the whole sequence has `None`. Empty if not requested."""
        if not self.params.scores_input:
            return ()
        first = (None,) if self.base_length == 0 and self.input else ()
        return (*first, *self.input_scores)

    @property
    def delivered(self) -> int:
        """The number of output tokens whose whole text has been delivered to the client."""
        return self.text.delivered_tokens if self.text is not None else len(self.output)

    def tokens(self, start: int, stop: int) -> array[int]:
        """Returns tokens [start, stop) of the sequence: history, input, output."""
        base, prompt = self.base_length, self.prompt_length
        part = self.session.history[start : min(stop, base)] if start < base else array("i")
        if stop > base and start < prompt:
            part = part + self.input[max(0, start - base) : stop - base]
        if stop > prompt:
            part = part + self.output[max(0, start - prompt) : stop - prompt]
        return part

    def submit(self, params: TurnParams, now: float) -> None:
        """Turns a complete draft into a waiting turn."""
        self.go("submit")
        self.params, self.arrival = params, now
        self.priority = params.priority if params.priority is not None else self.session.policy.priority

    def go(self, transition: str) -> None:
        """Makes a transition. Raises `IllegalTransition` if the turn's state does not allow it."""
        allowed, target = TRANSITIONS[transition]
        if self.state not in allowed:
            states = ", ".join(sorted(state.value for state in allowed))
            raise IllegalTransition(f"cannot {transition} {self.name}: it is {self.state.value}; allowed: {states}")
        self.state = target

    # -- finish and abort paths, which belong to the owner of the memory

    def preempt(self) -> None:
        """Gives up its memory, keeps its tokens, and queues again."""
        self.go("preempt")
        self.lose_memory()

    def pause(self) -> None:
        """Leaves the row and queues again; keeps its memory."""
        self.go("preempt")
        self._recount_cached()

    def lose_memory(self) -> None:
        """Gives its memory to others, so that it starts again later."""
        self.release_memory()
        self._recount_cached()

    def _recount_cached(self) -> None:
        """Has its cached tokens counted when it starts again, unless it has computed tokens after them."""
        if self.computed_tokens == self.computed_before:
            self.cached = -1

    def release_memory(self) -> None:
        """Gives back the memory that the turn acquired; its session's memory does not change."""
        memory = self.session.memory.turn
        if memory is not None:
            memory.abort()

    def commit(self, reason: EndReason, now: float, keep: int | None = None) -> TurnResult:
        """Makes input and the first `keep` (`None`: all) output tokens part of the history."""
        kept = self.output[: len(self.output) if keep is None else keep]
        self.go("commit")
        self.session.commit(self, kept)
        return self._end(reason, now, committed=True, kept=len(kept))

    def abort(self, reason: EndReason, now: float) -> TurnResult:
        """Rolls back, which leaves the session as it was before the turn."""
        self.go("abort")
        self.release_memory()
        return self._end(reason, now, committed=False, kept=0)

    def note_weights(self, name: str) -> None:
        """Records that the weights called `name` have sampled its output since the last call."""
        self.versions.append(OutputSpan(len(self.output), name))

    def _versions(self, kept: int) -> Versions:
        """Returns the weights that sampled its first `kept` output tokens."""
        now = self.session.memory.memory.weights.name
        return cut_versions((*self.versions, OutputSpan(len(self.output), now)), kept)

    def made(self, kept: int) -> Made:
        """Returns how its first `kept` output tokens were made."""
        sampling = self.params.sampling
        logprobs = array("f", (entry.logprob for entry in self.output_logprobs[:kept]))
        return Made(self._versions(kept), sampling.seed if kept and not sampling.greedy else None, logprobs.tobytes())

    def _end(self, reason: EndReason, now: float, *, committed: bool, kept: int) -> TurnResult:
        session = self.session
        self.constraint = self.trail = self.outlook = None  # the automaton may be large
        session.turn_ended(now)
        usage = Usage(
            self.prompt_length,
            max(0, self.cached),
            len(self.output),
            self.computed_tokens,
            self.accepted,
            self.guessed - self.accepted,
            dict(self.recomputed),
        )
        self.result = TurnResult(
            reason,
            committed,
            session.version,
            kept,
            usage,
            self.max_new_tokens,
            session.context_left,
            self.stop,
            self._versions(len(self.output)),
            (self.begun if self.begun is not None else now) - self.arrival,
        )
        return self.result

    def said(self, kept: int) -> Delta:
        """Returns the output that its client gets in total if the output ends after `kept` tokens."""
        text = self.text.text(kept) if self.text is not None else ""
        return Delta(
            tuple(self.output[:kept]),
            text,
            min(self.delivered, kept),
            None,
            tuple(self.output_logprobs[:kept]),
            self.input_logprobs,
        )


def as_tokens(tokens: Iterable[int], vocab_size: int, most: int) -> array[int]:
    """Reads token ids, at most `most` + 1, and checks them against the vocabulary. Raises `ContextExceeded` if there
    are more than `most`, and `InvalidRequest` if they are not ids or reading them raises."""
    if isinstance(tokens, (str, bytes, bytearray)):
        raise InvalidRequest(f"input tokens are not token ids: {shown(tokens)}; allowed: a sequence of them")
    sized = type(tokens) in (list, tuple, array)  # other types may report a wrong length
    try:
        checked = array("i", tokens[: most + 1] if sized else islice(tokens, most + 1))  # type: ignore[index]
    except Exception as error:
        raise InvalidRequest(f"input tokens are not token ids: {_described(error)}") from error
    if len(checked) > most:
        found = str(len(tokens)) if sized else f"more than {most}"  # type: ignore[arg-type]
        raise ContextExceeded(f"input has {found} tokens; allowed: {most}, the most that can fit")
    ids = np.frombuffer(checked, np.intc)
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        wrong = next(t for t in checked if not 0 <= t < vocab_size)
        raise InvalidRequest(f"input has token id {wrong}; allowed: 0 to {vocab_size - 1}", param="input")
    return checked


def _described(error: Exception) -> str:
    """Describes an exception raised by a caller's object, whose own `__str__` may raise."""
    with suppress(Exception):
        return f"{type(error).__name__}: {error}"
    return type(error).__name__
