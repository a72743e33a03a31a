"""Adapters on a GPU change projections as PyTorch changes them, also in captured steps."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.gpu.models import Eager
from bench.random_models import attention, model, random_adapter
from tenuto.base.sampling import GREEDY, Sampling
from tenuto.exec.gpu.adapters import AdapterTable
from tenuto.exec.gpu.forward import GpuForward
from tenuto.exec.torch_forward import TorchForward
from tenuto.kernels.gpu import adapters
from tenuto.kernels.gpu.fused import FUSED
from tenuto.models.adapter import Adapter, projections
from tenuto.models.block import AdaptedTokens
from tenuto.models.decoder import Decoder
from tests.exec.driver import Work
from tests.exec.gpu.conftest import DEVICE, TYPES, bound_of
from tests.exec.gpu.queue import HostQueue
from tests.exec.gpu.steps import KNOWN, P, carried_out

SMALL = 101
WIDE = model(1, 40, [attention(3, 1, 50)], 140, SMALL, 128)
NARROW = model(1, 32, [attention(2, 1, 16)], 48, SMALL, 128)
PRODUCTS = [
    [f"model.layers.0.{name}_proj" for name in names]
    for names in (
        ("self_attn.q", "self_attn.k", "self_attn.v"),
        ("self_attn.o",),
        ("mlp.gate", "mlp.up"),
        ("mlp.down",),
    )
]


def changes(adapter: Adapter) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Returns an adapter's changes on the device."""
    return {
        name: (torch.from_numpy(one.down).to(DEVICE), torch.from_numpy(one.up * one.scale).to(DEVICE))
        for name, one in adapter.changes.items()
    }


@settings(max_examples=12, deadline=None)
@given(
    slots=st.lists(st.sampled_from([0, 1, 1, 2, adapters.SLOTS - 1]), min_size=1, max_size=40),
    ranks=st.tuples(*[st.sampled_from([1, 7, 16, 40, 130])] * 3),
    names=st.sampled_from(PRODUCTS),
    dtype=st.sampled_from(TYPES),
)
def test_projections_are_changed_by_each_token_s_adapter(slots, ranks, names, dtype) -> None:
    table, sizes = AdapterTable(WIDE, DEVICE), projections(WIDE)
    own = {
        slot: changes(random_adapter(WIDE, rank, slot, without="k_proj" if slot == 2 else ""))
        for slot, rank in zip((1, 2, adapters.SLOTS - 1), ranks, strict=True)
    }
    for slot, each in own.items():
        table.set(slot, changes(random_adapter(WIDE, 3, 9)))
        table.set(slot, each)
    generator, parts = torch.Generator().manual_seed(0), {name: sizes[name][0] for name in names}
    x = torch.randn(len(slots), sizes[names[0]][1] + 3, generator=generator).to(dtype).to(DEVICE)[:, :-3]
    found = torch.randn(len(slots), sum(parts.values()), generator=generator).to(dtype).to(DEVICE)
    expected = found.clone()
    for slot, each in own.items():
        tokens = torch.tensor([i for i, one in enumerate(slots) if one == slot], dtype=torch.int64, device=DEVICE)
        AdaptedTokens(tokens, each).change(expected, x, parts)
    table.step(torch.tensor(slots, device=DEVICE)).change(found, x, parts)
    bound = bound_of(dtype, 2e-3, 1e-5)
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound * max(ranks) ** 0.5 * 20)


def test_projections_that_no_adapter_changes_stay() -> None:
    step = AdapterTable(WIDE, DEVICE).step(torch.ones(4, dtype=torch.int64, device=DEVICE))
    projected = torch.ones(4, 6, device=DEVICE)
    step.change(projected, torch.ones(4, 5, device=DEVICE), {"model.layers.0.mlp.shared_expert.down_proj": 6})
    step.change(projected, torch.ones(4, 140, device=DEVICE), {"model.layers.0.mlp.down_proj": 6})
    assert (projected == 1).all()


def prompt(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, SMALL, count).tolist()


STEPS: list[list[Work]] = [
    [(row, prompt(row, 2 + row % 2), 1) for row in range(4)],
    [(0, [P], 1)],  # without an adapter
    [(2, [KNOWN], 1), (0, [P], 1), (3, [KNOWN, 7], 1)],
    [(2, [P], 1), (0, [P], 1)],
]
SLOTS = (0, 1, 2, 1)


@pytest.mark.parametrize("too_many", [False, True])
def test_captured_steps_have_each_row_s_adapter(too_many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if too_many:
        monkeypatch.setattr("tenuto.exec.gpu.forward.SLOTS", 2)
    queue = HostQueue()
    loaded = [random_adapter(NARROW, 4, seed) for seed in (1, 2)]
    sampling = [GREEDY, Sampling(temperature=0.7, seed=1), GREEDY, GREEDY]

    def sampled(kind: type[TorchForward], *adapted: Any) -> list[list[int]]:
        torch.manual_seed(0)
        fused = None if kind is TorchForward else FUSED
        with torch.inference_mode():
            decoder = Decoder(NARROW, None, DEVICE, torch.float32, fused)
        forward = kind(decoder, 32) if kind is TorchForward else kind(decoder, 32, queue)  # type: ignore[call-arg]
        return [each.tokens.tolist() for each in carried_out(forward, STEPS, sampling, 1, *adapted)]

    expected = sampled(TorchForward, loaded, SLOTS)
    assert sampled(TorchForward) != expected
    assert sampled(Eager, loaded, SLOTS) == expected
    assert queue.runs == 0
    assert sampled(GpuForward, loaded, SLOTS) == expected
    assert queue.runs == (1 if too_many else len(STEPS))
