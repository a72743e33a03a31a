"""Launches of the kernels for GPUs with the shapes of real models, which `compiled` compiles.

A launch is a call of a public function with tensors of zeros on the host, whose shapes, types and alignment are those
of a GPU's; nothing is computed. To add a kernel, add a launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from tenuto.kernels.gpu import attention


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
    attention.decode(queries, table, rows, rows, pages, 0.1, window, sinks, cap)
    attention.prefill(queries, tiles, table, pages, 0.1, window, sinks, cap)


_HALF = frozenset({"decode", "prefill"})
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
}
