"""What a model executor asks of a model's forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from tenuto.base.groups import MemorySpec
from tenuto.base.plan import Bytes, Ints, Plan
from tenuto.kernels.sampling import Choice, Masks
from tenuto.models.config import ModelConfig

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Outputs:
    """Logits, float32 [outputs, vocab], and if they come for free the first of the likeliest tokens, int64 [outputs].
    Valid until the next step."""

    logits: torch.Tensor
    best: torch.Tensor | None = None


class Forward(Protocol):
    """A model on a device, with the memory its turns need."""

    @property
    def config(self) -> ModelConfig:
        """The shape of the model."""
        ...

    @property
    def device(self) -> torch.device:
        """Where tokens are passed and logits come out."""
        ...

    @property
    def spec(self) -> MemorySpec:
        """The memory groups it needs."""
        ...

    @property
    def layout(self) -> str:
        """See `Executor.layout`."""
        ...

    @property
    def description(self) -> str:
        """What computes, for people."""
        ...

    def prepare(self, units: tuple[int, ...], rows: int) -> None:
        """See `Executor.prepare`. Raises `ConfigError` if the device cannot hold so many units."""
        ...

    def apply(self, plan: Plan) -> None:
        """Change page tables, then copy pages, as `plan` says."""
        ...

    def run(self, plan: Plan, tokens: torch.Tensor, outputs: Longs) -> Outputs:
        """Compute `tokens`, int64 [sum(plan.counts)], on the device. `outputs`, int64 [outputs], are the places in
        `tokens` after which logits are wanted."""
        ...

    def sample(self, logits: torch.Tensor, choice: Choice, masks: Masks | None = None) -> torch.Tensor:
        """As `kernels.sampling.sample`, the reference, after `kernels.sampling.mask` if there are masks."""
        ...

    def read_units(self, group: int, units: Ints) -> Bytes:
        """See `Copier.read_units`."""
        ...

    def write_units(self, group: int, units: Ints, data: Sequence[Bytes]) -> None:
        """See `Copier.write_units`."""
        ...

    def close(self) -> None:
        """Release what it computes with."""
        ...


def describe(units: Sequence[int], spec: MemorySpec) -> str:
    """So many units of each group, for people."""
    return ", ".join(
        f"{n} {'pages' if group.paged else 'state slots'} ({n * group.bytes_per_unit} bytes)"
        for n, group in zip(units, spec.groups, strict=True)
    )
