"""Steps as captured work: the host writes the numbers of a step and goes on; the device does the rest.

The launches depend on the size of the step alone, see `buckets`. How many rows and tokens there are, whose they
are and where they begin is read from the device's memory by every step, so a step is never planned again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tenuto.exec.gpu.memory import DecodeAttention, GpuPages, RaggedAttention, RaggedRows
from tenuto.exec.gpu.ring import Ring
from tenuto.exec.torch_memory import Memories
from tenuto.kernels.gpu.attention import TILE
from tenuto.kernels.gpu.sampling import sample
from tenuto.kernels.gpu.steps import begin, change, finish, single, spread
from tenuto.kernels.recurrent import Piece
from tenuto.models.decoder import Decoder


class CapturedSteps:
    """The captured steps of a model, each captured when it is first needed. `sampled`, int32 [row ids], are the tokens
    that rows sampled last."""

    def __init__(self, model: Decoder, memories: Memories, sampled: torch.Tensor, ring: Ring) -> None:
        self._model, self._memories, self._sampled, self._ring = model, memories, sampled, ring
        self._pages = {g: pages for g, pages in memories.pages.items() if isinstance(pages, GpuPages)}
        self._decodes: dict[int, Callable[[], None]] = {}  # by number of rows
        self._mixed: dict[tuple[int, int], Callable[[], None]] = {}  # by numbers of tokens and rows

    def decode(self, rows: int) -> Callable[[], None]:
        """Returns a function that queues a step in which each of at most `rows` rows computes and samples one token."""
        found = self._decodes.get(rows)
        if found is None:
            found = self._decodes[rows] = self._captured(lambda: self._decode(rows))
        return found

    def mixed(self, tokens: int, rows: int) -> Callable[[], None]:
        """Returns a function that queues a step of at most `tokens` tokens of at most `rows` rows, of which some sample
        after their last one. The model has no recurrent layers."""
        found = self._mixed.get((tokens, rows))
        if found is None:
            found = self._mixed[tokens, rows] = self._captured(lambda: self._compute(tokens, rows))
        return found

    @torch.inference_mode()
    def _captured(self, work: Callable[[], None]) -> Callable[[], None]:
        return self._ring.capture(work)

    def _decode(self, many: int) -> None:
        entries, each = self._ring.entries, torch.arange(many, device=self._sampled.device)
        rows = begin(entries, self._ring.fields, many)
        tokens = single(entries, rows, self._sampled)
        self._change_tables()
        attentions = {g: DecodeAttention(pages, rows.ids, rows.alone) for g, pages in self._pages.items()}
        moves = dict(zip(self._memories.states, rows.moves, strict=True))
        memory = self._memories.step_of(attentions, moves, (Piece(each, each[:, None]),))
        logits = self._model.projected(self._model.normed(self._model.hidden(tokens, rows.alone, memory)))
        finish(entries, rows, sample(logits, *rows.choice), self._sampled)

    def _compute(self, many_tokens: int, many: int) -> None:
        entries = self._ring.entries
        rows = begin(entries, self._ring.fields, many)
        tokens = spread(entries, rows, many_tokens, TILE, self._sampled)
        self._change_tables()
        ragged = RaggedRows(tokens.owners, tokens.positions, tokens.tiles, rows.ids, rows.alone, rows.firsts)
        memory = self._memories.step_of(
            {g: RaggedAttention(pages, ragged) for g, pages in self._pages.items()}, moves={}, pieces=()
        )
        logits = self._model.logits(self._model.hidden(tokens.ids, tokens.positions, memory), rows.lasts)
        finish(entries, rows, sample(logits, *rows.choice), self._sampled)

    def _change_tables(self) -> None:
        for number, pages in enumerate(self._pages.values()):
            change(self._ring.entries, number, pages.table)
