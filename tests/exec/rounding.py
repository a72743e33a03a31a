"""PyTorch with the rounding of the native kernels: a reference whose error is the largest that their arithmetic may
have.

A product rounds its inputs by the format of its weights: quantized weights take inputs of 8 bits in blocks of 32, or of
15 bits where one value is far above the rest of its block, and bfloat16 weights take bfloat16; with AMX, steps of five
rows or more multiply bfloat16 unless weights are float32. Keys and values are kept in bfloat16 (or in bytes,
`test_kv_cache_dtype`). With weights in `KEPT`, variants in `FLOAT32` round nothing else, so they agree with this
reference to within float32, except where a value is so near the middle between two quants that it is rounded the other
way, which later tokens see: texts are short, so that most tokens have few before them. Other variants also round
queries and softmax weights to bfloat16, and other weights are rounded themselves (scales of Q4_K, Q5_K and Q6_K to
float16), which moves many values to another quant: that error is another draw of about the same size.
"""

import statistics
from collections.abc import Callable
from functools import partial

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch.nn import functional

from tenuto.exec.torch_forward import TorchForward
from tenuto.exec.torch_memory import PageMemory
from tenuto.kernels.native.formats import FORMATS
from tenuto.kernels.paged import PagedKV
from tenuto.models import attention, decoder, experts, gated_delta, mamba2, mlp
from tenuto.models.decoder import Decoder
from tests.exec.kernels import FLOAT32

UNEVEN = 23
"""`OUTLIER_RATIO` of `matmul_input.h`: blocks whose highest square exceeds this multiple of the mean square have inputs
of 15 bits."""
ROUTERS = 16
"""Products with fewer outputs choose experts: their weights and inputs stay float32."""
KEPT = (*FORMATS.keys() - {Kind.Q4_K, Kind.Q5_K, Kind.Q6_K}, Kind.F16, Kind.F32)
"""Weights that the kernels keep bit for bit, and multiply with quants or float32."""
FLIPPED = 1e-3
"""The relative difference of logits above which a token has a value that went to another quant."""
ANOTHER_DRAW = 1.5
"""The factor below which errors of two independent roundings of equal size differ on average."""

Round = Callable[[torch.Tensor], torch.Tensor]


def to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def to_quants(x: torch.Tensor) -> torch.Tensor:
    """Rounds float32 [rows, inputs] to the nearest of 127 steps of each block's highest value, or of 127 * 128
    steps."""
    blocks = functional.pad(x, (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
    highest = blocks.abs().amax(dim=-1, keepdim=True)
    uneven = highest.square() * 32 > UNEVEN * blocks.square().sum(dim=-1, keepdim=True)
    steps = torch.where(uneven, 127.0 * 128.0, 127.0)
    inverse = torch.where(highest > 0, steps / highest, 0)
    return ((blocks * inverse).round() * (highest / steps)).flatten(-2)[..., : x.shape[-1]]


class RoundedForward(TorchForward):
    """Keeps keys and values as rounded by `keys` and `values`."""

    def __init__(
        self, decoder: Decoder, page_size: int, keys: Round = to_bfloat16, values: Round = to_bfloat16
    ) -> None:
        super().__init__(decoder, page_size)
        self._keys, self._values = keys, values

    def prepare(self, units: tuple[int, ...], rows: int, most_kept: int = 0) -> None:
        super().prepare(units, rows, most_kept)
        for memory in self.memories.pages.values():
            assert isinstance(memory, PageMemory)
            memory.kv.write = partial(self._write, memory.kv)  # type: ignore[method-assign]

    def _write(self, kv: PagedKV, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        type(kv).write(kv, layer, slots, self._keys(k), self._values(v))


def round_products(
    monkeypatch: pytest.MonkeyPatch, variant: str, kind: Kind, order: torch.Tensor | None = None
) -> None:
    """Makes products of plain PyTorch round like `variant` does with weights of this kind and at least five rows.
    `order`: that of the inputs whose neighbours are rounded together, int64 [inputs]."""
    exact = kind is Kind.F32 or (kind is Kind.F16 and variant != "amx")
    in_bfloat16 = kind is Kind.BF16 or variant == "amx"

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if exact or len(weight) < ROUTERS:
            return functional.linear(x, weight, bias)
        if in_bfloat16:
            return functional.linear(to_bfloat16(x), to_bfloat16(weight), bias)
        if order is not None:
            x, weight = x[..., order], weight[:, order]
        return functional.linear(to_quants(x), weight, bias)

    for module in (attention, decoder, experts, gated_delta, mamba2, mlp):
        monkeypatch.setattr(module, "linear", linear)


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Returns the mean distance, relative to the mean of `theirs`."""
    return ((ours - theirs).abs().mean() / theirs.abs().mean()).item()


def assert_rounded_as_said(
    found: torch.Tensor, rounded: torch.Tensor, exact: torch.Tensor, variant: str, kind: Kind
) -> None:
    """Compares a variant's logits with PyTorch's, with and without the same rounding, all float32 [tokens, vocab]."""
    if variant in FLOAT32 and kind in KEPT:
        differ = [relative_error(mine, theirs) for mine, theirs in zip(found, rounded, strict=True)]
        assert statistics.median(differ) < FLIPPED, differ
    assert relative_error(found, exact) < ANOTHER_DRAW * relative_error(rounded, exact)
