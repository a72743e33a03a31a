"""A turn: one transaction on a session. It appends input, generates output, then commits whole or rolls back whole."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice

import numpy as np

from tenuto.base.checks import shown
from tenuto.base.errors import ContextExceeded, IllegalTransition, InvalidRequest
from tenuto.base.options import TurnParams
from tenuto.base.sampling import TokenLogprob
from tenuto.base.turns import Delta, EndReason, TurnResult, TurnState, Usage
from tenuto.session.results import Once
from tenuto.session.session import Session
from tenuto.text.chat import Conversation
from tenuto.text.constraint import Constraint
from tenuto.text.stream import TextStream

Rank = tuple[bool, float, int]
"""What `Turn.rank` sorts by."""

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
"""Every transition of an open turn: from which states, to which."""


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
        if not self.params.scores_input:
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


def as_tokens(tokens: Iterable[int], vocab_size: int, most: int) -> array[int]:
    """Read token ids, no more than `most` and one, and check them against the vocabulary. Raises `ContextExceeded` if
    there are more, `InvalidRequest` if they are no ids or reading them raises."""
    if isinstance(tokens, (str, bytes, bytearray)):
        raise InvalidRequest(f"input tokens are not token ids: {shown(tokens)}; allowed: a sequence of them")
    sized = type(tokens) in (list, tuple, array)  # what else has a length may be wrong about it
    try:
        checked = array("i", tokens[: most + 1] if sized else islice(tokens, most + 1))  # type: ignore[index]
    except Exception as error:
        raise InvalidRequest(f"input tokens are not token ids: {_described(error)}") from error
    if len(checked) > most:
        found = str(len(tokens)) if sized else f"more than {most}"  # type: ignore[arg-type]
        raise ContextExceeded(f"input has {found} tokens; allowed: {most}, which is all that can fit")
    ids = np.frombuffer(checked, np.intc)
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        wrong = next(t for t in checked if not 0 <= t < vocab_size)
        raise InvalidRequest(f"input has token id {wrong}; allowed: 0 to {vocab_size - 1}", param="input")
    return checked


def _described(error: Exception) -> str:
    """What a caller's object raised, which may be an exception of its own."""
    with suppress(Exception):
        return f"{type(error).__name__}: {error}"
    return type(error).__name__
