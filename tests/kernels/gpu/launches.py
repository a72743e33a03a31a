"""Launches of the kernels for GPUs with the shapes of real models, which `compiled` compiles.

A launch is a call of a public function with tensors of zeros on the host, whose shapes, types and alignment are those
of a GPU's; nothing is computed. To add a kernel, add a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tenuto.base.sampling import MAX_LOGPROBS
from tenuto.kernels.gpu import attention, quantized
from tenuto.kernels.gpu.activations import gated
from tenuto.kernels.gpu.adapters import FIELDS, SLOTS, by_adapter, change_projections
from tenuto.kernels.gpu.edits import PENALTIES, EditedRows, count, edit
from tenuto.kernels.gpu.experts import mix_experts
from tenuto.kernels.gpu.linear import linear
from tenuto.kernels.gpu.norms import add_rms_norm, gated_norm, rms_norm
from tenuto.kernels.gpu.recurrent import convolve_step, gated_delta_step, mamba2_step, mamba_step
from tenuto.kernels.gpu.sampling import sample
from tenuto.kernels.gpu.steps import (
    OWN,
    Entries,
    adapters_of,
    allow,
    begin,
    change,
    finish,
    report,
    select,
    single,
    spread,
    trace,
)
from tenuto.kernels.linear import Matrix
from tenuto.kernels.quantized import Numbers, Quantized
from tenuto.kernels.recurrent import Slots
from tenuto.models.block import GATES, UNGATED


@dataclass(frozen=True, slots=True)
class Launch:
    """`products`: the names of the Triton functions that must use tensor cores and asynchronous copies."""

    call: Callable[[], object]
    products: frozenset[str] = frozenset()


def attending(
    dtype: torch.dtype,
    head_dim: int,
    heads: int,
    kv_heads: int,
    window: int = 0,
    cap: float = 0.0,
    *,
    more: bool = False,
) -> None:
    """Appends, decodes and prefills; with `more`, with norms and sinks."""
    pages = torch.zeros(8, 2, kv_heads, 32, head_dim, dtype=dtype)
    table, tiles = torch.zeros(16, 1024, dtype=torch.int32), torch.zeros(8, 4, dtype=torch.int32)
    rows = torch.zeros(8, dtype=torch.int32)
    q, k, v = torch.zeros(8, heads + 2 * kv_heads, head_dim, dtype=dtype).split([heads, kv_heads, kv_heads], dim=1)
    rotation = (torch.zeros(8, head_dim // 2), torch.zeros(8, head_dim // 2))
    norms = [torch.zeros(head_dim), torch.zeros(head_dim)] if more else None
    sinks = torch.zeros(heads) if more else None
    queries = attention.append(q, k, v, table, rows, rows, pages, rotation, norms, 1e-6)
    for many in (8, 256):  # many rows have fewer splits
        each, some = torch.zeros(many, heads, head_dim, dtype=dtype), torch.zeros(many, dtype=torch.int32)
        done = attention.counters(many, kv_heads, each.device)
        attention.decode(each, table, some, some, pages, done, 0.1, window, sinks, cap)
        attention.decode(each, table, some, some, pages, done, 0.1, window, sinks, cap, each, some)
    attention.prefill(queries, tiles, table, pages, 0.1, window, sinks, cap)


def normalising(dtype: torch.dtype, width: int) -> None:
    x, weight = torch.zeros(8, width, dtype=dtype), torch.zeros(width)
    rms_norm(x, weight, 1e-6)
    add_rms_norm(x, x, 1.0, weight, 1e-6)


def activating(dtype: torch.dtype, width: int) -> None:
    for activation in (*GATES, *UNGATED):
        gated(activation, torch.zeros(8, 2 * width, dtype=dtype))


def sampling(vocab: int) -> None:
    floats = [torch.zeros(8, dtype=torch.float64) for _ in range(4)]
    sample(torch.zeros(8, vocab), floats[0], torch.zeros(8, dtype=torch.int32), *floats[1:])


def eight(convolution: torch.Tensor, recurrent: torch.Tensor, kept: int = 0) -> Slots:
    """Returns the slots of eight rows, which may have several tokens if there are `kept` numbers of each token."""
    each = torch.zeros(8, dtype=torch.int64)
    if not kept:
        return Slots(convolution, recurrent, each, each)
    return Slots(convolution, recurrent, each, each, torch.zeros(5, 8, dtype=torch.int32), torch.zeros(8, 5, kept))


def delta(dtype: torch.dtype, state: torch.dtype, *, guessed: bool = False) -> None:
    """Computes a gated delta net of Qwen3-Next."""
    channels, served = 2 * 16 * 128 + 32 * 128, 2
    parts = torch.zeros(9, channels, 3, dtype=state), torch.zeros(9, 32, 128, 128, dtype=state)
    slots = eight(*parts, channels + 64 if guessed else 0)
    inputs, weight = torch.zeros(8, channels, dtype=dtype), torch.zeros(channels, 1, 4, dtype=dtype)
    raw, rates = torch.zeros(8, 16 * 2 * served, dtype=dtype), torch.zeros(32)
    convolved, strengths = convolve_step(inputs, raw, weight, None, slots)
    found = gated_delta_step(convolved, strengths, rates, rates, slots, 16)
    z = torch.zeros(8, 16, 2 * 128 + 2 * 2 * 128, dtype=dtype)[..., -256:]
    gated_norm(found.flatten(1), z, torch.zeros(128), 1e-6, 32)


def mamba2(dtype: torch.dtype, heads: int, head_dim: int, size: int, *, guessed: bool = False) -> None:
    channels, each = heads * head_dim + 2 * size, torch.zeros(heads)
    parts = torch.zeros(9, channels, 3, dtype=dtype), torch.zeros(9, heads, head_dim, size)
    slots = eight(*parts, channels + heads if guessed else 0)
    weight, bias = torch.zeros(channels, 1, 4, dtype=dtype), torch.zeros(channels, dtype=dtype)
    inputs, steps = torch.zeros(8, channels + heads, dtype=dtype).split([channels, heads], dim=1)
    convolved, steps = convolve_step(inputs, steps, weight, bias, slots)
    found = mamba2_step(convolved, steps, each, each, each, slots).flatten(1)
    weight = torch.zeros(heads * head_dim)
    gated_norm(found, torch.zeros(8, 1, len(weight), dtype=dtype), weight, 1e-6, gate_first=True)


def mamba(dtype: torch.dtype, channels: int, size: int, *, guessed: bool = False) -> None:
    each, inputs = torch.zeros(channels), torch.zeros(8, channels, dtype=dtype)
    parts = torch.zeros(9, channels, 3, dtype=dtype), torch.zeros(9, channels, size)
    slots = eight(*parts, channels if guessed else 0)
    x, _ = convolve_step(inputs, inputs[:, :0], torch.zeros(channels, 1, 4, dtype=dtype), each.to(dtype), slots)
    _, b, c = torch.zeros(len(x), 160 + 2 * size, dtype=dtype).split([160, size, size], dim=1)
    found = mamba_step(x, x, each, b, c, torch.zeros(channels, size), each, slots)
    gated_norm(found, inputs[:, None], None)


def stepping() -> None:
    """Begins and ends a step with a state group, a page table, and samples that ask for all there is."""
    fields = OWN + 2
    shared = {"counts": (3, 4), "inputs": (3, 2560), "numbers": (3, fields, 64), "changes": (3, 3, 4096)}
    shared |= {"masked": (3, 512), "masks": (3, 128, 4748), "tokens": (3, 512), "top_tokens": (3, 64, MAX_LOGPROBS)}
    given = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in shared.items()}
    given |= {name: torch.zeros(shape) for name, shape in {"chosen": (3, 64), "top": (3, 64, MAX_LOGPROBS)}.items()}
    one, sampled = torch.zeros(1, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    entries = Entries(**given, options=torch.zeros(3, 64, 5, dtype=torch.float64), turn=one, place=one)
    rows = begin(entries, fields, 64)
    samples = select(entries, rows, 64)
    single(entries, rows, sampled)
    spread(entries, rows, 2560, attention.TILE, sampled)
    adapters_of(rows, 2560)
    change(entries, 0, torch.zeros(64, 100, dtype=torch.int32))
    logits, tokens = torch.zeros(64, 151_936), torch.zeros(64, dtype=torch.int64)
    allow(entries, logits)
    own = torch.zeros(8, 151_936, dtype=torch.int32), torch.zeros(8, 151_936)
    edited = EditedRows(*own, torch.ones(8, PENALTIES), torch.zeros(8, dtype=torch.int32))
    owners = trace(entries, rows, 64)
    edit(logits, edited, owners)
    count(edited, owners, tokens)
    for width in (0, MAX_LOGPROBS):
        report(entries, torch.zeros(64), tokens[:, None].expand(64, width), torch.zeros(64, width))
    finish(entries, samples, tokens, sampled)


def mixing(
    dtype: torch.dtype,
    shape: tuple[int, int],
    experts: int,
    chosen: int,
    *,
    biased: bool = False,
    numbers: Numbers | None = None,
    group: int = 32,
) -> None:
    """Mixes experts, of `shape` (hidden, width), for a few tokens, and for many. `numbers`, `group`: those of quantized
    weights."""
    (hidden, width), one = shape, torch.zeros(1, dtype=dtype)

    def matrix(outputs: int, inputs: int) -> Matrix:
        return one.expand(outputs, inputs) if numbers is None else weights(numbers, inputs, outputs, group)

    inner, down = matrix(experts * 2 * width, hidden), matrix(experts * hidden, width)
    biases = (one.expand(experts, 2 * width), one.expand(experts, hidden)) if biased else None
    for tokens in (16, 64 * experts // chosen):
        x, ids = torch.zeros(tokens, hidden, dtype=dtype), torch.zeros(tokens, chosen, dtype=torch.int64)
        mix_experts(x, ids, torch.zeros(tokens, chosen, dtype=dtype), inner, down, experts, biases, "silu")


def adapting(dtype: torch.dtype, inputs: int, outputs: Sequence[int]) -> None:
    """Changes projections that are one product."""
    table = torch.zeros(len(outputs), SLOTS, FIELDS, dtype=torch.int64)
    projected, x = torch.zeros(64, sum(outputs), dtype=dtype), torch.zeros(64, inputs, dtype=dtype)
    change_projections(projected, x, table, 0, outputs, by_adapter(torch.zeros(64, dtype=torch.int64)), 512)


def multiplying(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    for rows in (1, 16):
        linear(torch.zeros(rows, inputs, dtype=dtype), torch.zeros(1, dtype=dtype).expand(outputs, inputs))


def weights(numbers: Numbers, inputs: int, outputs: int, group: int, *, minima: bool = False) -> Quantized:
    words = torch.zeros(1, dtype=torch.int32).expand(outputs, -(-inputs // numbers.chunk), 32)
    kind = torch.uint8 if numbers is Numbers.FP4 else torch.float16
    scales = torch.zeros(1, dtype=kind).expand(-(-inputs // group), outputs)
    return Quantized(numbers, inputs, group, words, scales, scales if minima else None)


def dequantizing(numbers: Numbers, inputs: int, outputs: int, group: int, *, minima: bool = False) -> None:
    """Multiplies by a quantized matrix: few rows, more, and more whose inputs are divided; and decodes it."""
    weight = weights(numbers, inputs, outputs, group, minima=minima)
    quantized.decoded(weight, torch.bfloat16)
    for rows in (1, 16, 32, 64):
        quantized.linear(torch.zeros(rows, inputs, dtype=torch.bfloat16), weight)


_HALF = frozenset({"decode", "prefill"})
_LINEAR = frozenset({"_linear"})
_QUANTIZED = frozenset({"_many"})
_EXPERTS = frozenset({"_multiply"})
_QUANTIZED_EXPERTS = frozenset({"_multiply_quantized"})
LAUNCHES = {
    "attention of Llama 3": Launch(partial(attending, torch.bfloat16, 128, 32, 8), _HALF),
    "attention of Qwen 3": Launch(partial(attending, torch.float16, 128, 16, 8, more=True), _HALF),
    "attention of gpt-oss": Launch(partial(attending, torch.bfloat16, 64, 64, 8, window=128, more=True), _HALF),
    "attention of SmolLM2": Launch(partial(attending, torch.bfloat16, 64, 9, 3), _HALF),
    "attention of Gemma 2": Launch(partial(attending, torch.bfloat16, 256, 16, 8, cap=50.0), _HALF),
    "attention of Phi 3": Launch(partial(attending, torch.float16, 96, 32, 32, window=2047), _HALF),
    "attention of 80 elements a head": Launch(partial(attending, torch.bfloat16, 80, 32, 32), _HALF),
    "attention in float32": Launch(partial(attending, torch.float32, 128, 32, 8)),
    "attention in float32 of 256 elements a head": Launch(partial(attending, torch.float32, 256, 16, 8, more=True)),
    "attention in float32 of 64 elements a head": Launch(partial(attending, torch.float32, 64, 9, 3)),
    "norms of 4096 elements": Launch(partial(normalising, torch.bfloat16, 4096)),
    "norms of 576 elements": Launch(partial(normalising, torch.bfloat16, 576)),
    "norms of 128 elements in float32": Launch(partial(normalising, torch.float32, 128)),
    "norms of 16384 elements": Launch(partial(normalising, torch.float16, 16384)),
    "activations": Launch(partial(activating, torch.bfloat16, 14336)),
    "activations in float32": Launch(partial(activating, torch.float32, 1537)),
    "sampling from 151936 tokens": Launch(partial(sampling, 151_936)),
    "sampling from 49152 tokens": Launch(partial(sampling, 49_152)),
    "gated delta net": Launch(partial(delta, torch.bfloat16, torch.float32)),
    "gated delta net in float16": Launch(partial(delta, torch.float16, torch.float16)),
    "gated delta net with guesses": Launch(partial(delta, torch.bfloat16, torch.float32, guessed=True)),
    "Mamba-2": Launch(partial(mamba2, torch.bfloat16, 80, 64, 128)),
    "Mamba-2 with guesses": Launch(partial(mamba2, torch.bfloat16, 80, 64, 128, guessed=True)),
    "Mamba": Launch(partial(mamba, torch.bfloat16, 5120, 16)),
    "Mamba with guesses": Launch(partial(mamba, torch.bfloat16, 5120, 16, guessed=True)),
    "product of few rows": Launch(partial(multiplying, torch.bfloat16, 4096, 6144), _LINEAR),
    "product of few rows and many outputs": Launch(partial(multiplying, torch.float16, 4096, 128_256), _LINEAR),
    "product of few rows and uneven inputs": Launch(partial(multiplying, torch.bfloat16, 1584, 4096), _LINEAR),
    "experts of Qwen 3": Launch(partial(mixing, torch.bfloat16, (2048, 768), 128, 8), _EXPERTS),
    "experts of gpt-oss": Launch(partial(mixing, torch.float16, (2880, 2880), 32, 4, biased=True), _EXPERTS),
    "experts of gpt-oss in MXFP4": Launch(
        partial(mixing, torch.bfloat16, (2880, 2880), 32, 4, biased=True, numbers=Numbers.FP4), _QUANTIZED_EXPERTS
    ),
    "experts of Qwen 3 in 4 bits": Launch(
        partial(mixing, torch.bfloat16, (2048, 768), 128, 8, numbers=Numbers.INT4), _QUANTIZED_EXPERTS
    ),
    "experts of Qwen 3 in 8 bits in groups of 16": Launch(
        partial(mixing, torch.bfloat16, (2048, 768), 128, 8, numbers=Numbers.INT8, group=16), _QUANTIZED_EXPERTS
    ),
    "experts of Qwen 3 in FP8": Launch(
        partial(mixing, torch.float16, (2048, 768), 128, 8, numbers=Numbers.FP8), _QUANTIZED_EXPERTS
    ),
    "adapters of Llama 3": Launch(partial(adapting, torch.bfloat16, 4096, [4096, 1024, 1024])),
    "adapters of SmolLM2": Launch(partial(adapting, torch.float16, 1536, [576])),
    "4 bits": Launch(partial(dequantizing, Numbers.INT4, 4096, 28_672, 128), _QUANTIZED),
    "4 bits with minima": Launch(partial(dequantizing, Numbers.INT4, 4096, 4096, 32, minima=True), _QUANTIZED),
    "8 bits": Launch(partial(dequantizing, Numbers.INT8, 4096, 6144, 4096), _QUANTIZED),
    "4 bits in groups of 16": Launch(partial(dequantizing, Numbers.INT4, 4096, 4096, 16, minima=True), _QUANTIZED),
    "8 bits in groups of 16": Launch(partial(dequantizing, Numbers.INT8, 14_336, 4096, 16), _QUANTIZED),
    "8 bits with minima": Launch(partial(dequantizing, Numbers.INT8, 4096, 6144, 32, minima=True), _QUANTIZED),
    "MXFP4": Launch(partial(dequantizing, Numbers.FP4, 2880, 4096, 32), _QUANTIZED),
    "FP8": Launch(partial(dequantizing, Numbers.FP8, 14_336, 4096, 128), _QUANTIZED),
    "ends of steps": Launch(stepping),
    "product of few rows in float32": Launch(partial(multiplying, torch.float32, 4096, 4096)),
}
