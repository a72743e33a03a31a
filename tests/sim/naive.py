"""What sessions should contain and what each turn should do, kept in the most naive way: lists of tokens, copied."""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tenuto.base.options import Policy, TurnParams
from tenuto.base.sampling import LEAST_LOGPROB, Candidate, TokenLogprob
from tenuto.exec.witness_hashes import START, advance, next_allowed, next_token, next_unmasked, seeded
from tests.sim.grammars import Follower
from tests.sim.letters import EOS, TOKEN_BYTES, VOCAB

PREFILL = TurnParams(max_new_tokens=0)
"""Input is appended, and nothing generated."""


class TokenRun:
    """Tokens, and the hash after each of them: `hashes[n]` is that of the first n."""

    __slots__ = ("hashes", "tokens")

    def __init__(self) -> None:
        self.tokens = array("i")
        self.hashes = array("Q", (START,))

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        state = self.hashes[-1]
        for token in tokens:
            state = advance(state, token)
            self.tokens.append(token)
            self.hashes.append(state)

    def cut(self, position: int) -> None:
        del self.tokens[position:]
        del self.hashes[position + 1 :]

    def head(self, position: int) -> TokenRun:
        """A copy of the first `position` tokens."""
        copy = TokenRun()
        copy.tokens, copy.hashes = self.tokens[:position], self.hashes[: position + 1]
        return copy

    def stored(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """What the witness stores in the slots of positions [start, stop): hashes uint64 and tokens int64."""
        hashes = np.frombuffer(self.hashes[start + 1 : stop + 1], np.uint64)
        return hashes, np.frombuffer(self.tokens[start:stop], np.int32).astype(np.int64)


class NaiveSession:
    """A history, turn boundaries as (start, input_end, end), and what its policy says."""

    def __init__(self, policy: Policy, limit: int, now: float) -> None:
        self.policy = policy
        self.limit = limit
        self.history = TokenRun()
        self.records: list[tuple[int, int, int]] = []
        self.version = 0
        self.turn: NaiveTurn | None = None
        self.closing = False
        self.last_end = now
        self.counted_version = -1

    @property
    def tokens(self) -> array[int]:
        return self.history.tokens

    def cut(self, position: int) -> None:
        self.history.cut(position)
        self.records = _cut(self.records, position)
        self.version += 1

    def fork(self, position: int, policy: Policy, limit: int, now: float) -> NaiveSession:
        child = NaiveSession(policy, limit, now)
        child.history = self.history.head(position)
        child.records = _cut(self.records, position)
        return child

    def take_in(self, base: int, tokens: Sequence[int], output: Sequence[int], *, replaces: bool) -> None:
        """Commit a turn."""
        start = self.records.pop()[0] if replaces else base
        self.history.cut(base)
        self.history.extend(tokens)
        input_end = len(self.history)
        self.history.extend(output)
        if len(self.history) > start:
            self.records.append((start, input_end, len(self.history)))
        self.version += 1

    def adopt(self, tokens: Sequence[int], output: Sequence[int], now: float) -> None:
        self.take_in(len(self.history), tokens, output, replaces=False)
        self.last_end = now

    def expires(self, now: float) -> bool:
        """Whether it must be gone after the next step."""
        ttl = self.policy.ttl
        return ttl is not None and self.turn is None and not self.closing and self.last_end + ttl <= now


def _cut(records: list[tuple[int, int, int]], position: int) -> list[tuple[int, int, int]]:
    return [(start, min(middle, position), min(end, position)) for start, middle, end in records if start < position]


class NaiveTurn:
    """What one turn says, and when it has to end: every token follows from all before it and the seed."""

    def __init__(self, number: int, sid: str, session: NaiveSession, base: int, tokens: Sequence[int]) -> None:
        self.number = number
        self.sid = sid
        self.session = session
        self.base = base
        self.input = list(tokens)
        self.sequence = session.history.head(base)
        self.sequence.extend(tokens)
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
        self.stuck = False  # its last token may not come in its grammar
        self.output: list[int] = []
        self.pieces: list[str] = []  # text it has delivered
        self.computed = 0  # tokens of it in plans given to the executor
        self.first_start = -1  # where the first plan since it started begins
        self.since = 0  # the step at which it was submitted
        self.overtaken = 0  # turns that came later, of no higher priority, and started before it
        self.disturbed = False  # preempted, or in a failed step: it computes again what it had
        self.last_failed = False  # the last step it was in failed
        self.poisoned_from: int | None = None  # every step with it fails that computes past this position
        self.failed_alone = 0  # failed steps with nobody else in them

    # -- what is fixed when it is opened

    def redraft(self, tokens: Sequence[int], now: float) -> None:
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
        self.follower = Follower(params.grammar) if params.grammar is not None else None

    @property
    def prompt(self) -> int:
        return self.base + len(self.input)

    def deadline(self, draft_timeout: float) -> float | None:
        """When it has to end; `None` for never."""
        if self.drafting:
            return self.changed + draft_timeout
        limits = [self.params.timeout, None if self.started else self.params.queue_timeout]
        given = [limit for limit in limits if limit is not None]
        return self.arrival + min(given) if given else None

    def rank(self, aging: float) -> tuple[bool, float, int]:
        return self.drafting, self.arrival - self.priority * aging, self.number

    # -- what it says

    def said_at(self, position: int) -> int:
        """The token that follows the first `position` tokens: all there are, if it has a grammar."""
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
        """What is wrong with `output`, which only grows."""
        if len(output) < len(self.output):
            return f"output shrank from {len(self.output)} to {len(output)} tokens"
        for position in range(len(self.output), len(output)):
            if self.finished:
                return f"output goes on after its end: {list(output)} of at most {self.most}"
            token = self.said_at(self.prompt + position)
            if output[position] != token:
                return f"output {position} is {output[position]}, the history says {token}"
            self.output.append(token)
            self.sequence.extend((token,))
            if self.follower is not None:
                self.stuck = not self.follower.take(token)
                self.complete = not self.stuck and self.follower.complete
        return None

    def guess(self, count: int) -> list[int]:
        """The next `count` tokens, or fewer if its grammar ends before."""
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

    # -- what it reports

    @property
    def delivered(self) -> int:
        return len(self.output) if self.text is None else self.text.delivered_tokens(self.output)

    def output_logprobs(self) -> list[TokenLogprob]:
        """One an output token."""
        if self.params.logprobs is None:
            return []
        most = self.params.logprobs
        return [TokenLogprob(token, 0.0, (Candidate(token, 0.0),) if most else ()) for token in self.output]

    def input_logprobs(self) -> list[TokenLogprob | None]:
        """One an input token: what the witness would have said with seed 0 is certain."""
        found: list[TokenLogprob | None] = []
        for position in range(self.base, self.prompt):
            if position == 0:
                found.append(None)
                continue
            said, token = next_token(self.sequence.hashes[position - 1 + 1], VOCAB), self.sequence.tokens[position]
            top = (Candidate(said, 0.0),) if self.params.input_logprobs else ()
            found.append(TokenLogprob(token, 0.0 if said == token else LEAST_LOGPROB, top))
        return found


@dataclass(frozen=True)
class NaiveText:
    """The text of a turn, decoded from the start each time it is looked at."""

    stop: tuple[str, ...]
    min_tokens: int

    @staticmethod
    def decoded(output: Sequence[int]) -> tuple[str, bool]:
        """The whole characters of `output`, and whether bytes are left over."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        text = decoder.decode(b"".join(TOKEN_BYTES[token] for token in output))
        return text, bool(decoder.getstate()[0])

    def _searched(self, output: Sequence[int]) -> str:
        """The part in which stop strings count."""
        return self.decoded(output)[0][len(self.decoded(output[: self.min_tokens])[0]) :]

    def found(self, output: Sequence[int]) -> tuple[int, str] | None:
        """Where the first stop string to end begins, in characters of the whole text, and which it is."""
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
        """Characters given out while it goes on."""
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
        """Leading tokens that end with a character and whose text is out."""
        out = 0
        for n in range(1, len(output) + 1):
            text, pending = self.decoded(output[:n])
            if not pending and len(text) <= self.delivered(output):
                out = n
        return out

    def whole(self, output: Sequence[int], *, ended: bool) -> str:
        """All the text given out by the end of a turn that came to its own end, or so far."""
        text = self.decoded(output)[0]
        found = self.found(output)
        if found is not None:
            return text[: found[0]]
        if ended:
            return b"".join(TOKEN_BYTES[token] for token in output).decode("utf-8", errors="replace")
        return text[: self.delivered(output)]


class Letters:
    """As much of a tokenizer as a text stream asks for."""

    @staticmethod
    def token_bytes(token: int) -> bytes:
        return TOKEN_BYTES[token]
