"""Paged attention in plain PyTorch, on any device: the portable path, and the reference for faster ones.

Pages: Kwon et al., arXiv:2309.06180. Work per step grows with what its rows attend to, not with the pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from tenuto.base.plan import Ints

Longs = npt.NDArray[np.int64]

QUERY_BLOCK = 128
"""A longer chunk attends in blocks of so many queries, each up to its own last token: this skips most of what the
causal mask would hide and bounds the mask's memory."""

_SHARE = 0.75
_SLACK = 32
"""Blocks share a batch if the shorter attends to at least `_SHARE` of the longer one's tokens, or to at most `_SLACK`
tokens fewer: padding stays small and short rows do not each become a batch of their own."""


def ragged_arange(counts: npt.NDArray[np.integer]) -> Longs:
    """0 .. counts[0] - 1, then 0 .. counts[1] - 1 and so on; int64 [sum(counts)]."""
    ends: Longs = np.cumsum(counts, dtype=np.int64)
    within: Longs = np.arange(counts.sum(), dtype=np.int64) - np.repeat(ends - counts, counts)
    return within


class PagedKV:
    """Keys and values of all layers in pages: `data` is [layers, 2, pages, page_size, kv_heads, head_dim].

    Invariant: every element is finite. A slot may be read (and masked) before it is written, and what is left there
    by its page's last owner would otherwise reach the new one: 0 * NaN is NaN.
    """

    def __init__(
        self,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.page_size = page_size
        self.data = torch.zeros((layers, 2, pages, page_size, kv_heads, head_dim), device=device, dtype=dtype)
        self._slots = self.data.view(layers, 2, pages * page_size, kv_heads, head_dim)

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store keys and values ([tokens, kv_heads, head_dim]) in token slots `slots` (int64 [tokens], slot `s` of page
        `p` being `p * page_size + s`). What is not finite is stored as zero."""
        for part, values in enumerate((k, v)):
            self._slots[layer, part].index_copy_(0, slots, torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0))

    def read(self, layer: int, pages: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `tokens` keys and values of each row of `pages` (int64 [rows, pages a row]), both
        [rows, kv_heads, tokens, head_dim]."""
        rows, width = pages.shape
        shape = (rows, width * self.page_size, *self.data.shape[-2:])
        k, v = (
            self.data[layer, part].index_select(0, pages.view(-1)).view(shape)[:, :tokens].transpose(1, 2)
            for part in (0, 1)
        )
        return k, v

    def copy(self, sources: Ints, targets: Ints, slots: Ints) -> None:
        """Copy the first `slots[i]` token slots of page `sources[i]` to page `targets[i]`, all int32 [copies]."""
        if len(sources) == 0:
            return
        offsets = ragged_arange(slots)
        taken, put = (
            torch.from_numpy(np.repeat(pages.astype(np.int64) * self.page_size, slots) + offsets).to(self.data.device)
            for pages in (sources, targets)
        )
        self._slots[:, :, put] = self._slots[:, :, taken]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Blocks of equally many queries that attend together.

    `tokens` int64 [blocks * count] are their places in the flat batch, `pages` int64 [blocks, pages a block] what they
    read, of which the first `length` tokens, and `mask` [blocks, 1, count * group, length] is 0 where a query may
    look and -inf elsewhere; `group` query heads share a key head.
    """

    tokens: torch.Tensor
    pages: torch.Tensor
    length: int
    mask: torch.Tensor


class PagedAttention:
    """Attention of one step (`models.llama.Attention`): made once a step, called once a layer."""

    def __init__(self, kv: PagedKV, table: torch.Tensor, rows: Ints, starts: Ints, counts: Ints, group: int) -> None:
        """`table` int64 [row ids, pages] is the page table, on the device; row `rows[i]` computes `counts[i]` tokens
        from position `starts[i]` (int32 [rows]); `group` query heads share a key head. `positions`, int64 [tokens], is
        each token's place in its sequence."""
        self._kv = kv
        self._group = group
        device = table.device
        places = np.repeat(starts.astype(np.int64), counts) + ragged_arange(counts)
        self.positions = torch.from_numpy(places).to(device)
        owners = torch.from_numpy(np.repeat(rows.astype(np.int64), counts)).to(device)
        size = kv.page_size
        self._slots = table[owners, self.positions // size] * size + self.positions % size
        self._batches = [self._batch(table, *blocks) for blocks in _blocks(rows, starts, counts)]

    def _batch(self, table: torch.Tensor, rows: Longs, firsts: Longs, starts: Longs, count: int) -> _Batch:
        device, length = table.device, int(starts[0]) + count
        width = -(-length // self._kv.page_size)
        steps = torch.arange(count, device=device)
        last = torch.from_numpy(starts).to(device)[:, None, None] + steps[:, None]
        hidden = torch.arange(length, device=device) > last
        mask = torch.zeros(hidden.shape, device=device, dtype=self._kv.data.dtype).masked_fill_(hidden, -torch.inf)
        return _Batch(
            tokens=(torch.from_numpy(firsts).to(device)[:, None] + steps).view(-1),
            pages=table[torch.from_numpy(rows).to(device), :width],
            length=length,
            mask=mask.repeat_interleave(self._group, dim=1)[:, None],
        )

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `models.llama.Attention`."""
        self._kv.write(layer, self._slots, k, v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for batch in self._batches:
            out.index_copy_(0, batch.tokens, self._attend(layer, batch, q.index_select(0, batch.tokens)))
        return out

    def _attend(self, layer: int, batch: _Batch, q: torch.Tensor) -> torch.Tensor:
        """`q` and the result are [blocks * count, heads, head_dim]. The query heads of a group are passed as further
        queries of their key head, so that keys need not be repeated."""
        keys, values = self._kv.read(layer, batch.pages, batch.length)
        blocks, kv_heads, _, head_dim = keys.shape
        split = q.view(blocks, -1, kv_heads, self._group, head_dim).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(split.flatten(2, 3), keys, values, attn_mask=batch.mask)
        return attended.view(split.shape).transpose(1, 2).reshape(q.shape)


def _blocks(rows: Ints, starts: Ints, counts: Ints) -> Iterator[tuple[Longs, Longs, Longs, int]]:
    """Cut chunks into query blocks and group those that pad each other little.

    Yields row ids, places of the first query in the flat batch, its positions (each int64 [blocks], longest first) and
    the number of queries, the same in every block of a group.
    """
    pieces = -(-counts // QUERY_BLOCK)
    within = ragged_arange(pieces) * QUERY_BLOCK
    sizes = np.minimum(np.repeat(counts, pieces) - within, QUERY_BLOCK)
    firsts = np.repeat(np.cumsum(counts, dtype=np.int64) - counts, pieces) + within
    begins = np.repeat(starts, pieces) + within
    owners = np.repeat(rows.astype(np.int64), pieces)
    order = np.lexsort((-begins, sizes))
    cut = 0
    for i in range(1, len(order) + 1):
        longest, size = begins[order[cut]] + sizes[order[cut]], sizes[order[cut]]
        if i < len(order) and sizes[order[i]] == size:
            length = begins[order[i]] + size
            if length >= longest * _SHARE or length >= longest - _SLACK:
                continue
        chosen = order[cut:i]
        yield owners[chosen], firsts[chosen], begins[chosen], int(size)
        cut = i
