"""Adapters in the memory of a GPU, and those of a step's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tenuto.exec.gpu.memory import put
from tenuto.exec.torch_forward import Changes
from tenuto.kernels.gpu.adapters import FIELDS, SLOTS, by_adapter, change_projections
from tenuto.kernels.gpu.experts import Order
from tenuto.models.adapter import MAX_RANK, projections
from tenuto.models.config import ModelConfig


class AdapterTable:
    """A table of the changes of adapters by slot, which captured steps read; see `kernels.gpu.adapters.FIELDS`. The
    caller keeps the matrices while they are in the table."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._places = {name: place for place, name in enumerate(projections(config))}
        self._lines = torch.zeros(max(1, len(self._places)), SLOTS, FIELDS, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def set(self, slot: int, changes: Changes) -> None:
        """Puts an adapter into a slot below `SLOTS`, in place of the one that is there."""
        lines = torch.zeros(len(self._lines), FIELDS, dtype=torch.int64)
        for name, (down, up) in changes.items():
            lines[self._places[name]] = torch.tensor([down.data_ptr(), up.data_ptr(), len(down)])
        put(lines, self._lines[:, slot])

    def step(self, slots: torch.Tensor) -> AdaptedStep:
        """Returns the adapters of tokens by their `slots`, int64 [tokens], on the device; 0 for tokens without one."""
        return AdaptedStep(self._places, self._lines, by_adapter(slots))


@dataclass(frozen=True, slots=True)
class AdaptedStep:
    """The `Adapted` of a step. `places`: each projection's line in the table, `lines`; those of projections that are
    one product follow each other. `order`: the tokens, by adapter."""

    places: Mapping[str, int]
    lines: torch.Tensor
    order: Order

    def change(self, projected: torch.Tensor, x: torch.Tensor, parts: Mapping[str, int]) -> None:
        """See `Adapted.change`."""
        if not parts.keys() <= self.places.keys():
            return  # no adapter changes them
        first = min(self.places[name] for name in parts)
        assert [self.places[name] - first for name in parts] == list(range(len(parts)))
        change_projections(projected, x, self.lines, first, list(parts.values()), self.order, MAX_RANK)
