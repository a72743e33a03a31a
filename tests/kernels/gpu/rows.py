"""Rows of a paged cache in the layout of the kernels for GPUs, beside the same keys and values as the portable kernel
keeps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from tenuto.kernels.paged import PagedAttention, PagedKV
from tests.kernels.gpu.conftest import DEVICE

CPU = torch.device("cpu")


def on_device(kernel: Callable[..., torch.Tensor], *given: Any, **named: Any) -> torch.Tensor:
    """Calls `kernel` with the tensors, which are on the CPU, on the device, and puts back what it has written to
    them."""
    tensors = [each for each in tree_leaves((given, named)) if isinstance(each, torch.Tensor)]
    moved = {id(each): each.to(DEVICE) for each in tensors}
    args, more = tree_map(lambda each: moved.get(id(each), each), (given, named))
    found = kernel(*args, **more).cpu()
    for each in tensors:
        if each.device != DEVICE:
            each.copy_(moved[id(each)])
    return found


class Rows:
    """Rows of the page table, in any order, with their keys and values. Everything a row may not read is NaN: the slots
    after its last token, those before its window, and page 0, which the table names where a row has no page."""

    def __init__(
        self,
        lengths: list[int],
        page_size: int,
        heads: tuple[int, int],
        head_dim: int,
        dtype: torch.dtype = torch.float16,
        seed: int = 0,
    ) -> None:
        """`heads`: the number of KV heads, and of query heads that read one."""
        self.generator = torch.Generator().manual_seed(seed)
        self.lengths, self.head_dim, self.dtype = lengths, head_dim, dtype
        self.kv_heads, self.group = kv_heads, _ = heads
        self.page_size = page_size
        width = -(-max(lengths) // page_size) + 2
        units = len(lengths) * width + 1
        self.ids = torch.randperm(len(lengths) + 2, generator=self.generator)[: len(lengths)].numpy().astype(np.int32)
        self.table = torch.zeros(len(lengths) + 2, width, dtype=torch.int32)
        self.pages = torch.full((units, 2, kv_heads, page_size, head_dim), torch.nan, dtype=dtype)
        self.kv = PagedKV(1, units, page_size, kv_heads, head_dim, CPU, torch.float32)
        free = iter((torch.randperm(units - 1, generator=self.generator) + 1).tolist())
        for row, length in zip(self.ids.tolist(), lengths, strict=True):
            for i in range(-(-length // page_size)):
                self.table[row, i] = next(free)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def fill(self, hidden: list[int] | None = None) -> None:
        """Gives the rows random keys and values, except for the first `hidden[i]` positions of row `i`."""
        for i, (row, length) in enumerate(zip(self.ids.tolist(), self.lengths, strict=True)):
            places = torch.arange(hidden[i] if hidden else 0, length)
            units, slots = self.table[row, places // self.page_size].long(), places % self.page_size
            for part in (0, 1):
                values = self.random(len(places), self.kv_heads, self.head_dim)
                self.pages[units, part, :, slots] = values
                self.kv.data[0, part, units, slots] = values.float()

    def queries(self, tokens: int) -> torch.Tensor:
        return self.random(tokens, self.kv_heads * self.group, self.head_dim)

    def expected(
        self,
        q: torch.Tensor,
        counts: list[int],
        scale: float,
        window: int = 0,
        sinks: torch.Tensor | None = None,
        cap: float = 0.0,
    ) -> torch.Tensor:
        """Returns the output of the last `counts[i]` tokens of each row as the portable kernel computes it, float32."""
        ends, many = np.array(self.lengths, np.int32), np.array(counts, np.int32)
        attention = PagedAttention(self.kv, self.table.long(), self.ids, ends - many, many, window)
        found = torch.empty(q.shape)
        for batch in attention._batches:
            found[batch.tokens] = attention._attend(0, batch, q[batch.tokens].float(), scale, sinks, cap)
        return found


def ints(values: object) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[found.dtype]
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)
