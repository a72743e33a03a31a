"""The forward pass on a GPU with kernels of our own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from tenuto.base.plan import Ints, Plan
from tenuto.exec.forward import Longs
from tenuto.exec.gpu.buckets import bucket_of, mixed_bucket_of
from tenuto.exec.gpu.captured import CapturedSteps
from tenuto.exec.gpu.memory import GpuPages
from tenuto.exec.gpu.queue import Queue
from tenuto.exec.gpu.ring import CHANGES, Ring, StepNumbers
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
    """A `Forward` for a GPU. Steps that need no guesses, masks or edited logits are captured once for each size, and
    then run without the host. Those of recurrent layers are decodes, in which all rows compute and sample one token."""

    logits_type = GpuLogits

    def __init__(self, model: Decoder, page_size: int, queue: Queue) -> None:
        super().__init__(model, page_size)
        self.layout = f"gpu {model.dtype}"
        self.description = f"Triton kernels in {str(model.dtype).removeprefix('torch.')} on {model.device}"
        self._queue = queue
        # The number of tokens of an expert is known on the device alone, so the host must wait for it.
        self._waits = any(isinstance(layer.feed_forward, Experts) for layer in model.config.layers)
        self._captured: CapturedSteps | None = None

    def _memories(self, units: tuple[int, ...], rows: int, most_kept: int) -> Memories:
        """Also allocates what captured steps need."""
        pages = partial(GpuPages, self.config.max_context)
        memories = Memories(self._groups, units, rows, most_kept, self.spec.page_size, self._device, pages)
        sampled = torch.zeros(rows, dtype=torch.int32, device=self._device)
        self._ring = Ring(self._queue, bucket_of(rows), len(memories.states), len(memories.pages), self._device)
        self._captured = CapturedSteps(self._model, memories, sampled, self._ring)
        return memories

    def decode(self, plan: Plan, tokens: Callable[[], Ints], options: Options) -> Callable[[], Ints] | None:
        """See `Forward.decode`."""
        if self._waits or not _simple(plan):
            return None
        step = self._step_for(plan)
        return self._ring.start(step, StepNumbers(plan, tokens(), options)) if step is not None else None

    def _step_for(self, plan: Plan) -> Callable[[], None] | None:
        """Returns the captured step that computes a plan, if there can be one."""
        steps, rows, many = self._captured, len(plan.rows), len(plan.tokens)
        assert steps is not None  # `prepare` has been called
        if rows == many and plan.samples.all():
            return steps.decode(bucket_of(rows))
        size = mixed_bucket_of(many, rows, self._ring.most) if not plan.states else None
        return steps.mixed(*size) if size is not None else None

    def release_units(self) -> None:
        self._captured = None
        super().release_units()


def _simple(plan: Plan) -> bool:
    """Whether rows of a plan sample at most after their last token, without scores, vectors, adapters, masks or a
    predictor, and it copies no page, keeps no inputs, and makes no more changes of page tables than fit. Every row of a
    plan computes at least one token."""
    return (
        len(plan.rows) > 0
        and not plan.masks
        and (plan.scores is None and plan.vectors is None and plan.adapters is None and plan.predictor is None)
        and int(plan.samples.max()) <= 1
        and not any(len(copies.sources) for copies in plan.copies)
        and not any(moves.absorbs.any() or moves.keeps.any() for moves in plan.states)
        and all(len(changes.rows) <= CHANGES for changes in plan.tables)
    )
