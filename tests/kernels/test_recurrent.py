"""Scans equal their recurrences computed token by token in float64, however rows are cut and grouped."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.base.plan import NO_SLOT
from tenuto.kernels import gated_delta, mamba2
from tenuto.kernels.elements import Element, StatePart
from tenuto.kernels.recurrent import SCAN_BLOCK, StateSlots, convolve, pieces

ROWS, HEADS, HEAD_DIM, SIZE = 2, 4, 5, 6
LENGTH = 2 * SCAN_BLOCK + 30

Tensors = tuple[torch.Tensor, ...]
Scan = Callable[[Tensors, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def random(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def mamba2_inputs(seed: int, steepest: float = 3.0) -> tuple[Scan, Tensors, torch.Tensor]:
    """Returns a scan of (x, steps, b, c), its inputs over `LENGTH` tokens, and the state before."""
    generator = torch.Generator().manual_seed(seed)
    rates = -torch.rand(HEADS, generator=generator) * steepest
    x = random(generator, ROWS, LENGTH, HEADS, HEAD_DIM)
    b, c = (random(generator, ROWS, LENGTH, 2, SIZE) for _ in "bc")
    steps = torch.rand((ROWS, LENGTH, HEADS), generator=generator)
    state = random(generator, ROWS, HEADS, HEAD_DIM, SIZE)
    return (lambda i, s: mamba2.scan(i[0], i[1], rates.to(s), i[2], i[3], s)), (x, steps, b, c), state


def delta_inputs(seed: int, steepest: float = 3.0) -> tuple[Scan, Tensors, torch.Tensor]:
    """Returns a scan of (q, k, v, decay, beta), its inputs over `LENGTH` tokens, and the state before."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.nn.functional.normalize(random(generator, ROWS, LENGTH, HEADS, SIZE), dim=-1) for _ in "qk")
    v = random(generator, ROWS, LENGTH, HEADS, HEAD_DIM)
    decay = -torch.rand((ROWS, LENGTH, HEADS), generator=generator) * steepest
    beta = torch.rand((ROWS, LENGTH, HEADS), generator=generator)
    state = random(generator, ROWS, HEADS, SIZE, HEAD_DIM)
    return (lambda i, s: gated_delta.scan(i[0], i[1], i[2], i[3], i[4], s)), (q, k, v, decay, beta), state


def mamba2_by_token(seed: int, steepest: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rates = (-torch.rand(HEADS, generator=generator) * steepest).double()
    _, inputs, start = mamba2_inputs(seed, steepest)
    x, steps, b, c = (part.double() for part in inputs)
    b, c = (part.repeat_interleave(HEADS // 2, dim=2) for part in (b, c))
    state, found = start.double(), []
    for t in range(LENGTH):
        entering = steps[:, t, :, None, None] * x[:, t, :, :, None] * b[:, t, :, None]
        state = state * (steps[:, t] * rates).exp()[..., None, None] + entering
        found.append((state * c[:, t, :, None]).sum(-1))
    return torch.stack(found, dim=1), state


def delta_by_token(seed: int, steepest: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    _, inputs, start = delta_inputs(seed, steepest)
    q, k, v, decay, beta = (part.double() for part in inputs)
    state, found = start.double(), []
    for t in range(LENGTH):
        state = state * decay[:, t].exp()[..., None, None]
        written = beta[:, t, :, None] * (v[:, t] - (state * k[:, t, ..., None]).sum(2))
        state = state + k[:, t, ..., None] * written[:, :, None]
        found.append((state * q[:, t, ..., None]).sum(2))
    return torch.stack(found, dim=1), state


BOTH = [(mamba2_inputs, mamba2_by_token), (delta_inputs, delta_by_token)]


@pytest.mark.parametrize(("inputs_of", "by_token"), BOTH, ids=["mamba2", "gated delta"])
@settings(max_examples=15, deadline=None)
@given(cuts=st.sets(st.sampled_from([1, 2, 3, 50, 63, 64, 65, 127, 128, 129, LENGTH - 1])), seed=st.integers(0, 9))
def test_a_scan_cut_anywhere_equals_the_recurrence(
    inputs_of: Callable[..., tuple[Scan, Tensors, torch.Tensor]],
    by_token: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    cuts: set[int],
    seed: int,
) -> None:
    scan, inputs, state = inputs_of(seed)
    found = []
    for first, last in zip([0, *sorted(cuts)], [*sorted(cuts), LENGTH], strict=True):
        given, state = scan(tuple(part[:, first:last] for part in inputs), state)
        found.append(given)
    expected, end = by_token(seed)
    torch.testing.assert_close(torch.cat(found, dim=1).double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.double(), end, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("inputs_of", "by_token"), BOTH, ids=["mamba2", "gated delta"])
def test_states_that_fade_at_once_do_not_overflow(
    inputs_of: Callable[..., tuple[Scan, Tensors, torch.Tensor]],
    by_token: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> None:
    scan, inputs, state = inputs_of(1, steepest=2000.0)
    given, end = scan(inputs, state)
    expected, expected_end = by_token(1, steepest=2000.0)
    torch.testing.assert_close(given.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(end.double(), expected_end, rtol=1e-4, atol=1e-4)


@settings(deadline=None)
@given(kernel=st.integers(2, 5), cuts=st.lists(st.integers(1, 7), min_size=1, max_size=6), biased=st.booleans())
def test_a_convolution_cut_anywhere_equals_that_of_the_whole(kernel: int, cuts: list[int], biased: bool) -> None:
    generator, length, channels = torch.Generator().manual_seed(3), sum(cuts), 3
    x, weight = random(generator, 2, length, channels), random(generator, channels, 1, kernel)
    bias = random(generator, channels) if biased else None
    before, found, first = torch.zeros(2, channels, kernel - 1), [], 0
    for count in cuts:
        out, before = convolve(x[:, first : first + count], before, weight, bias)
        found.append(out)
        first += count
    padded = torch.nn.functional.pad(x, (0, 0, kernel - 1, 0))
    expected = torch.stack([(padded[:, t : t + kernel].mT * weight[:, 0]).sum(-1) for t in range(length)], dim=1)
    torch.testing.assert_close(torch.cat(found, dim=1), expected + (0 if bias is None else bias))
    assert torch.equal(before, padded[:, length:].mT)


def test_rows_of_equal_length_form_one_piece_and_every_token_is_in_one() -> None:
    found = pieces(np.array([1, 4, 1, 2, 4], np.int32), torch.device("cpu"))
    assert [piece.rows.tolist() for piece in found] == [[0, 2], [3], [1, 4]]
    assert [piece.tokens.tolist() for piece in found] == [[[0], [5]], [[6, 7]], [[1, 2, 3, 4], [8, 9, 10, 11]]]


def test_a_slot_is_read_as_written_and_an_absent_slot_is_zero() -> None:
    slots = StateSlots(
        2, 4, [StatePart((3,), Element.FLOAT32), StatePart((2, 2), Element.FLOAT32)], torch.device("cpu")
    )
    for part in slots.parts:
        part.fill_(torch.nan)
    states = torch.randn(2, 3), torch.randn(2, 2, 2)
    slots.write(1, torch.tensor([3, 0]), states)
    read = slots.read(1, torch.tensor([0, NO_SLOT, 3]))
    for part, state in zip(read, states, strict=True):
        assert torch.equal(part[[2, 0]], state)
        assert torch.equal(part[1], torch.zeros_like(part[1]))
    assert all(part[1, [1, 2]].isnan().all() and part[0].isnan().all() for part in slots.parts)
