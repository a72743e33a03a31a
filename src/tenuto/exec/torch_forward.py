"""A forward pass in plain PyTorch, on any device it knows: the portable path, and the reference for faster ones."""

from __future__ import annotations

import numpy as np
import torch

from tenuto.base.errors import ConfigError
from tenuto.base.groups import GroupSpec, Kind, MemorySpec
from tenuto.base.plan import Plan, TableChanges
from tenuto.exec.forward import Longs, Outputs
from tenuto.kernels.paged import PagedAttention, PagedKV
from tenuto.kernels.sampling import Choice, sample
from tenuto.models.config import ModelConfig
from tenuto.models.llama import Llama


class TorchForward:
    """A `Forward` for models with one full-attention group."""

    def __init__(self, model: Llama, page_size: int) -> None:
        c = model.config
        self._model = model
        token_bytes = c.layers * 2 * c.kv_heads * c.head_dim * model.dtype.itemsize
        self._spec = MemorySpec(page_size, (GroupSpec(Kind.FULL, page_size * token_bytes),))

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def spec(self) -> MemorySpec:
        """One group of kind full; a unit is a page of keys and values of all layers."""
        return self._spec

    @property
    def description(self) -> str:
        return f"PyTorch in {str(self._model.dtype).removeprefix('torch.')} on {self.device}"

    def prepare(self, units: tuple[int, ...], rows: int) -> None:
        (pages,) = units
        c, device = self.config, self.device
        try:
            self._kv = PagedKV(c.layers, pages, self._spec.page_size, c.kv_heads, c.head_dim, device, self._model.dtype)
        except RuntimeError as error:
            size = pages * self._spec.groups[0].bytes_per_unit
            raise ConfigError(f"{device} cannot hold {pages} pages, {size} bytes: {error}") from error
        self._table = torch.zeros((rows, 1), device=device, dtype=torch.int64)

    def apply(self, plan: Plan) -> None:
        (tables,), (copies,) = plan.tables, plan.copies
        self._change(tables)
        self._kv.copy(copies.sources, copies.targets, copies.slots)

    def _change(self, changes: TableChanges) -> None:
        """Write new page-table entries, first widening the table if they lie beyond it."""
        if len(changes.rows) == 0:
            return
        rows, width = self._table.shape
        needed = int(changes.index.max()) + 1
        if needed > width:
            wider = self._table.new_zeros((rows, max(needed, 2 * width)))
            wider[:, :width] = self._table
            self._table = wider
        self._table[self._indices(changes.rows), self._indices(changes.index)] = self._indices(changes.pages)

    def run(self, plan: Plan, tokens: torch.Tensor, outputs: Longs) -> Outputs:
        group = self.config.heads // self.config.kv_heads
        attention = PagedAttention(self._kv, self._table, plan.rows, plan.starts, plan.counts, group=group)
        return Outputs(self._model.forward(tokens, attention.positions, self._indices(outputs), attention))

    def sample(self, logits: torch.Tensor, choice: Choice) -> torch.Tensor:
        return sample(logits, choice)

    def close(self) -> None:
        """Nothing to do: PyTorch owns it all."""

    def _indices(self, values: np.ndarray[tuple[int], np.dtype[np.integer]]) -> torch.Tensor:
        """Host indices as int64 on the device."""
        return torch.from_numpy(values.astype(np.int64)).to(self.device)
