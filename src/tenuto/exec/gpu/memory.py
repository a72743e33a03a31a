"""The pages of a memory group on a GPU, and attention over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tenuto.base.plan import Ints, PageCopies, TableChanges
from tenuto.exec.gpu.buckets import bucket_of
from tenuto.exec.torch_memory import indices
from tenuto.kernels.gpu.attention import append, counters, decode, prefill, tiles_of
from tenuto.kernels.ragged import ragged_arange
from tenuto.models.block import Norm, Rotation
from tenuto.models.groups import PageShape


def ints(values: np.ndarray[tuple[int, ...], np.dtype[np.integer]], device: torch.device) -> torch.Tensor:
    """Returns host integers as int32 on the device."""
    return torch.from_numpy(values.astype(np.int32)).to(device)


def put(values: torch.Tensor, target: torch.Tensor) -> None:
    """Copies values of the host to the device, without waiting for steps in flight."""
    target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)


class GpuPages:
    """The `Pages` of a group for kernels on a GPU.

    `pages` is [layers, units, 2, kv_heads, page_size, head_dim], keys before values, so that a page of one layer is
    contiguous. `table`, int32 [row ids, pages of the longest sequence], and `done`, the counts of `attention.decode`,
    never move, so that captured steps can refer to them.
    """

    def __init__(
        self, longest: int, shape: PageShape, layers: int, units: int, rows: int, page_size: int, device: torch.device
    ) -> None:
        """`longest`: the most tokens of a sequence."""
        element = getattr(torch, shape.element)
        self.window = shape.window
        self.pages = torch.zeros(
            (layers, units, 2, shape.kv_heads, page_size, shape.head_dim), device=device, dtype=element
        )
        self.table = torch.zeros((rows, -(-longest // page_size)), device=device, dtype=torch.int32)
        self.done = counters(bucket_of(rows), shape.kv_heads, device)

    @property
    def units(self) -> tuple[torch.Tensor, int]:
        """See `Pages.units`."""
        return self.pages, 1

    def apply(self, changes: TableChanges, copies: PageCopies) -> None:
        """See `Pages.apply`. Copies whole pages: the slots behind the copied ones mean nothing in either."""
        device = self.table.device
        if len(changes.rows):
            places = indices(changes.rows, device), indices(changes.index, device)
            self.table[places] = ints(changes.pages, device)
        if len(copies.sources):
            taken = self.pages.index_select(1, indices(copies.sources, device))
            self.pages.index_copy_(1, indices(copies.targets, device), taken)

    def step(self, rows: Ints, starts: Ints, counts: Ints) -> RaggedAttention:
        """See `Pages.step`."""
        return RaggedAttention(self, ragged_rows(rows, starts, counts, self.table.device))


class DecodeAttention:
    """Attention of rows that compute one token each. `owners` and `positions`, int32 [rows], are each token's row of
    the page table and its position, or -1 for no token."""

    def __init__(self, pages: GpuPages, owners: torch.Tensor, positions: torch.Tensor) -> None:
        self.pages, self.owners, self.positions = pages, owners, positions

    def append(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        norms: Sequence[Norm] | None = None,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        """See `StepMemory.append`."""
        turned = (rotation.cos[:, 0], rotation.sin[:, 0]) if rotation is not None else None
        weights, epsilon = ((norms[0].weight, norms[1].weight), norms[0].epsilon) if norms is not None else (None, 0.0)
        own = self.pages
        return append(q, k, v, own.table, self.owners, self.positions, own.pages[layer], turned, weights, epsilon)

    def __call__(
        self, layer: int, q: torch.Tensor, scale: float, sinks: torch.Tensor | None = None, cap: float = 0.0
    ) -> torch.Tensor:
        """See `StepMemory.attend`."""
        own = self.pages
        given = q, own.table, self.owners, self.positions, own.pages[layer], own.done
        return decode(*given, scale, own.window, sinks, cap)


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """Tokens of rows that compute any number of them, on the device, all int32. `owners`, `positions`: those of each
    token, see `DecodeAttention`. `tiles`: see `attention.prefill`. Rows that compute one token are in none; for each of
    them `ids`, `alone` and `firsts` are its row of the page table, its position and the token's index. Other entries
    there have position -1."""

    owners: torch.Tensor
    positions: torch.Tensor
    tiles: torch.Tensor
    ids: torch.Tensor
    alone: torch.Tensor
    firsts: torch.Tensor


class RaggedAttention(DecodeAttention):
    """Attention of `RaggedRows`. Rows with one token are computed as in `DecodeAttention`. It writes over the queries,
    so that it needs no memory, and the output for no token is that of `append`, zero."""

    def __init__(self, pages: GpuPages, rows: RaggedRows) -> None:
        super().__init__(pages, rows.owners, rows.positions)
        self._rows = rows

    def __call__(
        self, layer: int, q: torch.Tensor, scale: float, sinks: torch.Tensor | None = None, cap: float = 0.0
    ) -> torch.Tensor:
        """See `StepMemory.attend`."""
        own, rows = self.pages, self._rows
        options = scale, own.window, sinks, cap, q
        if len(rows.tiles):
            prefill(q, rows.tiles, own.table, own.pages[layer], *options)
        if len(rows.ids):
            decode(q, own.table, rows.ids, rows.alone, own.pages[layer], own.done, *options, rows.firsts)
        return q


def ragged_rows(rows: Ints, starts: Ints, counts: Ints, device: torch.device) -> RaggedRows:
    """Returns the tokens of rows of which row `rows[i]` computes `counts[i]` tokens from position `starts[i]` on."""
    positions = np.repeat(starts, counts) + ragged_arange(counts)
    one, firsts = counts == 1, counts.cumsum() - counts
    tiles = tiles_of(starts, counts, rows)
    tiles = tiles[~np.isin(tiles[:, 0], rows[one])]
    given = np.repeat(rows, counts), positions, tiles, rows[one], starts[one], firsts[one]
    return RaggedRows(*(ints(each, device) for each in given))
