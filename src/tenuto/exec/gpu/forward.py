"""The forward pass on a GPU with kernels of our own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from tenuto.base.plan import Ints, Plan
from tenuto.exec.forward import Longs
from tenuto.exec.gpu.decodes import Decodes, bucket_of
from tenuto.exec.gpu.memory import GpuPages
from tenuto.exec.gpu.queue import Queue
from tenuto.exec.torch_forward import TorchForward, TorchLogits
from tenuto.exec.torch_memory import Memories
from tenuto.kernels.gpu.sampling import sample
from tenuto.kernels.sampling import Choice, Masks
from tenuto.kernels.torch_sampling import mask
from tenuto.models.config import Experts
from tenuto.models.decoder import Decoder


class GpuLogits(TorchLogits):
    """Logits that a kernel of our own samples from."""

    @torch.inference_mode()
    def sample(self, choice: Choice, masks: Masks | None = None) -> Longs:
        """See `Logits.sample`."""
        if masks is not None:
            mask(self._values, masks)
        options = choice.temperature, choice.top_k.astype(np.int32), choice.top_p, choice.min_p, choice.uniform
        given = [torch.from_numpy(each).to(self._values.device) for each in options]
        found: Longs = sample(self._values, *given).long().cpu().numpy()
        return found


class GpuForward(TorchForward):
    """A `Forward` for a GPU. Steps whose rows all compute and sample one token, with options that the device knows, are
    captured once for each number of rows, and then run without the host."""

    logits_type = GpuLogits

    def __init__(self, model: Decoder, page_size: int, queue: Queue) -> None:
        super().__init__(model, page_size)
        self.layout = f"gpu {model.dtype}"
        self.description = f"Triton kernels in {str(model.dtype).removeprefix('torch.')} on {model.device}"
        self._queue = queue
        # The number of tokens of an expert is known on the device alone, so the host must wait for it.
        self._waits = any(isinstance(layer.feed_forward, Experts) for layer in model.config.layers)

    def _memories(self, units: tuple[int, ...], rows: int, most_kept: int) -> Memories:
        """Also allocates a slot for rows without work in each group of states."""
        self._decodes: dict[int, Decodes] = {}  # by number of rows
        self._sampled = torch.zeros(rows + 1, dtype=torch.int32, device=self._device)
        more = tuple(n + (not group.paged) for n, group in zip(units, self.spec.groups, strict=True))
        pages = partial(GpuPages, self.config.max_context)
        return Memories(self._groups, more, rows, most_kept, self.spec.page_size, self._device, pages)

    @torch.inference_mode()
    def decode(self, plan: Plan, tokens: Callable[[], Ints], choice: Callable[[], Choice]) -> Callable[[], Ints] | None:
        """See `Forward.decode`."""
        if self._waits or not _simple(plan):
            return None
        rows = bucket_of(len(plan.rows))
        if rows not in self._decodes:
            self._decodes[rows] = Decodes(self._model, self.memories, self._sampled, rows, self._queue)
        decodes = self._decodes[rows]
        return decodes.start(plan, tokens(), choice()) if decodes.holds(plan) else None

    def release_units(self) -> None:
        self._decodes.clear()
        super().release_units()


def _simple(plan: Plan) -> bool:
    """Whether a plan only computes and samples one token of each row, and copies no page."""
    return (
        len(plan.rows) > 0
        and bool((plan.counts == 1).all() and (plan.samples == 1).all())
        and not any(len(copies.sources) for copies in plan.copies)
        and not any(moves.absorbs.any() or moves.keeps.any() for moves in plan.states)
        and (plan.scores, plan.vectors, plan.adapters, plan.predictor, plan.masks) == (None, None, None, None, ())
    )
