"""The forward pass on a GPU with kernels of our own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from tenuto.base.plan import Ints, Plan, StepResult
from tenuto.base.sampling import MAX_LOGPROBS
from tenuto.exec.gpu.adapters import AdapterTable
from tenuto.exec.gpu.buckets import MOST_STEPPED, bucket_of, mixed_bucket_of, samples_bucket_of
from tenuto.exec.gpu.captured import CapturedSteps, End, Size
from tenuto.exec.gpu.edits import GpuEdits
from tenuto.exec.gpu.memory import GpuPages
from tenuto.exec.gpu.queue import Queue
from tenuto.exec.gpu.ring import CHANGES, MASKS, Ring, StepNumbers, masked_samples
from tenuto.exec.logits import Longs
from tenuto.exec.row_options import RowOptions
from tenuto.exec.samples import samples_of
from tenuto.exec.torch_forward import TorchForward, TorchLogits
from tenuto.exec.torch_memory import Memories, indices
from tenuto.kernels.gpu.adapters import SLOTS
from tenuto.kernels.gpu.sampling import sample
from tenuto.kernels.sampling import Choice, Masks
from tenuto.kernels.torch_sampling import mask
from tenuto.models.block import Adapted
from tenuto.models.decoder import Decoder


class GpuLogits(TorchLogits):
    """Logits that a kernel of our own samples from."""

    @torch.inference_mode()
    def sample(self, choice: Choice, masks: Masks | None = None) -> Longs:
        """See `Logits.sample`."""
        if masks is not None:
            mask(self.values, masks)
        options = choice.temperature, choice.top_k.astype(np.int32), choice.top_p, choice.min_p, choice.uniform
        given = [torch.from_numpy(each).to(self.values.device) for each in options]
        found: Longs = sample(self.values, *given).long().cpu().numpy()
        return found


class GpuForward(TorchForward):
    """A `Forward` for a GPU. Most steps are captured once for each size, and then run without the host, except that it
    waits for masks. With recurrent layers, their rows have at most `MOST_STEPPED` tokens."""

    logits_type = GpuLogits

    def __init__(self, model: Decoder, page_size: int, queue: Queue) -> None:
        super().__init__(model, page_size)
        self.layout = f"gpu {model.dtype}"
        self.description = f"Triton kernels in {str(model.dtype).removeprefix('torch.')} on {model.device}"
        self._queue = queue
        self._table = AdapterTable(self.config, self._device)
        self._captured: CapturedSteps | None = None

    def _memories(self, units: tuple[int, ...], rows: int, most_kept: int) -> Memories:
        """Also allocates what captured steps need."""
        pages = partial(GpuPages, self.config.max_context)
        given = self._groups, units, rows, most_kept, self.spec.page_size, self._device
        memories = Memories(*given, pages, MOST_STEPPED)
        sampled = torch.zeros(rows, dtype=torch.int32, device=self._device)
        groups = len(memories.states), len(memories.pages)
        self._ring = Ring(self._queue, bucket_of(rows), *groups, self.config.vocab, self._device)
        self._captured = CapturedSteps(self._model, memories, self._table, sampled, self._ring)
        return memories

    def edits(self, rows: int) -> GpuEdits:
        """See `Forward.edits`."""
        return GpuEdits(rows, self.config.vocab, self._device)

    def decode(self, plan: Plan, tokens: Callable[[], Ints], options: RowOptions) -> Callable[[], StepResult] | None:
        """See `Forward.decode`."""
        if not _simple(plan):
            return None
        edited, edits = options.edited(plan.rows[plan.samples > 0]), options.edits
        scored = self._scored(plan, options)
        parted = bool(plan.masks) or edited or scored is not None
        size = self._size_of(plan, adapted=plan.adapters is not None, parted=parted)
        if size is None or (scored is not None and any(options.named(plan.rows))):
            return None
        steps = self._captured
        assert steps is not None  # `prepare` has been called
        assert isinstance(edits, GpuEdits)
        step, end = steps.step(size), None
        if size.parted:
            # There are two numbers of likeliest tokens, so that few parts are captured.
            most = None if scored is None else MAX_LOGPROBS if scored[1] else 0
            end = steps.end(End(size.rows, size.samples, bool(plan.masks), edited, most), edits)
        return self._ring.start(step, StepNumbers(plan, tokens(), options.records, scored), end)

    def _scored(self, plan: Plan, options: RowOptions) -> tuple[Longs, int] | None:
        """Returns the samples of a plan that want log-probabilities, if there are any, and the largest number of
        likeliest tokens that one of them wants."""
        if options.plain(plan.rows):
            return None
        places, most = options.scored(samples_of(plan).rows)
        return (places, min(most, self.config.vocab)) if len(places) else None

    def _size_of(self, plan: Plan, *, adapted: bool, parted: bool) -> Size | None:
        """Returns the size of the captured step that computes a plan, if there can be one."""
        rows, many, most = len(plan.rows), len(plan.tokens), self._ring.most
        if rows == many and plan.samples.all() and not any(m.absorbs.any() or m.keeps.any() for m in plan.states):
            bucket = bucket_of(rows)
            return Size(bucket, bucket, bucket, decodes=True, adapted=adapted, parted=parted)
        found = mixed_bucket_of(many, rows, most)
        if found is None or (plan.states and int(plan.counts.max()) > MOST_STEPPED):
            return None
        taken = int(plan.samples.sum())
        samples = samples_bucket_of(taken, *found)
        if samples is None or (parted and taken > most):
            return None
        samples = min(samples, most) if parted else samples
        return Size(*found, samples, decodes=False, adapted=adapted, parted=parted)

    def _adapted(self, slots: Ints) -> Sequence[Adapted]:
        """See `TorchForward._adapted`."""
        if slots.max(initial=0) >= SLOTS:
            return super()._adapted(slots)
        return (self._table.step(indices(slots, self._device)),)

    def set_adapter(self, slot: int, packed: object | None) -> None:
        """See `Forward.set_adapter`."""
        super().set_adapter(slot, packed)
        if slot < SLOTS:
            self._table.set(slot, self._adapters.get(slot, {}))

    def release_units(self) -> None:
        self._captured = None
        super().release_units()


def _simple(plan: Plan) -> bool:
    """Whether a plan has no scores, vectors or predictor, copies no page, and has no more masks, slots of adapters or
    changes of page tables than fit. Every row of a plan computes at least one token."""
    return (
        len(plan.rows) > 0
        and (plan.scores is None and plan.vectors is None and plan.predictor is None)
        and (plan.adapters is None or int(plan.adapters.max()) < SLOTS)
        and not any(len(copies.sources) for copies in plan.copies)
        and (not plan.masks or masked_samples(plan) <= MASKS)
        and all(len(changes.rows) <= CHANGES for changes in plan.tables)
    )
