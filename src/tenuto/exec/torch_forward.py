"""A forward pass in plain PyTorch, on any device it knows: the portable path, and the reference for faster ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tenuto.base.errors import ConfigError
from tenuto.base.groups import MemorySpec
from tenuto.base.plan import Bytes, Ints, Plan
from tenuto.exec.forward import Longs, Outputs, describe
from tenuto.exec.torch_memory import Memories, indices
from tenuto.kernels.paged import ragged_arange
from tenuto.kernels.sampling import Choice, Masks, mask, sample
from tenuto.models.config import ModelConfig
from tenuto.models.decoder import Decoder
from tenuto.models.groups import layer_groups, memory_spec


class TorchForward:
    """A `Forward` for models with any mix of memory groups."""

    def __init__(self, model: Decoder, page_size: int) -> None:
        self._model = model
        self._groups = layer_groups(model.config, model.dtype)
        self._spec = memory_spec(self._groups, page_size)

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def spec(self) -> MemorySpec:
        """The groups that the model's layers form."""
        return self._spec

    @property
    def layout(self) -> str:
        return f"torch {self._model.dtype}"

    @property
    def description(self) -> str:
        return f"PyTorch in {str(self._model.dtype).removeprefix('torch.')} on {self.device}"

    def prepare(self, units: tuple[int, ...], rows: int) -> None:
        try:
            self.memories = Memories(self._groups, units, rows, self._spec.page_size, self.device)
        except RuntimeError as error:
            raise ConfigError(f"{self.device} cannot hold {describe(units, self._spec)}: {error}") from error

    def apply(self, plan: Plan) -> None:
        self.memories.apply(plan)

    def run(self, plan: Plan, tokens: torch.Tensor, outputs: Longs) -> Outputs:
        places = np.repeat(plan.starts.astype(np.int64), plan.counts) + ragged_arange(plan.counts)
        wanted, positions = indices(outputs, self.device), indices(places, self.device)
        return Outputs(self._model.forward(tokens, positions, wanted, self.memories.step(plan)))

    def read_units(self, group: int, units: Ints) -> Bytes:
        return self.memories.read_units(group, units)

    def write_units(self, group: int, units: Ints, data: Sequence[Bytes]) -> None:
        self.memories.write_units(group, units, data)

    def sample(self, logits: torch.Tensor, choice: Choice, masks: Masks | None = None) -> torch.Tensor:
        if masks is not None:
            mask(logits, masks)
        return sample(logits, choice)

    def close(self) -> None:
        """Nothing to do: PyTorch owns it all."""
