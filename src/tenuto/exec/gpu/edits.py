"""Edits of rows' logits in the memory of a GPU, where captured steps read them and count tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tenuto.base.plan import Ints, RowSampling, Words
from tenuto.exec.gpu.memory import ints, put
from tenuto.exec.logits import Logits, Longs
from tenuto.exec.torch_forward import TorchLogits
from tenuto.kernels.gpu.edits import (
    MASKED,
    NO_EDITS,
    ONCE,
    PENALTIES,
    REFUSED,
    SEEN,
    EditedRows,
    SampledRows,
    count,
    edit,
)


class GpuEdits:
    """The `Edits` of `rows` rows on a GPU. They take eight bytes for each row and token of the vocabulary, from the
    first row on that has any."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self._rows, self._vocab, self._device = rows, vocab, device
        self._edited: EditedRows | None = None

    @property
    def edited(self) -> EditedRows:
        """The edits of all rows, which stay where they are."""
        if self._edited is None:
            self._edited = self._allocated()
        return self._edited

    @torch.inference_mode()
    def _allocated(self) -> EditedRows:
        rows, device = self._rows, self._device
        return EditedRows(
            torch.zeros(rows, self._vocab, dtype=torch.int32, device=device),
            torch.zeros(rows, self._vocab, device=device),
            torch.ones(rows, PENALTIES, device=device),
            torch.full((rows,), NO_EDITS, dtype=torch.int32, device=device),
        )

    @torch.inference_mode()
    def start(self, row: int, new: RowSampling) -> None:
        """See `Edits.start`."""
        options = new.sampling
        if not new.edited:
            if self._edited is not None:
                self._edited.masked_before[row].fill_(NO_EDITS)
            return
        edited = self.edited
        biases = np.zeros(self._vocab, np.float32)
        for token, value in options.logit_bias:
            if token < self._vocab:
                biases[token] = value
        penalties = options.repetition_penalty, options.presence_penalty, options.frequency_penalty
        put(torch.from_numpy(self._words(new)), edited.words[row])
        put(torch.from_numpy(biases), edited.biases[row])
        put(torch.tensor(penalties), edited.penalties[row])
        edited.masked_before[row].fill_(max(new.masked_before, 0))  # an assignment would wait for the device

    def _words(self, new: RowSampling) -> Ints:
        """Returns a row's `EditedRows.words`. Allowed ids that are all unknown limit nothing."""
        words = np.zeros(self._vocab, np.int32)
        if allowed := self._known(new.sampling.allowed_ids):
            words += REFUSED
            words[allowed] = 0
        words[self._known(new.masked)] |= MASKED
        if new.sampling.penalised:
            if new.prompt is not None:
                words[new.prompt] |= SEEN
            if new.output is not None:
                np.add.at(words, new.output, ONCE)
        return words

    def _known(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token < self._vocab]

    @torch.inference_mode()
    def edit(self, logits: Logits, rows: Longs, positions: Longs, guesses: Longs) -> None:
        """See `Edits.edit`. The logits are `TorchLogits`."""
        assert isinstance(logits, TorchLogits)
        if self._edited is not None:
            edit(logits.values, self._edited, self._samples(rows, positions, guesses))

    def allowed(self, rows: Longs) -> list[tuple[int, Words]]:  # noqa: ARG002 - used by other edits
        """See `Edits.allowed`; `edit` leaves none to the caller."""
        return []

    @torch.inference_mode()
    def add(self, rows: Longs, tokens: Longs, guesses: Longs) -> None:
        """See `Edits.add`."""
        if self._edited is not None:
            sampled = torch.from_numpy(tokens).to(self._device)
            count(self._edited, self._samples(rows, rows, guesses), sampled)

    def _samples(self, *given: Longs) -> SampledRows:
        return SampledRows(*(ints(each, self._device) for each in given))
