"""Decode steps of recurrent layers on GPUs compute what the reference computes, and write one slot per row."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from tenuto.kernels import gated_delta, mamba, mamba2
from tenuto.kernels.gpu.recurrent import convolve_step, gated_delta_step, mamba2_step, mamba_step
from tenuto.kernels.recurrent import Slots, convolve
from tests.kernels.gpu.conftest import DEVICE, TYPES, bound_of

SLOTS = 9
rows = st.lists(st.integers(-1, SLOTS - 1), min_size=1, max_size=5)
"""The slot that each row reads."""
Advance = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def slots_of(state: torch.Tensor, reads: list[int], writes: list[int]) -> Slots:
    """Returns slots on the device; `state` stands for either of the two states that a layer has."""
    return Slots(state, state, torch.tensor(reads, device=DEVICE), torch.tensor(writes, device=DEVICE))


class RandomSlots:
    """Slots with random states, and rows that read some of them. A row writes the slot it reads if no other does, or a
    fresh one; the last row is padding."""

    def __init__(self, reads: list[int], shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.rows = len(reads) + 1
        self.state = self.random(SLOTS + len(reads), *shape).to(dtype)
        self.given = [*reads, 3]
        self.reads = torch.tensor(self.given, dtype=torch.int32)
        alone = [slot >= 0 and reads.count(slot) == 1 and (i + seed) % 2 == 0 for i, slot in enumerate(reads)]
        self.writes = [slot if own else SLOTS + i for i, (slot, own) in enumerate(zip(reads, alone, strict=True))]
        self.writes.append(-1)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def check(self, step: Callable[..., torch.Tensor], expected: Advance) -> None:
        """Runs `step(slots)` and compares with `expected(states before)`: outputs and states after."""
        before = self.state.clone()
        given = self.state.to(DEVICE)
        found = step(slots_of(given, self.reads.tolist(), self.writes)).cpu()
        states = before[self.reads.clamp(min=0).long()].float()
        states[self.reads < 0] = 0
        outputs, after = expected(states)
        bound = max(bound_of(each, 3e-3, 2e-5) for each in (self.state.dtype, found.dtype))
        torch.testing.assert_close(found[:-1].float(), outputs[:-1].float(), rtol=bound, atol=bound)
        assert not found[-1].any(), "padding is zero"
        wanted = before.clone()
        wanted[self.writes[:-1]] = after[:-1].to(before.dtype)
        torch.testing.assert_close(given.cpu(), wanted, rtol=bound, atol=bound)
        kept = [i for i in range(len(before)) if i not in self.writes]
        assert torch.equal(given.cpu()[kept], before[kept]), "other slots are untouched"


@settings(max_examples=12, deadline=None)
@given(
    reads=rows,
    channels=st.sampled_from([1, 7, 256, 300]),
    kernel=st.sampled_from([2, 3, 4, 5]),
    biased=st.booleans(),
    dtype=st.sampled_from(TYPES),
    kept=st.sampled_from(TYPES),
    seed=st.integers(0, 99),
)
def test_convolutions(reads, channels, kernel, biased, dtype, kept, seed) -> None:
    slots = RandomSlots(reads, (channels, kernel - 1), kept, seed)
    inputs = slots.random(slots.rows, channels + 3).to(dtype)[:, :channels]
    weight = slots.random(channels, 1, kernel).to(dtype)
    bias = slots.random(channels).to(dtype) if biased else None

    def expected(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = None if bias is None else bias.float()
        out, after = convolve(inputs.float()[:, None], states, weight.float(), wide)
        return functional.silu(out[:, 0]), after

    def step(given: Slots) -> torch.Tensor:
        own = None if bias is None else bias.to(DEVICE)
        others = inputs.to(DEVICE)[:, :0]
        return convolve_step(inputs.to(DEVICE), others, weight.to(DEVICE), own, given)[0]

    slots.check(step, expected)


@settings(max_examples=12, deadline=None)
@given(
    reads=rows,
    heads=st.sampled_from([(1, 1), (2, 1), (2, 3)]),
    dims=st.sampled_from([(128, 128), (16, 8), (24, 40), (1, 1), (3, 200)]),
    dtype=st.sampled_from(TYPES),
    kept=st.sampled_from(TYPES),
    seed=st.integers(0, 99),
)
def test_the_gated_delta_rule(reads, heads, dims, dtype, kept, seed) -> None:
    (key_heads, served), (key_dim, value_dim) = heads, dims
    many = key_heads * served
    slots = RandomSlots(reads, (many, key_dim, value_dim), kept, seed)
    keys = key_heads * key_dim
    convolved = slots.random(slots.rows, 2 * keys + many * value_dim).to(dtype)
    strengths = (8 * slots.random(slots.rows, key_heads, 2, served)).to(dtype)
    log_rates, decay_bias = slots.random(many), slots.random(many)

    def expected(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = torch.split(convolved.float(), [keys, keys, many * value_dim], dim=1)
        q, k = (part.view(slots.rows, key_heads, key_dim).repeat_interleave(served, dim=1) for part in (q, k))
        q, k = (part * (part.square().sum(dim=2, keepdim=True) + 1e-6).rsqrt() for part in (q, k))
        beta = strengths[:, :, 0].float().flatten(1).sigmoid()
        decay = -log_rates.exp() * functional.softplus(strengths[:, :, 1].float().flatten(1) + decay_bias)
        q, k, v, decay, beta = (
            part[:, None] for part in (q * key_dim**-0.5, k, v.view(slots.rows, many, value_dim), decay, beta)
        )
        out, after = gated_delta.scan(q, k, v, decay, beta, states)
        return out[:, 0], after

    a, b, c, d = (part.to(DEVICE) for part in (convolved, strengths.flatten(1), log_rates, decay_bias))
    slots.check(lambda given: gated_delta_step(a, b, c, d, given, key_heads), expected)


@settings(max_examples=12, deadline=None)
@given(
    reads=rows,
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2)]),
    dims=st.sampled_from([(64, 128), (8, 16), (24, 40), (1, 1), (100, 7)]),
    limits=st.sampled_from([(0.0, float("inf")), (0.5, 1.0)]),
    scale=st.sampled_from([1.0, 0.3]),
    dtype=st.sampled_from(TYPES),
    kept=st.sampled_from(TYPES),
    seed=st.integers(0, 99),
)
def test_mamba2(reads, heads, dims, limits, scale, dtype, kept, seed) -> None:
    (many, groups), (head_dim, size) = heads, dims
    slots = RandomSlots(reads, (many, head_dim, size), kept, seed)
    convolved = slots.random(slots.rows, many * head_dim + 2 * groups * size).to(dtype)
    steps = (4 * slots.random(slots.rows, 2 * many)).to(dtype)[:, many:]
    step_bias, log_rates, skip = (slots.random(many) for _ in range(3))

    def expected(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, b, c = torch.split(convolved.float(), [many * head_dim, groups * size, groups * size], dim=1)
        x = x.view(slots.rows, 1, many, head_dim)
        b, c = (part.view(slots.rows, 1, groups, size) for part in (b, c))
        wanted = functional.softplus(steps.float() * scale + step_bias).clamp(*limits)
        out, after = mamba2.scan(x, wanted[:, None], -log_rates.exp(), b, c, states)
        return (out + x * skip[:, None])[:, 0], after

    def step(given: Slots) -> torch.Tensor:
        a, b, c, d, e = (part.to(DEVICE) for part in (convolved, steps, step_bias, log_rates, skip))
        return mamba2_step(a, b, c, d, e, given, scale, limits)

    slots.check(step, expected)


@settings(max_examples=12, deadline=None)
@given(
    reads=rows,
    channels=st.sampled_from([1, 48, 300]),
    size=st.sampled_from([1, 10, 16]),
    dtype=st.sampled_from(TYPES),
    kept=st.sampled_from(TYPES),
    seed=st.integers(0, 99),
)
def test_mamba(reads, channels, size, dtype, kept, seed) -> None:
    slots = RandomSlots(reads, (channels, size), kept, seed)
    x, steps = (slots.random(slots.rows, channels).to(dtype) for _ in range(2))
    b, c = slots.random(slots.rows, 2 * size).to(dtype).chunk(2, dim=1)
    step_bias, skip, log_rates = slots.random(channels), slots.random(channels), slots.random(channels, size)

    def expected(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wanted = functional.softplus(steps.float() + step_bias)
        tokens = x.float()[:, None], wanted[:, None]
        out, after = mamba.scan(*tokens, -log_rates.exp(), b.float()[:, None], c.float()[:, None], states)
        return out[:, 0] + x.float() * skip, after

    def step(given: Slots) -> torch.Tensor:
        one, two, three, four, five = (part.to(DEVICE) for part in (x, steps, step_bias, b, c))
        return mamba_step(one, two, three, four, five, log_rates.to(DEVICE), skip.to(DEVICE), given)

    slots.check(step, expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_the_state_that_a_fresh_row_does_not_read_and_padding_may_hold_anything(bad: float) -> None:
    state = torch.full((3, 2, 4, 4), bad, device=DEVICE)
    convolved = torch.ones(2, 24, device=DEVICE)
    convolved[1] = bad
    strengths, rates = torch.ones(2, 4, device=DEVICE), torch.ones(2, device=DEVICE)
    strengths[1] = bad
    found = gated_delta_step(convolved, strengths, rates, rates, slots_of(state, [-1, 0], [1, -1]), key_heads=2)
    assert found[0].isfinite().all()
    assert not found[1].any()
    assert state[1].isfinite().all()
    assert not state[[0, 2]].isfinite().any()
