"""The memory groups of a model as PyTorch tensors, and one step's view of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tenuto.base.plan import Bytes, Ints, PageCopies, Plan, TableChanges
from tenuto.exec.host_copies import copies_for
from tenuto.kernels.paged import PagedAttention, PagedKV
from tenuto.kernels.ragged import ragged_arange
from tenuto.kernels.recurrent import StateSlots, absorbing, pieces
from tenuto.models.groups import LayerGroup, PageShape


def indices(values: np.ndarray[tuple[int], np.dtype[np.integer]], device: torch.device) -> torch.Tensor:
    """Returns host indices as int64 on the device."""
    return torch.from_numpy(values.astype(np.int64)).to(device)


class PageMemory:
    """The pages of a full or sliding group, and its page table, int64 [row ids, pages]."""

    def __init__(
        self, shape: PageShape, layers: int, units: int, rows: int, page_size: int, device: torch.device
    ) -> None:
        self._window = shape.window
        self.kv = PagedKV(
            layers, units, page_size, shape.kv_heads, shape.head_dim, device, getattr(torch, shape.element)
        )
        self._table = torch.zeros((rows, 1), device=device, dtype=torch.int64)

    def apply(self, changes: TableChanges, copies: PageCopies) -> None:
        """Writes new entries of the page table, then copies pages."""
        if len(changes.rows):
            device = self._table.device
            self._widen(int(changes.index.max()) + 1)
            places = indices(changes.rows, device), indices(changes.index, device)
            self._table[places] = indices(changes.pages, device)
        self.kv.copy(copies.sources, copies.targets, copies.slots)

    def _widen(self, needed: int) -> None:
        rows, width = self._table.shape
        if needed > width:
            wider = self._table.new_zeros((rows, max(needed, 2 * width)))
            wider[:, :width] = self._table
            self._table = wider

    def step(self, rows: Ints, starts: Ints, counts: Ints) -> PagedAttention:
        """Returns the attention over this group's pages for tokens of rows; see `PagedAttention`."""
        return PagedAttention(self.kv, self._table, rows, starts, counts, window=self._window)


class Memories:
    """The memory of all groups of a model."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        units: Sequence[int],
        rows: int,
        most_kept: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        self._device = device
        self.copies = copies_for(device)
        self._places = {layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.layers)}
        self.pages: dict[int, PageMemory] = {}  # by number of the group
        self.states: dict[int, StateSlots] = {}  # by number of the group
        self.inputs: dict[int, torch.Tensor] = {}  # kept, of each state group: [layers, rows, most_kept, inputs]
        for g, (group, n) in enumerate(zip(groups, units, strict=True)):
            if isinstance(group.shape, PageShape):
                self.pages[g] = PageMemory(group.shape, len(group.layers), n, rows, page_size, device)
            else:
                self.states[g] = StateSlots(len(group.layers), n, group.shape.parts, device)
                self.inputs[g] = torch.zeros((len(group.layers), rows, most_kept, group.shape.inputs), device=device)

    def apply(self, plan: Plan) -> None:
        """Applies the plan's changes of page tables, then its copies of pages."""
        for memory, changes, copies in zip(self.pages.values(), plan.tables, plan.copies, strict=True):
            memory.apply(changes, copies)

    def read_units(self, group: int, units: Ints) -> Bytes:
        """See `Copier.read_units`."""
        places = indices(units, self._device)
        taken = [tensor.index_select(at, places).movedim(at, 0).contiguous() for tensor, at in self._parts(group)]
        parts = [part.view(len(units), -1).view(torch.uint8) for part in taken]
        return self.copies.to_host(parts[0] if len(parts) == 1 else torch.cat(parts, 1))

    def write_units(self, group: int, units: Ints, data: Sequence[Bytes]) -> None:
        """See `Copier.write_units`."""
        with self.copies.beside():
            places, begin, rows = indices(units, self._device), 0, self.copies.to_device(data)
            for tensor, at in self._parts(group):
                shape = tensor.movedim(at, 0)[0].shape
                size = shape.numel() * tensor.element_size()
                part = rows[:, begin : begin + size].contiguous()
                tensor.index_copy_(at, places, part.view(tensor.dtype).view(len(units), *shape).movedim(0, at))
                begin += size

    def _parts(self, group: int) -> list[tuple[torch.Tensor, int]]:
        """Returns the tensors that hold a group's units, each with the dimension that numbers them."""
        return [(self.pages[group].kv.data, 2)] if group in self.pages else [(t, 1) for t in self.states[group].parts]

    def step(self, plan: Plan) -> MemoriesStep:
        """Returns the memory for the layers while `plan`, which must have been applied, is computed."""
        return MemoriesStep(self, self._places, plan, self._device)

    def pages_step(self, rows: Ints, starts: Ints, counts: Ints) -> PagesStep:
        """Returns the memory for layers of attention that compute `counts[i]` tokens of row `rows[i]` from position
        `starts[i]` on, int32 [rows]."""
        return PagesStep({g: pages.step(rows, starts, counts) for g, pages in self.pages.items()}, self._places)


class PagesStep:
    """The part of a `StepMemory` that layers of attention use."""

    def __init__(self, attentions: dict[int, PagedAttention], places: dict[int, tuple[int, int]]) -> None:
        """`places`: for every layer, its group and its number in that group."""
        self._attentions, self._places = attentions, places

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        sinks: torch.Tensor | None = None,
        cap: float = 0.0,
    ) -> torch.Tensor:
        """See `StepMemory.attend`."""
        group, place = self._places[layer]
        return self._attentions[group](place, q, k, v, scale, sinks, cap)


class MemoriesStep(PagesStep):
    """The `StepMemory` of one plan. The state slot that a row reads stays unchanged unless the row also writes to
    it."""

    def __init__(
        self, memories: Memories, places: dict[int, tuple[int, int]], plan: Plan, device: torch.device
    ) -> None:
        """`places`: see `PagesStep`."""
        given = plan.rows, plan.starts, plan.counts
        super().__init__({g: memory.step(*given) for g, memory in memories.pages.items()}, places)
        self._slots, self._inputs = memories.states, memories.inputs
        moved = zip(memories.states, plan.states, strict=True)
        self._moves = {g: (indices(moves.reads, device), indices(moves.writes, device)) for g, moves in moved}
        self.pieces = pieces(plan.counts, device) if self._slots else ()
        same = plan.states[0] if plan.states else None  # rows absorb and keep the same in all groups
        self._absorbing = absorbing(plan.rows, same.absorbs, device) if same is not None else ()
        self.keeping = None
        if same is not None and (keeps := same.keeps > 0).any():
            self.keeping = indices(np.flatnonzero(keeps), device)
            counts = plan.counts[keeps]
            kept = np.flatnonzero(np.repeat(keeps, plan.counts)), np.repeat(plan.rows[keeps], counts)
            self._kept = [indices(values, device) for values in (*kept, ragged_arange(counts))]

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `StepMemory.read`."""
        group, place = self._places[layer]
        convolution, recurrent = self._slots[group].read(place, self._moves[group][0])
        return convolution, recurrent

    def absorbed(self, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """See `StepMemory.absorbed`."""
        group, place = self._places[layer]
        inputs = self._inputs[group][place] if self._absorbing else None
        return [(each.rows, inputs[each.ids, : each.count]) for each in self._absorbing if inputs is not None]

    def keep(self, layer: int, inputs: torch.Tensor) -> None:
        """See `StepMemory.keep`."""
        group, place = self._places[layer]
        tokens, ids, numbers = self._kept
        self._inputs[group][place, ids, numbers] = inputs[tokens].float()

    def write(self, layer: int, convolution: torch.Tensor, recurrent: torch.Tensor) -> None:
        """See `StepMemory.write`."""
        group, place = self._places[layer]
        self._slots[group].write(place, self._moves[group][1], (convolution, recurrent))
