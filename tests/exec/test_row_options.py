"""The options of rows survive a lack of memory at the wrong moment."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tenuto.base.plan import RowSampling
from tenuto.base.sampling import Sampling
from tenuto.exec import token_counts
from tenuto.exec.row_options import RowOptions
from tenuto.exec.torch_forward import TorchLogits

PLAIN = RowSampling(Sampling())
PENALISED = RowSampling(Sampling(presence_penalty=1.0), output=np.array([3], np.int32))


def no_room(*_: object) -> None:
    raise MemoryError("told to")


def test_a_row_that_could_not_start_leaves_no_penalty_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    options = RowOptions(4, 50)
    options.start(0, PENALISED)
    options.start(1, PENALISED)
    with monkeypatch.context() as patch:
        patch.setattr(token_counts, "SeenTokens", no_room)
        for row in (0, 2):
            with pytest.raises(MemoryError):
                options.start(row, PENALISED)
    options.start(0, PLAIN)
    options.start(2, PENALISED)
    logits = TorchLogits(torch.zeros(3, 50))
    options.counts.add(np.arange(3), np.array([7, 7, 3]))
    options.edit(logits, np.arange(3), np.full(3, 10))
    assert not logits.host()[0].any()
    assert logits.host()[1].nonzero()[0].tolist() == [3, 7]
    assert logits.host()[2].nonzero()[0].tolist() == [3]


def test_the_counts_of_a_row_grow_beyond_their_first_size() -> None:
    options, tokens = RowOptions(1, 500), np.random.default_rng(0).integers(0, 500, 300)
    asked = Sampling(frequency_penalty=0.5)
    options.start(0, RowSampling(asked, output=np.array([], np.int32)))
    for token in tokens:
        options.counts.add(np.array([0]), np.array([token]))
    logits = TorchLogits(torch.zeros(1, 500))
    options.edit(logits, np.array([0]), np.array([300]))
    assert np.array_equal(logits.host()[0], -0.5 * np.bincount(tokens, minlength=500).astype(np.float32))
