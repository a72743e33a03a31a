"""The forward pass in plain PyTorch, on any of its devices: the portable path and the reference for faster ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
import torch

from tenuto.base.errors import ConfigError
from tenuto.base.plan import Bytes, Ints, Plan, StepResult
from tenuto.exec.device import engine_defaults
from tenuto.exec.forward import describe
from tenuto.exec.logits import Longs, Outputs, Singles
from tenuto.exec.row_edits import Edits, HostEdits
from tenuto.exec.row_options import RowOptions
from tenuto.exec.torch_memory import Memories, indices
from tenuto.kernels.elements import Element
from tenuto.kernels.ragged import ragged_arange
from tenuto.kernels.sampling import Choice, Masks
from tenuto.kernels.torch_sampling import mask, sample, score
from tenuto.models.adapter import Adapter
from tenuto.models.block import Adapted, AdaptedTokens, StepMemory
from tenuto.models.decoder import Decoder
from tenuto.models.groups import layer_groups, memory_spec

Changes = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""See `AdaptedTokens.changes`."""


class TorchLogits:
    """A `Logits` in a tensor, possibly one created in `inference_mode`."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, outputs: slice) -> Self:
        return type(self)(self.values[outputs])

    def copy(self, outputs: Longs) -> Self:
        return type(self)(self.values.index_select(0, self._indices(outputs)))

    def at(self, outputs: Longs, tokens: Longs) -> Singles:
        return _host(self.values[self._indices(outputs), self._indices(tokens)])

    @torch.inference_mode()
    def put(self, outputs: Longs, tokens: Longs, values: Singles) -> None:
        places = self._indices(outputs), self._indices(tokens)
        self.values.index_put_(places, torch.from_numpy(values).to(self.values.device))

    @torch.inference_mode()
    def sample(self, choice: Choice, masks: Masks | None = None) -> Longs:
        if masks is not None:
            mask(self.values, masks)
        return _host(sample(self.values, choice))

    def score(self, tokens: Longs, most: int) -> tuple[Singles, Longs, Singles]:
        chosen, ids, top = score(self.values, self._indices(tokens), most)
        return _host(chosen), _host(ids), _host(top)

    def host(self) -> Singles:
        return _host(self.values)

    def _indices(self, values: Longs) -> torch.Tensor:
        return indices(values, self.values.device)


def _packed(device: torch.device, adapter: Adapter) -> Changes:
    def tensor(values: Singles) -> torch.Tensor:
        return torch.tensor(values, device=device)

    return {name: (tensor(one.down), tensor(one.up) * one.scale) for name, one in adapter.changes.items()}


def _host(values: torch.Tensor) -> npt.NDArray[Any]:
    return values.cpu().numpy()


class TorchForward:
    """A `Forward` for models with any mix of memory groups. `logits_type`: the class of its logits."""

    logits_type: type[TorchLogits] = TorchLogits

    def __init__(self, model: Decoder, page_size: int) -> None:
        self._model, self._device = model, model.device
        element = Element(str(model.dtype).removeprefix("torch."))
        self._groups = layer_groups(model.config, element)
        self.config = model.config
        self.spec = memory_spec(self._groups, page_size)
        self.layout = f"torch {model.dtype}"
        self.batch_invariant = False
        self.defaults = engine_defaults(model.device.type)
        self.description = f"PyTorch in {element} on {model.device}"
        self._adapters: dict[int, Changes] = {}  # by slot

    def prepare(self, units: tuple[int, ...], rows: int, most_kept: int = 0) -> None:
        try:
            self.memories = self._memories(units, rows, most_kept)
        except RuntimeError as error:
            held = describe(units, self.spec, rows * most_kept)
            raise ConfigError(f"{self._device} cannot hold {held}: {error}") from error

    def _memories(self, units: tuple[int, ...], rows: int, most_kept: int) -> Memories:
        return Memories(self._groups, units, rows, most_kept, self.spec.page_size, self._device)

    @torch.inference_mode()
    def apply(self, plan: Plan) -> None:
        self.memories.apply(plan)

    @torch.inference_mode()
    def run(self, plan: Plan, tokens: Ints, outputs: Ints, *, best_only: bool = False) -> Outputs:  # noqa: ARG002 - it always has logits
        places = np.repeat(plan.starts.astype(np.int64), plan.counts) + ragged_arange(plan.counts)
        given, positions, wanted = (indices(values, self._device) for values in (tokens, places, outputs))
        adapted = self._adapted(np.repeat(plan.adapters, plan.counts)) if plan.adapters is not None else ()
        hidden = self._model.hidden(given, positions, self.memories.step(plan), adapted)
        asked, vectors = plan.vectors, None
        if asked is not None:
            parts = zip(asked.firsts.tolist(), asked.counts.tolist(), strict=True)
            normed = [self._model.normed(hidden[first : first + n]) for first, n in parts]
            vectors = np.stack([_host(each.float().sum(dim=0)) for each in normed])
        if self.config.predictor:
            self._normed = self._model.normed(hidden)
        return Outputs(self.logits_type(self._model.logits(hidden, wanted)), vectors=vectors)

    def edits(self, rows: int) -> Edits:  # noqa: ARG002 - used by other forward passes
        """See `Forward.edits`."""
        return HostEdits(self.config.vocab)

    def decode(
        self,
        plan: Plan,  # noqa: ARG002 - used by other forward passes
        tokens: Callable[[], Ints],  # noqa: ARG002
        options: RowOptions,  # noqa: ARG002
    ) -> Callable[[], StepResult] | None:
        """See `Forward.decode`; every step is computed by `apply` and `run`."""
        return None

    @torch.inference_mode()
    def remember(self, plan: Plan, following: Ints) -> None:
        self._predicted(plan.rows, plan.starts, plan.counts, following, self._normed)

    @torch.inference_mode()
    def predict(self, rows: Ints, positions: Ints, tokens: Ints, sources: Ints) -> Outputs:
        before = self._normed.index_select(0, indices(sources, self._device))
        self._normed = self._predicted(rows, positions, np.ones_like(rows), tokens, before)
        return Outputs(self.logits_type(self._model.projected(self._normed)))

    def _predicted(self, rows: Ints, starts: Ints, counts: Ints, tokens: Ints, normed: torch.Tensor) -> torch.Tensor:
        places = indices(np.repeat(starts.astype(np.int64), counts) + ragged_arange(counts), self._device)
        memory = cast("StepMemory", self.memories.pages_step(rows, starts, counts))  # the head only has attention
        return self._model.predicted(indices(tokens, self._device), normed, places, memory)

    def _adapted(self, slots: Ints) -> Sequence[Adapted]:
        """Returns the adapters of tokens by their `slots`, 0 for tokens without one."""
        return [
            AdaptedTokens(indices(np.flatnonzero(slots == slot), self._device), self._adapters[slot])
            for slot in np.unique(slots).tolist()
            if slot
        ]

    @property
    def packer(self) -> Callable[[Adapter], Changes]:
        return partial(_packed, self._device)

    def set_adapter(self, slot: int, packed: object | None) -> None:
        if packed is None:
            del self._adapters[slot]
        else:
            self._adapters[slot] = cast("Changes", packed)

    def read_units(self, group: int, units: Ints) -> Bytes:
        return self.memories.read_units(group, units)

    def write_units(self, group: int, units: Ints, data: Sequence[Bytes]) -> None:
        self.memories.write_units(group, units, data)

    def release_units(self) -> None:
        del self.memories

    def close(self) -> None:
        """Does nothing; garbage collection frees memory and weights."""
