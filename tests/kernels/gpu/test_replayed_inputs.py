"""Rows of recurrent layers on GPUs that absorb what an earlier step kept, and keep inputs of guesses themselves,
compute what the reference computes token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from tenuto.kernels import gated_delta, mamba, mamba2
from tenuto.kernels.gpu.recurrent import convolve_step, gated_delta_step, mamba2_step, mamba_step
from tenuto.kernels.recurrent import Slots, convolve
from tests.kernels.gpu.conftest import DEVICE

IDS, SLOTS, MOST = 7, 9, 3
MANY = SLOTS + IDS + 1
"""The number of slots: those that rows may read, and those that they may also write."""
Scan = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Outputs of the convolution and other inputs of one row, [1, length, n], and its state: the scan of the reference."""
Kernel = Callable[[torch.Tensor, torch.Tensor, Slots], torch.Tensor]


@dataclass(frozen=True)
class Row:
    """A row: the slot it reads, how many inputs it absorbs, its number of tokens, and whether it keeps theirs."""

    read: int
    absorbs: int
    count: int
    keeps: bool


rows = st.lists(
    st.builds(Row, st.integers(-1, SLOTS - 1), st.integers(0, MOST), st.integers(1, MOST), st.booleans())
    | st.builds(Row, st.integers(-1, SLOTS - 1), st.integers(0, MOST), st.integers(1, 9), st.just(False)),
    min_size=1,
    max_size=IDS,
)


class Layer:
    """A recurrent layer's states and kept inputs, all random, and the inputs of a step: those of its rows, of spare
    tokens, and of padding at any place among the rows."""

    def __init__(
        self, given: list[Row], channels: int, others: int, state: tuple[int, ...], kernel: int, seed: int
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.channels, self.kernel, self.dtype = channels, kernel, (torch.float16, torch.float32)[seed % 2]
        self.given: list[Row | None] = [*given]
        self.given.insert(seed % (len(given) + 1), None)
        self.ids = torch.randperm(IDS + 1, generator=self.generator).tolist()[: len(self.given)]
        counts = [row.count if row else 0 for row in self.given]
        self.firsts = [sum(counts[:i]) if row else 2**30 for i, row in enumerate(self.given)]
        self.inputs = self.random(sum(counts) + seed % 3, channels + others).to(self.dtype)
        self.convolution = self.random(MANY, channels, kernel - 1).to(self.dtype)
        self.state = self.random(MANY, *state)
        self.kept = self.random(IDS + 1, MOST, channels + others).to(self.dtype).float()
        self.weight, self.bias = self.random(channels, 1, kernel).to(self.dtype), self.random(channels).to(self.dtype)
        reads = [row.read for row in given]
        self.writes = [
            -1 if row is None else row.read if row.read >= 0 and reads.count(row.read) == 1 and i % 2 else SLOTS + i
            for i, row in enumerate(self.given)
        ]

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def check(self, kernel: Kernel, scan: Scan, *, kept: bool = True) -> None:
        """Runs the convolution and `kernel`, and compares outputs, states and kept inputs with those of `scan`."""
        parts = [each.clone().to(DEVICE) for each in (self.convolution, self.state, self.kept)]
        columns = [(row.absorbs * kept, int(row.keeps and kept)) if row else (0, 0) for row in self.given]
        counts = [row.count if row else 0 for row in self.given]
        spans = torch.tensor([self.ids, self.firsts, counts, *zip(*columns, strict=True)], dtype=torch.int32)
        reads = torch.tensor([row.read if row else 4 for row in self.given], device=DEVICE)
        slots = Slots(
            parts[0],
            parts[1],
            reads,
            torch.tensor(self.writes, device=DEVICE),
            spans.to(DEVICE),
            parts[2] if kept else None,
        )
        own, others = self.inputs.to(DEVICE).split([self.channels, self.inputs.shape[1] - self.channels], dim=1)
        convolved, others = convolve_step(own, others, self.weight.to(DEVICE), self.bias.to(DEVICE), slots)
        outputs = kernel(convolved, others, slots).flatten(1).cpu()
        wanted, after = torch.zeros_like(outputs), [self.convolution.clone(), self.state.clone(), self.kept.clone()]
        for row, ident, first, write in zip(self.given, self.ids, self.firsts, self.writes, strict=True):
            if row is not None:
                found = self.expected(row, ident, first, write, scan, after, kept=kept)
                wanted[first : first + row.count] = found
        bound = 5e-3 if self.dtype == torch.float16 else 5e-5
        torch.testing.assert_close(outputs, wanted, rtol=bound, atol=bound)
        for part, expected in zip(parts, after, strict=True):
            torch.testing.assert_close(part.cpu(), expected, rtol=bound, atol=bound)
        assert torch.equal(parts[2].cpu(), after[2]), "inputs are kept exactly"
        others_slots = [slot for slot in range(MANY) if slot not in self.writes]
        assert torch.equal(parts[1].cpu()[others_slots], self.state[others_slots]), "other slots are untouched"

    def expected(
        self, row: Row, ident: int, first: int, write: int, scan: Scan, after: list[torch.Tensor], *, kept: bool
    ) -> torch.Tensor:
        """Returns a row's outputs, and puts what it writes into `after`."""
        window = self.convolution[row.read][None].float() * (row.read >= 0)
        state = self.state[row.read][None] * (row.read >= 0)
        absorbed, own = self.kept[ident, : row.absorbs * kept], self.inputs[first : first + row.count].float()
        for inputs in (absorbed, own):
            if inputs is own and row.keeps and kept:
                after[0][write], after[1][write] = window[0].to(self.dtype), state[0]
                after[2][ident, : row.count] = own
            if len(inputs):
                found, window = convolve(
                    inputs[None, :, : self.channels], window, self.weight.float(), self.bias.float()
                )
                rounded = functional.silu(found).to(self.dtype).float()
                given, state = scan(rounded, inputs[None, :, self.channels :], state)
        if not (row.keeps and kept):
            after[0][write], after[1][write] = window[0].to(self.dtype), state[0]
        return given[0].flatten(1)


seeds = st.integers(0, 99)


def delta_parts(layer: Layer, key_heads: int, served: int, key_dim: int, value_dim: int) -> tuple[Kernel, Scan]:
    many, keys = key_heads * served, key_heads * key_dim
    log_rates, decay_bias = layer.random(many), layer.random(many)

    def kernel(convolved: torch.Tensor, others: torch.Tensor, slots: Slots) -> torch.Tensor:
        return gated_delta_step(convolved, others, log_rates.to(DEVICE), decay_bias.to(DEVICE), slots, key_heads)

    def scan(convolved: torch.Tensor, others: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = torch.split(convolved, [keys, keys, many * value_dim], dim=2)
        q, k = (part.unflatten(2, (key_heads, key_dim)).repeat_interleave(served, dim=2) for part in (q, k))
        q, k = (part * (part.square().sum(dim=3, keepdim=True) + 1e-6).rsqrt() for part in (q, k))
        strengths = others.unflatten(2, (key_heads, 2, served))
        decay = -log_rates.exp() * functional.softplus(strengths[..., 1, :].flatten(2) + decay_bias)
        beta = strengths[..., 0, :].flatten(2).sigmoid()
        return gated_delta.scan(q * key_dim**-0.5, k, v.unflatten(2, (many, value_dim)), decay, beta, state)

    return kernel, scan


@settings(max_examples=12, deadline=None)
@given(
    given=rows,
    heads=st.sampled_from([(1, 1), (2, 3)]),
    dims=st.sampled_from([(16, 8), (24, 40), (1, 1), (3, 130)]),
    kernel=st.sampled_from([2, 4, 6]),
    kept=st.booleans(),
    seed=seeds,
)
def test_gated_delta_nets(given, heads, dims, kernel, kept, seed) -> None:
    many, channels = heads[0] * heads[1], 2 * heads[0] * dims[0] + heads[0] * heads[1] * dims[1]
    layer = Layer(given, channels, 2 * many, (many, *dims), kernel, seed)
    layer.check(*delta_parts(layer, *heads, *dims), kept=kept)


@settings(max_examples=12, deadline=None)
@given(
    given=rows,
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2)]),
    dims=st.sampled_from([(8, 16), (24, 40), (1, 1), (100, 7)]),
    kernel=st.sampled_from([2, 4, 6]),
    kept=st.booleans(),
    seed=seeds,
)
def test_mamba2(given, heads, dims, kernel, kept, seed) -> None:
    (many, groups), (head_dim, size) = heads, dims
    parts = [many * head_dim, groups * size, groups * size]
    layer = Layer(given, sum(parts), many, (many, head_dim, size), kernel, seed)
    step_bias, log_rates, skip = (layer.random(many) for _ in range(3))
    limits = (0.1, 2.0)

    def run(convolved: torch.Tensor, others: torch.Tensor, slots: Slots) -> torch.Tensor:
        own_bias, own_rates, own_skip = (each.to(DEVICE) for each in (step_bias, log_rates, skip))
        return mamba2_step(convolved, others, own_bias, own_rates, own_skip, slots, 0.5, limits)

    def scan(convolved: torch.Tensor, others: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, b, c = (
            part.unflatten(2, (n, -1))
            for part, n in zip(torch.split(convolved, parts, dim=2), (many, groups, groups), strict=True)
        )
        steps = functional.softplus(others * 0.5 + step_bias).clamp(*limits)
        out, after = mamba2.scan(x, steps, -log_rates.exp(), b, c, state)
        return out + x * skip[:, None], after

    layer.check(run, scan, kept=kept)


@settings(max_examples=12, deadline=None)
@given(
    given=rows,
    channels=st.sampled_from([1, 48, 300]),
    size=st.sampled_from([1, 10, 16]),
    kernel=st.sampled_from([2, 4, 6]),
    kept=st.booleans(),
    seed=seeds,
)
def test_mamba(given, channels, size, kernel, kept, seed) -> None:
    layer = Layer(given, channels, 0, (channels, size), kernel, seed)
    select = layer.random(channels + 2 * size, channels) / channels
    step_bias, skip, log_rates = layer.random(channels), layer.random(channels), layer.random(channels, size)

    def selected(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.float() @ select.t().to(x.device)).split([channels, size, size], dim=-1)

    def run(convolved: torch.Tensor, _: torch.Tensor, slots: Slots) -> torch.Tensor:
        steps, b, c = selected(convolved)
        own = log_rates.to(DEVICE), skip.to(DEVICE)
        return mamba_step(convolved, steps, step_bias.to(DEVICE), b, c, *own, slots)

    def scan(x: torch.Tensor, _: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        steps, b, c = selected(x)
        out, after = mamba.scan(x, functional.softplus(steps + step_bias), -log_rates.exp(), b, c, state)
        return out + x * skip, after

    layer.check(run, scan, kept=kept)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_no_row_reads_may_hold_anything(bad: float) -> None:
    """Slots of fresh rows, kept inputs behind those that are absorbed, and tokens of no row."""
    layer = Layer([Row(-1, 1, 2, keeps=True), Row(2, 2, 1, keeps=False)], 40, 4, (2, 8, 12), 4, seed=2)
    layer.inputs[3:] = bad
    for part in (layer.convolution, layer.state):
        part[[slot for slot in range(len(part)) if slot != 2]] = bad
    absorbed = {ident: row.absorbs for row, ident in zip(layer.given, layer.ids, strict=True) if row}
    for ident in range(IDS + 1):
        layer.kept[ident, absorbed.get(ident, 0) :] = bad
    slots = Slots(
        layer.convolution.clone().to(DEVICE),
        layer.state.clone().to(DEVICE),
        torch.tensor([row.read if row else 4 for row in layer.given], device=DEVICE),
        torch.tensor(layer.writes, device=DEVICE),
        torch.tensor(
            [
                layer.ids,
                layer.firsts,
                [row.count if row else 0 for row in layer.given],
                [row.absorbs if row else 0 for row in layer.given],
                [int(row.keeps) if row else 0 for row in layer.given],
            ],
            dtype=torch.int32,
            device=DEVICE,
        ),
        layer.kept.to(DEVICE),
    )
    kernel, _ = delta_parts(layer, 1, 2, 8, 12)
    own, others = layer.inputs.to(DEVICE).split([40, 4], dim=1)
    convolved = convolve_step(own, others, layer.weight.to(DEVICE), layer.bias.to(DEVICE), slots)
    found = kernel(*convolved, slots)
    assert found.isfinite().all()
    assert not found[3:].any()
    written = [slot for slot in layer.writes if slot >= 0]
    assert slots.recurrent[written].isfinite().all()
    assert slots.convolution[written].isfinite().all()
