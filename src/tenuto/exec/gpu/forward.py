"""The forward pass on a GPU with kernels of our own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from tenuto.base.plan import Ints, Plan
from tenuto.exec.forward import Longs
from tenuto.exec.gpu.buckets import bucket_of
from tenuto.exec.gpu.decodes import captured
from tenuto.exec.gpu.memory import GpuPages
from tenuto.exec.gpu.queue import Queue
from tenuto.exec.gpu.ring import Ring
from tenuto.exec.torch_forward import TorchForward, TorchLogits
from tenuto.exec.torch_memory import Memories
from tenuto.kernels.gpu.sampling import sample
from tenuto.kernels.sampling import Choice, Masks, Options
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
        """Also allocates what captured steps need."""
        pages = partial(GpuPages, self.config.max_context)
        memories = Memories(self._groups, units, rows, most_kept, self.spec.page_size, self._device, pages)
        self._decodes: dict[int, Callable[[], None]] = {}  # captured steps, by number of rows
        self._sampled = torch.zeros(rows, dtype=torch.int32, device=self._device)
        self._ring = Ring(self._queue, bucket_of(rows), len(memories.states), len(memories.pages), self._device)
        return memories

    def decode(self, plan: Plan, tokens: Callable[[], Ints], options: Options) -> Callable[[], Ints] | None:
        """See `Forward.decode`."""
        if self._waits or not _simple(plan, self._ring.most):
            return None
        rows = bucket_of(len(plan.rows))
        step = self._decodes.get(rows)
        if step is None:
            with torch.inference_mode():
                step = captured(self._model, self.memories, self._sampled, rows, self._ring)
            self._decodes[rows] = step
        return self._ring.start(step, plan, tokens(), options)

    def release_units(self) -> None:
        self._decodes.clear()
        super().release_units()


def _simple(plan: Plan, most: int) -> bool:
    """Whether a plan only computes and samples one token of each row, copies no page, and changes at most `most`
    entries of a page table. Every row of a plan computes at least one token."""
    rows = len(plan.rows)
    return (
        0 < rows == len(plan.tokens) == np.count_nonzero(plan.samples)
        and (plan.scores, plan.vectors, plan.adapters, plan.predictor, plan.masks) == (None, None, None, None, ())
        and not any(len(copies.sources) for copies in plan.copies)
        and not any(np.count_nonzero(moves.absorbs) or np.count_nonzero(moves.keeps) for moves in plan.states)
        and all(len(changes.rows) <= most for changes in plan.tables)
    )
