"""Rows that compute guesses, some of them wrong, and rows that may sample only some tokens: their tokens are those of
rows without guesses."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from bench.gpu.models import NOTHING, PAGE
from tenuto.base.plan import NO_SLOT, PageCopies, Plan, RowSampling, StateMoves, TableChanges, TokenMasks, Words
from tenuto.base.sampling import Sampling
from tenuto.exec.model_executor import ModelExecutor


@dataclass
class _Row:
    """A row. `tokens`: to be computed next, from position `at` on; the last `guesses` of them are guesses. `sampled`:
    the tokens that it has sampled. `slot`: of its state. `kept`: how many inputs its next step absorbs."""

    tokens: list[int]
    guesses: int = 0
    at: int = 0
    sampled: list[int] = field(default_factory=list)
    slot: int = NO_SLOT
    kept: int = 0


class GuessingRows:
    """Rows of one executor, each with its own pages and two state slots. They begin one after another, so that most
    steps mix prompts, decodes and guesses. With `grammar`, all rows but the first may only sample a third of the
    tokens, others at each position."""

    def __init__(self, executor: ModelExecutor, sampling: Sampling, lookahead: int, *, grammar: bool = False) -> None:
        self._executor, self._sampling = executor, sampling
        self._lookahead, self._grammar, self._vocab = lookahead, grammar, executor.forward.config.vocab
        self._units: tuple[int, ...] | None = None
        self.guessed = self.right = self.steps = 0

    def turns(self, prompts: list[list[int]], count: int, expected: list[list[int]] | None = None) -> list[list[int]]:
        """Computes prompts and samples `count` tokens after each. With the `expected` ones, rows guess: what is
        expected, or from a random place on something else. Returns what each row samples. Later calls have as many
        prompts, of the same lengths."""
        many, draw = len(prompts), np.random.default_rng(0)
        pages = -(-(max(map(len, prompts)) + count + self._lookahead) // PAGE)
        paged = [group.paged for group in self._executor.spec.groups]
        units = tuple(many * pages if page else 2 * many for page in paged)
        if self._units is None:
            self._executor.prepare(units, many, overlap=1, lookahead=self._lookahead)
            self._units = units
        assert units == self._units, "the memory is that of the first call"
        rows = [_Row(list(prompt)) for prompt in prompts]
        for step in range(many * count):
            working = [i for i, row in enumerate(rows[: step + 1]) if len(row.sampled) < count]
            if not working and step >= many:
                break
            self.steps += 1
            plan = self._plan(rows, working, step, sum(paged), len(paged) - sum(paged), pages, draw)
            self._executor.submit(plan)
            self._allow(plan)
            found = iter(self._executor.collect().tokens.tolist())
            for i in working:
                more = expected[i] if expected is not None else None
                self._settle(rows[i], found, count, more, draw)
        return [row.sampled[:count] for row in rows]

    def _plan(
        self,
        rows: list[_Row],
        working: list[int],
        step: int,
        paged: int,
        states: int,
        pages: int,
        draw: np.random.Generator,
    ) -> Plan:
        own = [rows[i] for i in working]
        reads = [row.slot for row in own]
        for i, row in zip(working, own, strict=True):
            row.slot = row.slot if row.slot >= 0 and draw.random() < 0.5 else 2 * i + (row.slot != 2 * i + 1)
        keeps = [int(row.guesses > 0) for row in own]
        columns = reads, [row.slot for row in own], [row.kept for row in own], keeps
        moves = StateMoves(*(np.array(column, np.int32) for column in columns))
        new = np.arange(pages if step < len(rows) else 0, dtype=np.int32)
        table = TableChanges(np.full_like(new, step), new, step * pages + new)
        sampling = ((step, self._options(step, rows[step].tokens)),) if step < len(rows) else ()
        samples = np.array([row.guesses + 1 for row in own], np.int32)
        first, masks = samples.cumsum() - samples, []
        if self._grammar:
            masks = [TokenMasks(int(place), Future()) for i, place in zip(working, first, strict=True) if i]
        return Plan(
            step=step,
            rows=np.array(working, np.int32),
            starts=np.array([row.at for row in own], np.int32),
            counts=np.array([len(row.tokens) for row in own], np.int32),
            tokens=np.array([token for row in own for token in row.tokens], np.int32),
            samples=samples,
            tables=(table,) * paged,
            copies=(PageCopies(NOTHING, NOTHING, NOTHING),) * paged,
            states=(moves,) * states,
            sampling=sampling,
            masks=tuple(masks),
        )

    def _options(self, row: int, prompt: list[int]) -> RowSampling:
        """Every other row is greedy, but has the same penalties and biases."""
        options = self._sampling if row % 2 else replace(self._sampling, temperature=0)
        if not options.penalised:
            return RowSampling(options)
        return RowSampling(options, np.unique(np.array(prompt, np.int32)), NOTHING)

    def _allow(self, plan: Plan) -> None:
        """Makes the masks known while the step computes."""
        ends = plan.samples.cumsum()
        for masks in plan.masks:
            i = int(ends.searchsorted(masks.place, side="right"))
            last, count = int(plan.starts[i] + plan.counts[i]), int(plan.samples[i])
            positions = np.arange(last - count + 1, last + 1)
            masks.allowed.set_result(np.stack([self._words(int(plan.rows[i]), int(at)) for at in positions]))

    def _words(self, row: int, position: int) -> Words:
        bits = (np.arange(self._vocab) + row + position) % 3 == 0
        padded = np.pad(bits, (0, -self._vocab % 32))
        return np.packbits(padded, bitorder="little").view(np.uint32)

    def _settle(
        self, row: _Row, found: Iterator[int], count: int, expected: list[int] | None, draw: np.random.Generator
    ) -> None:
        """Takes a row's samples, of which the first and those after right guesses are valid, and guesses again."""
        sampled = [next(found) for _ in range(row.guesses + 1)]
        guesses = row.tokens[len(row.tokens) - row.guesses :]
        right = 0
        while right < len(guesses) and guesses[right] == sampled[right]:
            right += 1
        self.guessed, self.right = self.guessed + len(guesses), self.right + right
        row.kept = right + 1 if row.guesses else 0
        row.at += len(row.tokens) - row.guesses + right
        row.sampled += sampled[: right + 1]
        row.tokens, row.guesses = row.sampled[-1:], 0
        if expected is not None and row.sampled == expected[: len(row.sampled)]:
            more = expected[len(row.sampled) : count][: int(draw.integers(0, self._lookahead + 1))]
            wrong = int(draw.integers(0, self._lookahead + 1))
            more = [token if i < wrong else (token + 1) % self._vocab for i, token in enumerate(more)]
            row.tokens, row.guesses = [*row.tokens, *more], len(more)


def prompts_of(vocab: int, lengths: list[int]) -> list[list[int]]:
    """Returns random prompts."""
    draw = np.random.default_rng(1)
    return [draw.integers(0, vocab, length).tolist() for length in lengths]
