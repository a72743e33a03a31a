"""Steps as captured work: the host writes the numbers of a step and goes on; the device does the rest.

The launches depend on the size of the step alone, see `buckets`. How many rows and tokens there are, whose they
are and where they begin is read from the device's memory by every step, so a step is never planned again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tenuto.exec.gpu.adapters import AdaptedStep, AdapterTable
from tenuto.exec.gpu.edits import GpuEdits
from tenuto.exec.gpu.memory import DecodeAttention, GpuPages, RaggedAttention, RaggedRows
from tenuto.exec.gpu.ring import Ring
from tenuto.exec.torch_memory import Memories
from tenuto.kernels.gpu.attention import TILE
from tenuto.kernels.gpu.edits import EditedRows, count, edit
from tenuto.kernels.gpu.sampling import sample
from tenuto.kernels.gpu.steps import (
    Rows,
    Sampling,
    adapters_of,
    allow,
    begin,
    change,
    finish,
    report,
    select,
    single,
    spread,
    trace,
)
from tenuto.kernels.torch_sampling import score
from tenuto.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Size:
    """The most tokens, rows and samples of a captured step. `decodes`: whether every row computes and samples one
    token, and absorbs and keeps nothing. `adapted`: whether rows may have adapters. `parted`: whether it is two parts,
    of which the first ends with logits."""

    tokens: int
    rows: int
    samples: int
    decodes: bool
    adapted: bool
    parted: bool


@dataclass(frozen=True, slots=True)
class End:
    """The second part of a step: the most rows and samples, whether samples may have masks or edits, and the number of
    likeliest tokens whose log-probabilities are computed beside those of the samples; none at all if that is None."""

    rows: int
    samples: int
    masked: bool
    edited: bool
    scored: int | None


class CapturedSteps:
    """The captured steps of a model, each captured when it is first needed. `sampled`, int32 [row ids], are the tokens
    that rows sampled last.

    A step whose samples may have masks, edits or log-probabilities has two parts: the first ends with logits, in one
    tensor for all such steps, and the second samples from them. If there are masks, the host waits for them between the
    parts. Other steps do without the copy, and without a second launch.
    """

    def __init__(
        self, model: Decoder, memories: Memories, adapters: AdapterTable, sampled: torch.Tensor, ring: Ring
    ) -> None:
        self._model, self._memories, self._sampled, self._ring = model, memories, sampled, ring
        self._adapters = adapters
        self._pages = {g: pages for g, pages in memories.pages.items() if isinstance(pages, GpuPages)}
        self._steps: dict[Size, Callable[[], None]] = {}
        self._ends: dict[tuple[End, GpuEdits], Callable[[], None]] = {}
        self._logits: torch.Tensor | None = None  # of steps in two parts, float32 [most rows of a step, vocab]

    def step(self, size: Size) -> Callable[[], None]:
        """Returns a function that queues a step, or its first part."""
        found = self._steps.get(size)
        if found is None:
            self._allocate(size)
            found = self._steps[size] = self._captured(lambda: self._compute(size))
        return found

    def end(self, end: End, edits: GpuEdits) -> Callable[[], None]:
        """Returns a function that queues the second part of a step. `edits`: those of the rows."""
        found = self._ends.get((end, edits))
        if found is None:
            edited = edits.edited if end.edited else None
            found = self._ends[end, edits] = self._captured(lambda: self._end(end, edited))
        return found

    @torch.inference_mode()
    def _allocate(self, size: Size) -> None:
        if size.parted and self._logits is None:
            shape = self._ring.most, self._model.config.vocab
            self._logits = torch.zeros(shape, device=self._sampled.device, dtype=torch.float32)

    @torch.inference_mode()
    def _captured(self, work: Callable[[], None]) -> Callable[[], None]:
        return self._ring.capture(work)

    def _compute(self, size: Size) -> None:
        rows = begin(self._ring.entries, self._ring.fields, size.rows)
        adapted = (self._adapters.step(adapters_of(rows, size.tokens)),) if size.adapted else ()
        logits = self._decode(rows, adapted) if size.decodes else self._mixed(rows, size, adapted)
        if size.parted:
            assert self._logits is not None  # `_allocate` was called
            self._logits[: size.samples].copy_(logits)
        else:
            entries = self._ring.entries
            sampling = select(entries, rows, len(logits))
            finish(entries, sampling, sample(logits, *sampling.choice), self._sampled)

    def _decode(self, rows: Rows, adapted: tuple[AdaptedStep, ...]) -> torch.Tensor:
        tokens = single(self._ring.entries, rows, self._sampled)
        self._change_tables()
        attentions = {g: DecodeAttention(pages, rows.ids, rows.alone) for g, pages in self._pages.items()}
        memory = self._memories.step_of(attentions, self._moves(rows), None)
        return self._model.projected(self._model.normed(self._model.hidden(tokens, rows.alone, memory, adapted)))

    def _mixed(self, rows: Rows, size: Size, adapted: tuple[AdaptedStep, ...]) -> torch.Tensor:
        entries = self._ring.entries
        tokens = spread(entries, rows, size.tokens, TILE, self._sampled)
        self._change_tables()
        ragged = RaggedRows(tokens.owners, tokens.positions, tokens.tiles, rows.ids, rows.alone, rows.firsts)
        attentions = {g: RaggedAttention(pages, ragged) for g, pages in self._pages.items()}
        memory = self._memories.step_of(attentions, self._moves(rows), rows.spans)
        after = select(entries, rows, size.samples).after
        return self._model.logits(self._model.hidden(tokens.ids, tokens.positions, memory, adapted), after)

    def _moves(self, rows: Rows) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        return {g: (reads, writes) for g, (reads, writes) in zip(self._memories.states, rows.moves, strict=True)}

    def _end(self, end: End, edited: EditedRows | None) -> None:
        assert self._logits is not None  # the first part was captured before
        entries, logits = self._ring.entries, self._logits[: end.samples]
        rows = begin(entries, self._ring.fields, end.rows)
        scored_apart = end.scored is not None and (end.masked or end.edited)
        given = logits.clone() if scored_apart else logits
        sampling = select(entries, rows, end.samples)
        if edited is None:
            tokens = self._sampled_from(given, sampling, masked=end.masked)
        else:
            samples = trace(entries, rows, end.samples)
            edit(given, edited, samples)
            tokens = self._sampled_from(given, sampling, masked=end.masked)
            count(edited, samples, tokens)
        if end.scored is not None:
            report(entries, *score(logits, tokens, end.scored))
        finish(entries, sampling, tokens, self._sampled)

    def _sampled_from(self, logits: torch.Tensor, sampling: Sampling, *, masked: bool) -> torch.Tensor:
        if masked:
            allow(self._ring.entries, logits)
        return sample(logits, *sampling.choice)

    def _change_tables(self) -> None:
        for number, pages in enumerate(self._pages.values()):
            change(self._ring.entries, number, pages.table)
