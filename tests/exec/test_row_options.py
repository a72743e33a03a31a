"""The options of rows survive a lack of memory at the wrong moment."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tenuto.base.plan import RowSampling
from tenuto.base.sampling import Sampling
from tenuto.exec import token_counts
from tenuto.exec.row_edits import HostEdits
from tenuto.exec.row_options import RowOptions
from tenuto.exec.token_counts import NO_GUESS
from tenuto.exec.torch_forward import TorchLogits

PLAIN = RowSampling(Sampling())
PENALISED = RowSampling(Sampling(presence_penalty=1.0), output=np.array([3], np.int32))


def no_room(*_: object) -> None:
    raise MemoryError("told to")


def test_a_row_that_could_not_start_leaves_no_penalty_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    options = RowOptions(4, HostEdits(50))
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
    options.edits.add(np.arange(3), np.array([7, 7, 3]), np.full(3, NO_GUESS))
    options.edits.edit(logits, np.arange(3), np.full(3, 10), np.full(3, NO_GUESS))
    assert not logits.host()[0].any()
    assert logits.host()[1].nonzero()[0].tolist() == [3, 7]
    assert logits.host()[2].nonzero()[0].tolist() == [3]


def test_steps_without_a_row_that_asks_are_plain() -> None:
    options = RowOptions(4, HostEdits(50))
    options.start(1, PENALISED)
    options.start(2, RowSampling(Sampling(), top=0))
    assert options.plain(np.array([0, 3]))
    assert not options.plain(np.array([0, 1]))
    assert not options.plain(np.array([2]))
    assert options.edited(np.array([1, 2]))
    assert not options.edited(np.array([0, 2]))
    for row in (1, 2):
        options.start(row, PLAIN)
    assert options.plain(np.arange(4))
    assert not options.edited(np.arange(4))


def test_the_counts_of_a_row_grow_beyond_their_first_size() -> None:
    options, tokens = RowOptions(1, HostEdits(500)), np.random.default_rng(0).integers(0, 500, 300)
    asked = Sampling(frequency_penalty=0.5)
    options.start(0, RowSampling(asked, output=np.array([], np.int32)))
    for token in tokens:
        options.edits.add(np.array([0]), np.array([token]), np.array([NO_GUESS]))
    logits = TorchLogits(torch.zeros(1, 500))
    options.edits.edit(logits, np.array([0]), np.array([300]), np.array([NO_GUESS]))
    assert np.array_equal(logits.host()[0], -0.5 * np.bincount(tokens, minlength=500).astype(np.float32))


@given(st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=5), max_size=4), st.integers(0, 5))
def test_penalties_with_guesses_are_those_without(steps: list[list[tuple[int, int]]], first: int) -> None:
    """Each step samples `first`, and after each guess the other token of the pair."""
    asked = Sampling(repetition_penalty=1.5, presence_penalty=0.25, frequency_penalty=0.5)
    new = RowSampling(asked, np.array([1], np.int32), np.array([], np.int32))
    plain, guessing = RowOptions(1, HostEdits(8)), RowOptions(1, HostEdits(8))
    plain.start(0, new)
    guessing.start(0, new)
    for step in steps:
        guesses, samples = np.array([NO_GUESS, *(guess for guess, _ in step)]), [first, *(token for _, token in step)]
        rows, positions = np.zeros(len(samples), np.int64), np.arange(len(samples))
        logits = TorchLogits(torch.ones(len(samples), 8))
        guessing.edits.edit(logits, rows, positions, guesses)
        guessing.edits.add(rows, np.array(samples), guesses)
        for place, token in enumerate(samples):
            if place and guesses[place] != samples[place - 1]:
                break
            alone = TorchLogits(torch.ones(1, 8))
            plain.edits.edit(alone, rows[:1], positions[place : place + 1], np.array([NO_GUESS]))
            plain.edits.add(rows[:1], np.array([token]), np.array([NO_GUESS]))
            assert np.array_equal(logits.host()[place], alone.host()[0])
