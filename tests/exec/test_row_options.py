"""What rows ask for survives a device that has no room at the wrong moment."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tenuto.base.plan import RowSampling
from tenuto.base.sampling import Sampling
from tenuto.exec.row_options import RowOptions

PLAIN = RowSampling(Sampling())
PENALISED = RowSampling(Sampling(presence_penalty=1.0), output=np.array([3], np.int32))


def no_room(*_: object) -> torch.Tensor:
    raise torch.OutOfMemoryError("told to")


@pytest.mark.parametrize("allocation", [1, 2])
def test_counts_that_could_not_grow_can_still_be_used(monkeypatch: pytest.MonkeyPatch, allocation: int) -> None:
    options = RowOptions(4, 50, torch.device("cpu"))
    options.start(0, PENALISED)
    join, calls = torch.cat, iter(range(1, 100))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", lambda *a, **k: no_room() if next(calls) == allocation else join(*a, **k))
        with pytest.raises(torch.OutOfMemoryError):
            options.start(1, PENALISED)
    for row in (1, 2, 3):
        options.start(row, PENALISED)
    logits = torch.zeros(4, 50)
    options.edit(logits, np.arange(4), np.full(4, 10))
    assert logits[:, 3].tolist() == [-1.0] * 4


def test_a_row_that_could_not_start_leaves_no_penalty_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    options = RowOptions(4, 50, torch.device("cpu"))
    options.start(0, PENALISED)
    options.start(1, PENALISED)
    with monkeypatch.context() as patch:
        patch.setattr(options.counts, "_indices", no_room)
        with pytest.raises(torch.OutOfMemoryError):
            options.start(0, PENALISED)
    options.start(0, PLAIN)
    logits = torch.zeros(2, 50)
    options.counts.add(np.arange(2), torch.tensor([7, 7]))  # as in a step in which row 1 asks
    options.edit(logits, np.arange(2), np.array([10, 10]))
    assert not logits[0].any()
