"""Lays out plans for an executor by hand, as the engine does, without sessions."""

from collections.abc import Sequence

import numpy as np
import torch

from tenuto.base.plan import PageCopies, Plan, RowSampling, TableChanges, TokenMasks
from tenuto.base.sampling import Sampling
from tenuto.exec.model_executor import ModelExecutor

Work = tuple[int, Sequence[int], int]
"""A row, the tokens to compute, and the number of last tokens after which to sample."""


def ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int32)


def columns(triples: Sequence[tuple[int, int, int]]) -> np.ndarray:
    return np.ascontiguousarray(np.array(triples, np.int32).reshape(-1, 3).T)


def logits_of(executor: ModelExecutor, plan: Plan) -> torch.Tensor:
    """Carries out a plan; returns float32 [sum(plan.samples), vocab]."""
    return torch.from_numpy(executor.logits(plan))


class Driver:
    """Gives each row pages, scattered over the pool, as its sequence grows."""

    def __init__(
        self, executor: ModelExecutor, pages: int, rows: int, seed: int = 0, *, prepared: bool = False
    ) -> None:
        """With `prepared`, the executor already has this many pages and rows."""
        self.executor = executor
        if not prepared:
            executor.prepare((pages,), rows)
        self.free = np.random.default_rng(seed).permutation(pages).tolist()
        self.pages: list[list[int]] = [[] for _ in range(rows)]
        self.lengths = [0] * rows
        self.steps = 0

    def plan(
        self,
        work: Sequence[Work],
        sampling: Sequence[tuple[int, Sampling | RowSampling]] = (),
        changes: Sequence[tuple[int, int, int]] = (),
        copies: Sequence[tuple[int, int, int]] = (),
        masks: Sequence[TokenMasks] = (),
    ) -> Plan:
        """Returns the next step; `changes` (row, index, page) and `copies` (source, target, slots) come in addition to
        new pages."""
        changes = list(changes)
        starts = [self.lengths[row] for row, _, _ in work]
        for row, tokens, _ in work:
            self.lengths[row] += len(tokens)
            while len(self.pages[row]) * self.executor.spec.page_size < self.lengths[row]:
                changes.append((row, len(self.pages[row]), self.free[-1]))
                self.pages[row].append(self.free.pop())
        self.steps += 1
        return Plan(
            step=self.steps,
            rows=ints([row for row, _, _ in work]),
            starts=ints(starts),
            counts=ints([len(tokens) for _, tokens, _ in work]),
            tokens=ints([token for _, tokens, _ in work for token in tokens]),
            samples=ints([samples for _, _, samples in work]),
            tables=(TableChanges(*columns(changes)),),
            copies=(PageCopies(*columns(copies)),),
            states=(),
            sampling=tuple((row, new if isinstance(new, RowSampling) else RowSampling(new)) for row, new in sampling),
            masks=tuple(masks),
        )

    def step(self, work: Sequence[Work], **more: Sequence) -> list[int]:
        """Carries out the next step and returns its sampled tokens."""
        self.executor.submit(self.plan(work, **more))
        return self.executor.collect().tokens.tolist()
