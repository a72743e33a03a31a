"""What a model executor asks of a model's forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from tenuto.base.groups import MemorySpec
from tenuto.base.plan import Bytes, Ints, Plan
from tenuto.kernels.sampling import Choice, Masks
from tenuto.models.config import ModelConfig

Longs = npt.NDArray[np.int64]
Singles = npt.NDArray[np.float32]


class Logits(Protocol):
    """Logits, float32 [outputs, vocab], where a model computes; everything else is on the host. Valid until the next
    step."""

    def __len__(self) -> int: ...

    def __getitem__(self, outputs: slice) -> Self:
        """Some of them; not a copy."""
        ...

    def copy(self, outputs: Longs) -> Self:
        """A copy of some of them."""
        ...

    def at(self, outputs: Longs, tokens: Longs) -> Singles:
        """Those of `tokens[i]` in `outputs[i]`."""
        ...

    def put(self, outputs: Longs, tokens: Longs, values: Singles) -> None:
        """Replace those of `tokens[i]` in `outputs[i]`, no two of them the same."""
        ...

    def sample(self, choice: Choice, masks: Masks | None = None) -> Longs:
        """As `kernels.torch_sampling.sample`, the reference, after `mask` if there are masks. May change them."""
        ...

    def logprobs(self, tokens: Longs, most: int) -> tuple[Singles, Longs, Singles]:
        """As `kernels.torch_sampling.logprobs`, the reference."""
        ...

    def host(self) -> Singles:
        """All of them, on the host."""
        ...


@dataclass(frozen=True, slots=True)
class Outputs:
    """Logits, and if they come for free the first of the likeliest tokens, int32 [outputs]."""

    logits: Logits
    best: Ints | None = None


class Forward(Protocol):
    """A model on a device, with the memory its turns need."""

    @property
    def config(self) -> ModelConfig:
        """The shape of the model."""
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

    def run(self, plan: Plan, tokens: Ints, outputs: Ints) -> Outputs:
        """Compute `tokens`, int32 [sum(plan.counts)]. `outputs`, int32 [outputs], are the places in `tokens` after
        which logits are wanted."""
        ...

    def read_units(self, group: int, units: Ints) -> Bytes:
        """See `Copier.read_units`."""
        ...

    def write_units(self, group: int, units: Ints, data: Sequence[Bytes]) -> None:
        """See `Copier.write_units`."""
        ...

    def release_units(self) -> None:
        """Give the memory of all units back to the system, until they are prepared again."""
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
