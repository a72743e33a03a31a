"""Guesses from what was said before."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol
from weakref import ref

from tenuto.sched.guesses import NO_GUESSES, Guesses, NextStep, Proposer
from tenuto.session.suffixes import ORDER, SessionSuffixes, Suffixes, hash_of
from tenuto.session.turn import Turn

MOST_BYTES = 2**28
"""The most memory for indexes of sessions. Those used longest ago are cleared, and made again when they are needed."""
MOST_AT_ONCE = 8192
"""The most tokens of a session that are added to its index in one step, so that no step waits long."""
MOST_SAID = 2**15
"""The number of tokens of a tenant's output, up to twice as many, that are remembered."""
MOST_TENANTS = 64
COMPARED = 32
"""The most tokens before a position that are compared with a turn's last ones."""
ENOUGH = 16
"""With so many equal tokens no other occurrence is looked for."""
SHARE, MOST_SKIPPED = 2, 16
"""A place is looked for again after half as many tokens as went by since a guess was right, at most 16."""
LEAD = 8
"""The number of input tokens that are remembered with an output."""
BREAK = -1
"""Stands between outputs; no token equals it."""
PREDICTED = 16
"""At the beginning of a prediction, so many tokens count as equal."""


SUFFIX = "suffix"
"""The source of these guesses."""


class Kind(IntEnum):
    """Where guesses come from: the turn's session, others of its tenant, or its prediction."""

    SESSION = 0
    TENANT = 1
    PREDICTION = 2


class Source(Protocol):
    """Tokens among which those after a turn's last ones may be."""

    kind: Kind

    def tokens(self, start: int, stop: int) -> array[int]:
        """Returns the tokens from `start` on and before `stop`, as far as there are any."""

    def find(self, hashed: int) -> Iterable[int]:
        """Returns positions before which tokens with this hash may have occurred; 0 stands for none."""


class Own:
    """The tokens of a turn and its session."""

    kind = Kind.SESSION

    def __init__(self, turn: Turn, suffixes: Suffixes) -> None:
        self.tokens = turn.tokens
        self._turn, self._suffixes = turn, suffixes

    def find(self, hashed: int) -> Iterable[int]:
        length = self._turn.length
        return [position for position in self._suffixes.find(hashed) if position < length]


class Text:
    """Tokens that were said or predicted, to which others can be added."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._tokens, self._suffixes = array("i"), Suffixes()

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, tokens: array[int]) -> None:
        self._tokens.extend(tokens)
        self._suffixes.add(tokens, len(self._tokens))

    def tokens(self, start: int, stop: int) -> array[int]:
        return self._tokens[start:stop]

    def find(self, hashed: int) -> Iterable[int]:
        return self._suffixes.find(hashed)


class Said:
    """The latest outputs of one tenant's sessions, in two parts, of which the older one is dropped when the newer one
    is full."""

    def __init__(self) -> None:
        self.parts = (Text(Kind.TENANT), Text(Kind.TENANT))

    def add(self, tokens: array[int]) -> None:
        """Adds an output of at most `MOST_SAID` tokens."""
        newer, _ = self.parts
        if len(newer) + len(tokens) > MOST_SAID:
            self.parts = (Text(Kind.TENANT), newer)
        self.parts[0].add(tokens)


@dataclass(slots=True)
class Hits:
    """How often guesses were right, by the binary logarithm of the number of equal tokens before them."""

    right: list[float] = field(default_factory=lambda: [0.0] * 8)
    tried: list[float] = field(default_factory=lambda: [0.0] * 8)

    def note(self, matched: int, right: int, most: float) -> None:
        """Counts a guess; `most`: the number of guesses from which earlier ones count less."""
        group = _group(matched)
        self.right[group] += right
        self.tried[group] += 1
        if self.tried[group] > most:
            self.right[group] /= 2
            self.tried[group] /= 2

    def chance(self, group: int, prior: float, weight: float) -> float:
        """Returns the share of right guesses in a group; `prior` counts as `weight` guesses."""
        return (self.right[group] + weight * prior) / (self.tried[group] + weight)


def _group(matched: int) -> int:
    return min(7, matched.bit_length())


PRIORS = (0.0, 0.2, 0.4, 0.6, 0.75, 0.85, 0.9, 0.95)
"""Assumed shares of right guesses, by group, before any was tried."""


@dataclass(slots=True)
class Trail:
    """The place that a turn's output seems to repeat: `position` in `source`, before which `matched` tokens equal the
    turn's last ones. `length`: that of the turn when this was found out. `own` and `prediction` are its sources;
    `hits`: of the turn alone, by kind."""

    length: int
    own: Own
    prediction: Text | None
    source: Source | None = None
    position: int = 0
    matched: int = 0
    right: int = 0  # the length of the turn when a guess was last right, or would have been
    again: int = 0  # the length from which on a place is looked for
    hits: tuple[Hits, ...] = field(default_factory=lambda: tuple(Hits() for _ in Kind))


class SuffixProposer(Proposer):
    """Guesses that the tokens after a turn's last ones are those that followed the same ones before: in the turn's
    prediction, in its session, or in what other sessions of its tenant said.

    Whether guesses would have been right is counted even if none was computed, so a turn whose output begins to repeat
    itself is noticed.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._said: OrderedDict[str, Said] = OrderedDict()  # by tenant, the one used last at the end
        self._hits = tuple(Hits() for _ in Kind)
        self._sizes: OrderedDict[ref[Suffixes], int] = OrderedDict()  # of sessions' indexes, in the same order
        self.bytes = 0  # their sum

    def propose(self, turns: Sequence[Turn], limits: Sequence[int], step: NextStep) -> list[Guesses]:  # noqa: ARG002 - these guesses cost nothing
        """See `Proposer`. Takes constant time a token."""
        return [self._guess(turn, limit) for turn, limit in zip(turns, limits, strict=True)]

    def committed(self, turn: Turn) -> None:
        """Remembers the output for the tenant's other sessions."""
        if turn.result is None or not turn.result.kept:
            return
        tenant, end = turn.session.policy.tenant, turn.prompt_length + turn.result.kept
        said = self._said.setdefault(tenant, Said())
        self._said.move_to_end(tenant)
        start = max(0, turn.prompt_length - LEAD, end - MOST_SAID // 4)
        said.add(array("i", [BREAK]) + turn.session.history[start:end])
        if len(self._said) > MOST_TENANTS:
            self._said.popitem(last=False)

    def forget(self, tenant: str) -> None:
        """See `Proposer`."""
        self._said.pop(tenant, None)

    def _guess(self, turn: Turn, limit: int) -> Guesses:
        trail, length = turn.trail, turn.length
        if not isinstance(trail, Trail):
            turn.trail = trail = self._begin(turn, length)
        if trail.source is not None and length > trail.length:
            self._follow(turn, trail, length)
        trail.length = length
        if trail.source is None and length >= trail.again:
            if self._index(turn, length):
                trail.again = length + min(MOST_SKIPPED, (length - trail.right) // SHARE)
            self._find(turn, trail)
        if trail.source is None:
            return NO_GUESSES
        tokens = trail.source.tokens(trail.position, trail.position + limit)
        if trail.source is trail.own:
            period = length - trail.position
            while len(tokens) < limit:
                tokens.append(tokens[-period])
        elif BREAK in tokens:
            tokens = tokens[: tokens.index(BREAK)]
        return Guesses(tokens, self._chances(trail, trail.source.kind, len(tokens)), SUFFIX)

    def _begin(self, turn: Turn, length: int) -> Trail:
        session = turn.session
        if session.suffixes is None:
            session.suffixes = SessionSuffixes(Suffixes())
        session.suffixes.cut(turn.base_length)
        self._use(session.suffixes.suffixes)
        trail = Trail(length, Own(turn, session.suffixes.suffixes), None, right=length)
        if turn.prediction:
            trail.prediction = Text(Kind.PREDICTION)
            trail.prediction.add(turn.prediction)
            if turn.prediction[: len(turn.output)] == turn.output:
                trail.source, trail.position, trail.matched = trail.prediction, len(turn.output), PREDICTED
        return trail

    def _index(self, turn: Turn, length: int) -> bool:
        """Adds tokens of the turn, which has `length`, to its session's index, except for the last one, so that the
        last ones are not found where they are. Returns whether it has all of them."""
        indexed = turn.session.suffixes
        assert indexed is not None  # set when the turn began
        suffixes = indexed.suffixes
        if indexed.clearings != suffixes.clearings:
            indexed.length, indexed.clearings = 0, suffixes.clearings
        start, end = indexed.length, min(length - 1, indexed.length + MOST_AT_ONCE)
        if end > start:
            before = suffixes.bytes
            suffixes.reserve(length)
            suffixes.add(turn.tokens(max(0, start - ORDER + 1), end), end)
            indexed.length = end
            if suffixes.bytes != before:
                self._use(suffixes)
        return indexed.length >= length - 1

    def _use(self, suffixes: Suffixes) -> None:
        """Takes note of the size of an index that is used, and clears others if there is too little room."""
        key, size = ref(suffixes, self._forget), suffixes.bytes
        self.bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self._sizes.move_to_end(key)
        while self.bytes > self._most_bytes and len(self._sizes) > 1:
            oldest = next(iter(self._sizes))
            self._forget(oldest)
            if (cleared := oldest()) is not None:
                cleared.clear()

    def _forget(self, key: ref[Suffixes]) -> None:
        self.bytes -= self._sizes.pop(key, 0)

    def _follow(self, turn: Turn, trail: Trail, length: int) -> None:
        """Compares the tokens that are new with those at the trail's position, and moves it on or gives it up."""
        source, begin, new = trail.source, trail.length, length - trail.length
        assert source is not None
        actual, expected = turn.tokens(begin, length), source.tokens(trail.position, trail.position + new)
        right = _common(actual, expected)
        for i in range(min(right + 1, new)):
            self._hits[source.kind].note(trail.matched + i, i < right, 512)
            trail.hits[source.kind].note(trail.matched + i, i < right, 64)
        if right:
            trail.right = begin + right
        if right == new:
            trail.position += new
            trail.matched += new
        else:
            trail.source = None

    def _chances(self, trail: Trail, kind: Kind, count: int) -> list[float]:
        """Returns the chances of `count` guesses from a source of this kind."""
        of_group: dict[int, float] = {}
        chances = []
        for matched in range(trail.matched, trail.matched + count):
            group = _group(matched)
            if group not in of_group:
                usual = self._hits[kind].chance(group, PRIORS[group], 8)
                of_group[group] = trail.hits[kind].chance(group, usual, 4)
            chances.append(of_group[group])
        return chances

    def _find(self, turn: Turn, trail: Trail) -> None:
        """Looks for the place with the most tokens equal to the turn's last ones, at least `ORDER`."""
        length = trail.length
        if length < ORDER:
            return
        hashed = hash_of(turn.tokens(length - ORDER, length))
        found = [(source, position) for source in self._sources(turn, trail) for position in source.find(hashed)]
        if not any(position for _, position in found):
            return
        last = turn.tokens(max(0, length - COMPARED), length)
        last.reverse()
        trail.matched = ORDER - 1
        for source, position in found:
            if trail.matched < ENOUGH:
                before = source.tokens(max(0, position - COMPARED), position)
                before.reverse()
                if (matched := _common(last, before)) > trail.matched:
                    trail.source, trail.position, trail.matched = source, position, matched

    def _sources(self, turn: Turn, trail: Trail) -> Iterator[Source]:
        if trail.prediction is not None:
            yield trail.prediction
        yield trail.own
        if (said := self._said.get(turn.session.policy.tenant)) is not None:
            yield from said.parts


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the number of leading tokens that are equal."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count
