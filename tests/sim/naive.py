"""The expected sessions and turns, kept in the most naive way: copied lists of tokens."""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tenuto.base.options import Policy, TurnParams
from tenuto.base.sampling import LEAST_LOGPROB, Candidate, TokenLogprob
from tenuto.exec.witness_hashes import START, advance, next_allowed, next_token, next_unmasked, seeded, vectors_of
from tests.sim.grammars import Follower
from tests.sim.letters import EOS, TOKEN_BYTES, VOCAB

PREFILL = TurnParams(max_new_tokens=0)
"""Appends input and generates nothing."""


Marks = list[tuple[int, int]]
"""The marks of the weights that compute a sequence, each with the position from which on it does."""
Had = dict[int, int]
"""How many tokens a sequence had at each update of the weights that kept them; it may have state of these tokens from
before."""


def _marks_by(marks: Marks, position: int) -> Marks:
    return [marks[0], *(mark for mark in marks[1:] if mark[0] < position)]


def _had_by(had: Had, position: int) -> Had:
    return {update: min(count, position) for update, count in had.items()}


class TokenRun:
    """Tokens and the hash after each: `hashes[n]` covers the first n tokens. The last of `marks` is that of later
    tokens."""

    __slots__ = ("hashes", "marks", "tokens")

    def __init__(self, start: int = START, mark: int = 0) -> None:
        """`start`: the hash of no tokens."""
        self.tokens = array("i")
        self.hashes = array("Q", (start,))
        self.marks: Marks = [(0, mark)]

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        state, (_, mark) = self.hashes[-1], self.marks[-1]
        for token in tokens:
            state = advance(state, token, mark)
            self.tokens.append(token)
            self.hashes.append(state)

    def cut(self, position: int) -> None:
        del self.tokens[position:]
        del self.hashes[position + 1 :]
        self.marks = _marks_by(self.marks, position)

    def head(self, position: int) -> TokenRun:
        """Returns a copy of the first `position` tokens."""
        copy = TokenRun()
        copy.tokens, copy.hashes = self.tokens[:position], self.hashes[: position + 1]
        copy.marks = _marks_by(self.marks, position)
        return copy

    def weighed(self, marks: Marks) -> TokenRun:
        """Returns the same tokens, computed with the weights of these marks."""
        if marks == self.marks:
            return self
        common = next((i for i, (a, b) in enumerate(zip(marks, self.marks, strict=False)) if a != b), None)
        common = min(len(marks), len(self.marks)) if common is None else common
        starts = [start for each in (marks, self.marks) for start, _ in each[common : common + 1]]
        run = self.head(min([len(self), *starts]))
        for (start, mark), (stop, _) in pairwise([*marks, (len(self), 0)]):
            run.marks = [(0, mark)]
            run.extend(self.tokens[max(start, len(run)) : stop])
        run.marks = marks
        return run

    def stored(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the hashes (uint64) and tokens (int64) that the witness stores in the slots of positions [start,
        stop)."""
        hashes = np.frombuffer(self.hashes[start + 1 : stop + 1], np.uint64)
        return hashes, np.frombuffer(self.tokens[start:stop], np.int32).astype(np.int64)


class NaiveSession:
    """A history, turn boundaries as (start, input_end, end), and the session's policy."""

    def __init__(self, policy: Policy, limit: int, now: float) -> None:
        self.policy = policy
        self.limit = limit
        self.history = TokenRun(START ^ (int(policy.adapter.digest, 16) if policy.adapter is not None else 0))
        self.records: list[tuple[int, int, int]] = []
        self.version = 0
        self.turn: NaiveTurn | None = None
        self.closing = False
        self.last_end = now
        self.counted_version = -1
        self.had: Had = {}

    @property
    def tokens(self) -> array[int]:
        return self.history.tokens

    def cut(self, position: int) -> None:
        self.history.cut(position)
        self.had = _had_by(self.had, position)
        self.records = _cut(self.records, position)
        self.version += 1

    def fork(self, position: int, policy: Policy, limit: int, now: float) -> NaiveSession:
        child = NaiveSession(policy, limit, now)
        child.history = self.history.head(position)
        child.had = _had_by(self.had, position)
        child.records = _cut(self.records, position)
        return child

    def commit(self, base: int, tokens: Sequence[int], output: Sequence[int], *, replaces: bool) -> None:
        """Commits a turn."""
        start = self.records.pop()[0] if replaces else base
        self.history.cut(base)
        self.history.extend(tokens)
        input_end = len(self.history)
        self.history.extend(output)
        if len(self.history) > start:
            self.records.append((start, input_end, len(self.history)))
        self.version += 1

    def replace(self, source: NaiveSession) -> None:
        """Takes over the history of `source`."""
        same = next((i for i, (a, b) in enumerate(zip(self.tokens, source.tokens, strict=False)) if a != b), None)
        mine = _had_by(self.had, min(len(self.tokens), len(source.tokens)) if same is None else same)
        self.had = {n: max(mine.get(n, 0), source.had.get(n, 0)) for n in {*mine, *source.had}}
        self.history = source.history.head(len(source.tokens))
        self.records = list(source.records)
        self.version += 1

    def adopt(self, tokens: Sequence[int], output: Sequence[int], now: float) -> None:
        self.commit(len(self.history), tokens, output, replaces=False)
        self.last_end = now

    def expires(self, now: float) -> bool:
        """Returns whether the session must be gone after the next step."""
        ttl = self.policy.ttl
        return ttl is not None and self.turn is None and not self.closing and self.last_end + ttl <= now


def _cut(records: list[tuple[int, int, int]], position: int) -> list[tuple[int, int, int]]:
    return [(start, min(middle, position), min(end, position)) for start, middle, end in records if start < position]


class NaiveTurn:
    """One turn's expected output and deadline: every token follows from all tokens before it and the seed."""

    def __init__(self, number: int, sid: str, session: NaiveSession, base: int, tokens: Sequence[int]) -> None:
        self.number = number
        self.sid = sid
        self.session = session
        self.base = base
        self.input = list(tokens)
        self.sequence = session.history.head(base)
        self.sequence.extend(tokens)
        self.had = _had_by(session.had, base)
        self.versions: list[tuple[int, str]] = []  # of weights, each with the length of the output when it was replaced
        self.params = TurnParams(max_new_tokens=0)
        self.most = 0
        self.replaces = False
        self.drafting = False
        self.was_draft = False
        self.started = False
        self.arrival = 0.0
        self.changed = 0.0
        self.priority = session.policy.priority
        self.stops: frozenset[int] = frozenset()
        self.text: NaiveText | None = None
        self.follower: Follower | None = None
        self.complete = False  # its output is a text of its grammar, and nothing may follow
        self.stuck = False  # its grammar or its bad words do not allow its last token
        self.output: list[int] = []
        self.pieces: list[str] = []  # text delivered so far
        self.computed = 0  # its tokens in plans given to the executor
        self.first_start = -1  # where the first plan since its start begins
        self.since = 0  # the step in which it was submitted
        self.overtaken = 0  # later turns of no higher priority that started before it
        self.disturbed = False  # preempted, or in a failed step: it recomputes what it had
        self.last_failed = False  # whether its last step failed
        self.poisoned_from: int | None = None  # every step that takes it past this position fails
        self.failed_alone = 0  # failed steps in which it was the only turn

    # -- fixed when the turn is opened

    def redraft(self, tokens: Sequence[int], now: float) -> None:
        same = next((i for i, (a, b) in enumerate(zip(self.input, tokens, strict=False)) if a != b), None)
        common = min(len(self.input), len(tokens)) if same is None else same
        self.had = _had_by(self.had, self.base + common)
        self.input = list(tokens)
        self.sequence.cut(self.base)
        self.sequence.extend(tokens)
        self.changed = now

    def submit(self, params: TurnParams, most: int, now: float, step: int, *, text: bool) -> None:
        self.params, self.most, self.arrival, self.since = params, most, now, step
        self.drafting = False
        self.priority = params.priority if params.priority is not None else self.session.policy.priority
        self.stops = frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else {EOS})
        self.text = NaiveText(params.stop, params.min_new_tokens) if text else None
        self.follower = Follower(params) if params.constrained or params.sampling.allowed_ids else None

    @property
    def prompt(self) -> int:
        return self.base + len(self.input)

    def deadline(self, draft_timeout: float) -> float | None:
        """Returns the time at which it has to end; `None` for never."""
        if self.drafting:
            return self.changed + draft_timeout
        limits = [self.params.timeout, None if self.started else self.params.queue_timeout]
        given = [limit for limit in limits if limit is not None]
        return self.arrival + min(given) if given else None

    def rank(self, aging: float) -> tuple[bool, float, int]:
        return self.drafting, self.arrival - self.priority * aging, self.number

    # -- output

    def said_at(self, position: int) -> int:
        """Returns the token after the first `position` tokens; with a grammar, `position` must be the end of the
        sequence."""
        state = seeded(self.sequence.hashes[position], self.params.sampling.seed)
        masked = self.stops if position - self.prompt < self.params.min_new_tokens else ()
        if self.follower is not None:
            return next_allowed(state, VOCAB, masked, self.follower.allowed())
        return next_unmasked(state, VOCAB, masked)

    @property
    def finished(self) -> bool:
        return len(self.output) >= self.most or self.stopped or self.stuck

    @property
    def stopped(self) -> bool:
        if self.complete or (self.output and self.output[-1] in self.stops):
            return True
        return self.text is not None and self.text.found(self.output) is not None

    def check(self, output: Sequence[int]) -> str | None:
        """Returns what is wrong with `output`, if anything; it may only grow."""
        if len(output) < len(self.output):
            return f"output shrank from {len(self.output)} to {len(output)} tokens"
        for position in range(len(self.output), len(output)):
            if self.finished:
                return f"output goes on after its end: {list(output)} of at most {self.most}"
            token = self.said_at(self.prompt + position)
            if output[position] != token:
                return f"output {position} is {output[position]}, but {token} follows from the history"
            self.output.append(token)
            self.sequence.extend((token,))
            if self.follower is not None:
                self.stuck = not self.follower.take(token)
                self.complete = not self.stuck and self.follower.complete
        return None

    def guess(self, count: int) -> list[int]:
        """Returns the next `count` tokens, or fewer if its grammar ends before."""
        ahead = self.sequence.head(len(self.sequence))
        follower = self.follower.copy() if self.follower is not None else None
        guesses: list[int] = []
        for _ in range(count):
            state = seeded(ahead.hashes[-1], self.params.sampling.seed)
            guesses.append(
                next_token(state, VOCAB) if follower is None else next_allowed(state, VOCAB, (), follower.allowed())
            )
            ahead.extend(guesses[-1:])
            if follower is not None and not follower.take(guesses[-1]):
                break
        return guesses

    # -- reports

    @property
    def delivered(self) -> int:
        return len(self.output) if self.text is None else self.text.delivered_tokens(self.output)

    def output_logprobs(self) -> list[TokenLogprob]:
        """Returns one entry for each output token."""
        if self.params.logprobs is None:
            return []
        most = self.params.logprobs
        return [self._scored(token, token, most) for token in self.output]

    def input_logprobs(self) -> list[TokenLogprob | None]:
        """Returns one entry for each input token: the witness gives probability 1 to the token it would generate with
        seed 0."""
        found: list[TokenLogprob | None] = []
        for position in range(self.base, self.prompt):
            if position == 0:
                found.append(None)
                continue
            said, token = next_token(self.sequence.hashes[position - 1 + 1], VOCAB), self.sequence.tokens[position]
            found.append(self._scored(token, said, self.params.input_logprobs or 0))
        return found

    def _scored(self, token: int, said: int, most: int) -> TokenLogprob:
        """Returns the entry of a token where the witness gives probability 1 to `said`."""

        def candidate(other: int) -> Candidate:
            return Candidate(other, 0.0 if said == other else LEAST_LOGPROB)

        named = tuple(candidate(other) for other in self.params.logprob_ids)
        return TokenLogprob(token, candidate(token).logprob, (candidate(said),) if most else (), named=named)

    def vector(self) -> bytes:
        """Returns the vector of its input, if it asks for one: that after its last or first token, or the average."""
        if self.params.pooling is None:
            return b""
        hashes = np.array(self.sequence.hashes[self.base + 1 : self.prompt + 1], np.uint64)
        chosen = {"last": hashes[-1:], "first": hashes[:1], "mean": hashes}[self.params.pooling]
        return (vectors_of(chosen).sum(axis=0, dtype=np.float64) / len(chosen)).astype("<f4").tobytes()


@dataclass(frozen=True)
class NaiveText:
    """The text of a turn, decoded from the start at each call."""

    stop: tuple[str, ...]
    min_tokens: int

    @staticmethod
    def decoded(output: Sequence[int]) -> tuple[str, bool]:
        """Returns the complete characters of `output`, and whether bytes are left over."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        text = decoder.decode(b"".join(TOKEN_BYTES[token] for token in output))
        return text, bool(decoder.getstate()[0])

    def _searched(self, output: Sequence[int]) -> str:
        """Returns the part of the text in which stop strings count."""
        return self.decoded(output)[0][len(self.decoded(output[: self.min_tokens])[0]) :]

    def found(self, output: Sequence[int]) -> tuple[int, str] | None:
        """Returns the first stop string to end: its start, in characters of the whole text, and the string."""
        if not self.stop or len(output) <= self.min_tokens:
            return None
        text = self._searched(output)
        for end in range(1, len(text) + 1):
            ending = [stop for stop in self.stop if text.endswith(stop, 0, end)]
            if ending:
                stop = max(ending, key=len)
                return len(self.decoded(output)[0]) - len(text) + end - len(stop), stop
        return None

    def delivered(self, output: Sequence[int]) -> int:
        """Returns the number of characters delivered while the turn runs."""
        found = self.found(output)
        if found is not None:
            return found[0]
        whole = len(self.decoded(output)[0])
        if len(output) <= self.min_tokens or not self.stop:
            return whole
        text = self._searched(output)
        prefixes = {stop[:n] for stop in self.stop for n in range(1, len(stop))}
        return whole - max((n for n in range(1, len(text) + 1) if text[-n:] in prefixes), default=0)

    def delivered_tokens(self, output: Sequence[int]) -> int:
        """Returns the number of leading tokens that end with a complete character and whose text was delivered."""
        out = 0
        for n in range(1, len(output) + 1):
            text, pending = self.decoded(output[:n])
            if not pending and len(text) <= self.delivered(output):
                out = n
        return out

    def whole(self, output: Sequence[int], *, ended: bool) -> str:
        """Returns all text delivered so far, or by the end of a turn that ended by itself."""
        text = self.decoded(output)[0]
        found = self.found(output)
        if found is not None:
            return text[: found[0]]
        if ended:
            return b"".join(TOKEN_BYTES[token] for token in output).decode("utf-8", errors="replace")
        return text[: self.delivered(output)]


class Letters:
    """The part of a tokenizer that a text stream needs."""

    @staticmethod
    def token_bytes(token: int) -> bytes:
        return TOKEN_BYTES[token]
