"""Which tokens the rows with penalties have seen, on the device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tenuto.base.errors import InvariantError
from tenuto.base.plan import RowSampling
from tenuto.kernels.sampling import penalise

Longs = npt.NDArray[np.int64]

NO_SLOT = -1


class TokenCounts:
    """Counts tokens for rows that ask for penalties. Such a row has a slot of `_seen` bool and `_counts` int32, both
    [slots, vocab], which are made when first needed and doubled when full. All by the executor's worker."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self._seen = torch.zeros((0, vocab), dtype=torch.bool, device=device)
        self._counts = torch.zeros((0, vocab), dtype=torch.int32, device=device)
        self._slots = np.full(rows, NO_SLOT)
        self._penalties = np.zeros((3, rows), np.float32)  # repetition, presence, frequency
        self._free: list[int] = []

    @property
    def slots(self) -> int:
        """How many rows there is memory for."""
        return len(self._seen)

    def start(self, row: int, new: RowSampling) -> None:
        """The row begins anew, with the tokens `new` tells of; without a penalty it gives its slot up."""
        slot = int(self._slots[row])
        if not new.sampling.penalised:
            if slot != NO_SLOT:
                self._slots[row] = NO_SLOT
                self._free.append(slot)
            return
        if slot == NO_SLOT:
            self._slots[row] = slot = self._take()
        options = new.sampling
        self._penalties[:, row] = options.repetition_penalty, options.presence_penalty, options.frequency_penalty
        self._seen[slot], self._counts[slot] = False, 0
        if new.prompt is not None:
            self._seen[slot, self._indices(new.prompt)] = True
        if new.output is not None:
            output = self._indices(new.output)
            self._seen[slot, output] = True
            self._counts[slot].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def _take(self) -> int:
        if not self._free:
            had = len(self._seen)
            more = max(1, had)
            seen = torch.cat((self._seen, self._seen.new_zeros((more, self._seen.shape[1]))))
            counts = torch.cat((self._counts, self._counts.new_zeros((more, self._counts.shape[1]))))
            self._seen, self._counts = seen, counts  # both or, where the device has no room, neither
            self._free = list(range(had + more - 1, had - 1, -1))
        return self._free.pop()

    def penalise(self, logits: torch.Tensor, rows: Longs) -> None:
        """Apply the penalties of `rows`, int64 [n], to their logits, float32 [n, vocab], in place. Raises
        `InvariantError` if a row with a penalty samples twice."""
        chosen = np.flatnonzero(self._slots[rows] != NO_SLOT)
        if len(chosen) == 0:
            return
        penalised = rows[chosen]
        if len(np.unique(penalised)) < len(penalised):
            raise InvariantError("a row with penalties samples more than one token in a step")
        places, slots = self._indices(chosen), self._indices(self._slots[penalised])
        seen, counts = self._seen.index_select(0, slots), self._counts.index_select(0, slots)
        penalties = torch.from_numpy(self._penalties[:, penalised]).to(logits.device)
        logits.index_copy_(0, places, penalise(logits.index_select(0, places), seen, counts, *penalties))

    def add(self, rows: Longs, tokens: torch.Tensor) -> None:
        """Row `rows[i]` has sampled `tokens[i]`, int64 [n] on the device."""
        chosen = np.flatnonzero(self._slots[rows] != NO_SLOT)
        if len(chosen) == 0:
            return
        slots, sampled = self._indices(self._slots[rows[chosen]]), tokens[self._indices(chosen)]
        self._seen[slots, sampled] = True
        self._counts[slots, sampled] += 1

    def _indices(self, values: npt.NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._seen.device)
