"""Paged attention in plain PyTorch, on any device: the portable kernel, and the reference for faster ones.

Pages: Kwon et al., arXiv:2309.06180. The work of a step grows with the tokens that its rows attend to, not with the
pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from tenuto.base.plan import Ints
from tenuto.kernels.ragged import ragged_arange

Longs = npt.NDArray[np.int64]
Change = Callable[[torch.Tensor], torch.Tensor]
"""A norm or a rotation of heads, [tokens, heads, head_dim]."""

QUERY_BLOCK = 128
"""Maximum number of queries in a block. A longer chunk attends block by block, each only to tokens up to its last
query. This skips most of the tokens that the causal mask would hide, and bounds the mask's memory."""

_SHARE = 0.75
_SLACK = 32
"""Two blocks share a batch if the shorter one attends to at least `_SHARE` of the longer one's tokens, or to at most
`_SLACK` tokens fewer. So padding stays small, and short rows do not all become separate batches."""


class PagedKV:
    """Keys and values of all layers in pages: `data` is [layers, 2, pages, page_size, kv_heads, head_dim].

    Invariant: every element is finite. A slot may be read (and masked) before it is written. NaN left there by the
    page's previous owner would reach the new one: 0 * NaN is NaN.
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
        """Stores keys and values, [tokens, kv_heads, head_dim], in `slots`, int64 [tokens]. Slot `s` of page `p` has
        the number `p * page_size + s`. Infinity and NaN are stored as zero."""
        for part, values in enumerate((k, v)):
            self._slots[layer, part].index_copy_(0, slots, torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0))

    def read(self, layer: int, pages: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the first `tokens` keys and values of each row of `pages`, int64 [rows, pages of a row]. Both are
        [rows, kv_heads, tokens, head_dim]."""
        rows, width = pages.shape
        shape = (rows, width * self.page_size, *self.data.shape[-2:])
        k, v = (
            self.data[layer, part].index_select(0, pages.view(-1)).view(shape)[:, :tokens].transpose(1, 2)
            for part in (0, 1)
        )
        return k, v

    def copy(self, sources: Ints, targets: Ints, slots: Ints) -> None:
        """Copies the first `slots[i]` token slots of page `sources[i]` to page `targets[i]`, all int32 [copies]."""
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
    """`_Blocks` as tensors on the device: query blocks that attend together.

    `tokens`, int64 [blocks * count], are the queries' indices in the flat batch. `pages`, int64 [blocks, pages of a
    block], are the pages that they read; they attend to the first `length` tokens of these. `mask`, [blocks, count,
    length], is 0 for tokens that a query attends to, and -inf for others. `masks` caches the results of `mask_of`.
    """

    tokens: torch.Tensor
    pages: torch.Tensor
    length: int
    mask: torch.Tensor
    masks: dict[int, torch.Tensor] = field(default_factory=dict)

    def mask_of(self, group: int) -> torch.Tensor:
        """Returns the mask for `group` query heads per KV head, [blocks, 1, count * group, length]."""
        if group not in self.masks:
            self.masks[group] = self.mask.repeat_interleave(group, dim=1)[:, None]
        return self.masks[group]


class PagedAttention:
    """Attention of one step in one memory group: created once per step, called once per layer."""

    def __init__(
        self, kv: PagedKV, table: torch.Tensor, rows: Ints, starts: Ints, counts: Ints, window: int = 0
    ) -> None:
        """`table`, int64 [row ids, pages], is the page table, on the device. Row `rows[i]` computes `counts[i]` tokens
        from position `starts[i]`, int32 [rows]. A token attends to the last `window` tokens, including itself, or with
        0 to itself and all tokens before it. Pages before the window are not read."""
        self._kv = kv
        self._window = window
        device = table.device
        places = np.repeat(starts.astype(np.int64), counts) + ragged_arange(counts)
        positions = torch.from_numpy(places).to(device)
        owners = torch.from_numpy(np.repeat(rows.astype(np.int64), counts)).to(device)
        size = kv.page_size
        self._slots = table[owners, positions // size] * size + positions % size
        self._batches = [self._batch(table, blocks) for blocks in _blocks(rows, starts, counts, window, size)]

    def _batch(self, table: torch.Tensor, blocks: _Blocks) -> _Batch:
        device, count = table.device, blocks.count
        length = int(blocks.begins[0]) + count
        steps = torch.arange(count, device=device)
        last = torch.from_numpy(blocks.begins).to(device)[:, None, None] + steps[:, None]
        keys = torch.arange(length, device=device)
        hidden = (keys > last) | (keys <= last - self._window) if self._window else keys > last
        mask = torch.zeros(hidden.shape, device=device, dtype=self._kv.data.dtype).masked_fill_(hidden, -torch.inf)
        # A shorter block reads further than its tokens, perhaps beyond the table; the mask hides what it reads there.
        width = np.arange(-(-length // self._kv.page_size))
        entries = torch.from_numpy((blocks.pages[:, None] + width).clip(max=table.shape[1] - 1)).to(device)
        return _Batch(
            tokens=(torch.from_numpy(blocks.firsts).to(device)[:, None] + steps).view(-1),
            pages=table[torch.from_numpy(blocks.rows).to(device)[:, None], entries],
            length=length,
            mask=mask,
        )

    def append(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        norms: Sequence[Change] | None = None,
        rotation: Change | None = None,
    ) -> torch.Tensor:
        """Does what `models.block.StepMemory.append` describes, for the layer with this number in the group."""
        if norms is not None:
            q, k = norms[0](q), norms[1](k)
        if rotation is not None:
            q, k = rotation(q), rotation(k)
        self._kv.write(layer, self._slots, k, v)
        return q

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
        cap: float = 0.0,
    ) -> torch.Tensor:
        """Does what `models.block.StepMemory.attend` describes, for the layer with this number in the group. The
        default `scale` is `head_dim ** -0.5`."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for batch in self._batches:
            found = self._attend(layer, batch, q.index_select(0, batch.tokens), scale, sinks, cap)
            out.index_copy_(0, batch.tokens, found)
        return out

    def _attend(
        self, layer: int, batch: _Batch, q: torch.Tensor, scale: float | None, sinks: torch.Tensor | None, cap: float
    ) -> torch.Tensor:
        """`q` and the result are [blocks * count, heads, head_dim]. The query heads of a KV head are passed as
        additional queries of that head, so that keys need not be repeated."""
        keys, values = self._kv.read(layer, batch.pages, batch.length)
        blocks, kv_heads, _, head_dim = keys.shape
        group = q.shape[1] // kv_heads
        split = q.view(blocks, -1, kv_heads, group, head_dim).transpose(1, 2)
        mask = batch.mask_of(group)
        if sinks is not None:
            mask = _with_sinks(mask, sinks.view(kv_heads, group))
            keys, values = (functional.pad(part, (0, 0, 0, 1)) for part in (keys, values))
        queries = split.flatten(2, 3)
        if cap:
            attended = _capped_attention(queries, keys, values, mask, head_dim**-0.5 if scale is None else scale, cap)
        else:
            attended = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
        return attended.view(split.shape).transpose(1, 2).reshape(q.shape)


def _capped_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, cap: float
) -> torch.Tensor:
    """Does what `scaled_dot_product_attention` does, but limits scores to `cap` by a hyperbolic tangent before adding
    `mask`. A sink's score is in the mask, so it is not limited."""
    scores = ((q @ k.mT).float() * (scale / cap)).tanh() * cap + mask
    return scores.softmax(dim=-1).to(v.dtype) @ v


def _with_sinks(mask: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Extends a mask, [blocks, 1, count * group, length], for an additional key of zeros, whose scores are `sinks`,
    [kv_heads, group]. Returns [blocks, kv_heads, count * group, length + 1]."""
    kv_heads, group = sinks.shape
    shape = (len(mask), kv_heads, mask.shape[2])
    last = sinks[:, None].expand(kv_heads, mask.shape[2] // group, group).reshape(kv_heads, -1)
    return torch.cat((mask.expand(*shape, -1), last.to(mask.dtype).expand(shape)[..., None]), dim=3)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Query blocks of similar length, so that a batch of them needs little padding, each with `count` queries.

    The arrays are int64 [blocks], longest first: `rows` are row ids, `firsts` the indices of the first queries in the
    flat batch, `pages` the first table entries that are read, and `begins` the positions of the first queries relative
    to those pages.
    """

    rows: Longs
    firsts: Longs
    pages: Longs
    begins: Longs
    count: int


def _blocks(rows: Ints, starts: Ints, counts: Ints, window: int = 0, page_size: int = 1) -> Iterator[_Blocks]:
    """Cuts chunks into query blocks, and groups blocks of similar length."""
    pieces = -(-counts // QUERY_BLOCK)
    within = ragged_arange(pieces) * QUERY_BLOCK
    sizes = np.minimum(np.repeat(counts, pieces) - within, QUERY_BLOCK)
    firsts = np.repeat(np.cumsum(counts, dtype=np.int64) - counts, pieces) + within
    positions = np.repeat(starts, pieces) + within
    pages = np.maximum(positions - window + 1, 0) // page_size if window else np.zeros_like(positions)
    begins = positions - pages * page_size
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
        yield _Blocks(owners[chosen], firsts[chosen], pages[chosen], begins[chosen], int(size))
        cut = i
