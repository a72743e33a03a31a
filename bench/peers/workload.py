"""The workload, concurrent sessions of several turns, and the figures of a run."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tenuto.base.config import DEFAULT_MODEL, cache_dir
from tenuto.cli.bench import Timed, Workload
from tenuto.cli.bench_apis import WORDS
from tenuto.models.store import resolve
from tenuto.text.load import load_tokenizer

NEW_TOKENS = 48
OUTPUT_TOKENS = 32
WARM_UP_TURNS = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """`sessions` concurrent sessions, each with `turns` consecutive turns."""

    sessions: int
    turns: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Parses `SESSIONSxTURNS`. Raises `ValueError`."""
        sessions, turns = map(int, text.split("x"))
        if sessions < 1 or turns < 2:
            raise ValueError(f"{text}: allowed are at least 1 session and 2 turns")
        return cls(sessions, turns)

    @property
    def context(self) -> int:
        """Number of tokens of a session after its last turn."""
        return self.turns * (NEW_TOKENS + OUTPUT_TOKENS)

    def __str__(self) -> str:
        return f"{self.sessions}x{self.turns}"


SHAPES = (Shape(1, 40), Shape(4, 20), Shape(16, 10))


@dataclass(frozen=True, slots=True)
class WordsWorkload(Workload):
    """A workload whose inputs are words. With arbitrary token ids, peers that stream text would often hold back tokens
    that end within a character."""

    vocabulary: tuple[int, ...]

    def inputs(self, session: int) -> list[list[int]]:
        draw = random.Random(f"{self.seed}/{session}")
        return [draw.choices(self.vocabulary, k=self.input) for _ in range(self.turns)]


def workload(shape: Shape, seed: int, vocabulary: tuple[int, ...], output: int = OUTPUT_TOKENS) -> WordsWorkload:
    """Returns the workload of `shape`. Each `seed` gives different inputs, which no cache has seen."""
    return WordsWorkload(
        sessions=shape.sessions,
        turns=shape.turns,
        first_input=NEW_TOKENS,
        input=NEW_TOKENS,
        output=output,
        think=0.0,
        concurrency=shape.sessions,
        seed=seed,
        vocabulary=vocabulary,
    )


def word_tokens() -> tuple[int, ...]:
    """Returns the ids of words that are one token in the default model."""
    tokenizer = load_tokenizer(resolve(DEFAULT_MODEL, cache_dir()).path)
    encoded = [tokenizer.encode(f" {word}") for word in WORDS]
    return tuple(ids[0] for ids in encoded if len(ids) == 1)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a workload: its turns and the seconds it took. Raises `RuntimeError` if any turn failed, because
    the rate of the others would look too good."""

    timed: Sequence[Timed]
    seconds: float

    def __post_init__(self) -> None:
        failed = [turn for turn in self.timed if turn.error is not None or turn.counts is None or turn.first is None]
        if failed or not self.timed:
            raise RuntimeError(f"{len(failed)} turns failed: {failed[0].error if failed else 'there were no turns'}")


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a run. `tokens_per_second`: over the whole run, and `together` until the first session has ended
    its last turn. `ttft` and `itl`: milliseconds to the first token and between tokens, medians over the turns in the
    middle third; `late_ttft`: the TTFT that nine tenths of them stay below. `growth`: the TTFT of the last turn over
    that of the second. `computed`: mean number of prompt tokens computed per turn in the middle third, if the peer
    reports it. `ttft_by_turn`: medians over the sessions."""

    tokens_per_second: float
    together: float
    ttft: float
    late_ttft: float
    itl: float
    growth: float
    computed: float | None
    ttft_by_turn: tuple[float, ...]


def figures(outcome: Outcome) -> Figures:
    """Computes the figures of a run."""
    turns = max(turn.number for turn in outcome.timed)
    middle = range(turns // 3 + 1, max(2 * turns // 3, turns // 3 + 1) + 1)
    inside = [turn for turn in outcome.timed if turn.number in middle]
    by_turn = tuple(
        _median_ms([turn for turn in outcome.timed if turn.number == number], _first) for number in range(1, turns + 1)
    )
    computed = [
        turn.counts.prompt - turn.counts.cached
        for turn in inside
        if turn.counts is not None and turn.counts.prompt is not None and turn.counts.cached is not None
    ]
    return Figures(
        sum(map(_generated, outcome.timed)) / outcome.seconds,
        _rate_together(outcome.timed, turns),
        _median_ms(inside, _first),
        1000 * float(np.quantile([_first(turn) for turn in inside], 0.9)),
        _median_ms(inside, _gap),
        by_turn[-1] / by_turn[1],
        statistics.mean(computed) if computed else None,
        by_turn,
    )


def _rate_together(timed: Sequence[Timed], turns: int) -> float:
    """Returns the tokens per second until the first session has ended its last turn. A peer may let some sessions run
    ahead; what the others do alone afterwards is not what many sessions get."""
    arrivals = [np.cumsum([turn.began + _first(turn), *turn.gaps]) for turn in timed]
    end = min(times[-1] for times, turn in zip(arrivals, timed, strict=True) if turn.number == turns)
    seconds = end - min(turn.began for turn in timed)
    return float(sum(np.count_nonzero(times <= end) for times in arrivals) / seconds)


def _median_ms(timed: Sequence[Timed], value: Callable[[Timed], float]) -> float:
    return 1000 * statistics.median(map(value, timed))


def _first(turn: Timed) -> float:
    assert turn.first is not None
    return turn.first


def _generated(turn: Timed) -> int:
    assert turn.counts is not None
    return turn.counts.generated or 0


def _gap(turn: Timed) -> float:
    """Returns the mean seconds between tokens. It divides by the number of tokens, as one piece may hold several."""
    return sum(turn.gaps) / max(1, _generated(turn) - 1)
