"""The memory groups of a model as PyTorch tensors, and one step's view of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from tenuto.base.plan import Bytes, Ints, PageCopies, Plan, TableChanges
from tenuto.exec.host_copies import copies_for
from tenuto.kernels.paged import PagedAttention, PagedKV
from tenuto.kernels.ragged import ragged_arange
from tenuto.kernels.recurrent import Absorbing, Piece, Slots, StateSlots, absorbing, pieces
from tenuto.models.block import Norm, Rotation
from tenuto.models.groups import LayerGroup, PageShape


def indices(values: np.ndarray[tuple[int], np.dtype[np.integer]], device: torch.device) -> torch.Tensor:
    """Returns host indices as int64 on the device."""
    return torch.from_numpy(values.astype(np.int64)).to(device)


class Attention(Protocol):
    """Attention of one step in one memory group. `layer` is a layer's number in the group."""

    def append(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        norms: Sequence[Norm] | None = None,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        """See `StepMemory.append`."""

    def __call__(
        self, layer: int, q: torch.Tensor, scale: float, sinks: torch.Tensor | None = None, cap: float = 0.0
    ) -> torch.Tensor:
        """See `StepMemory.attend`."""


class Pages(Protocol):
    """The pages of a full or sliding group, and its page table."""

    @property
    def units(self) -> tuple[torch.Tensor, int]:
        """The tensor that holds the pages, and its dimension that numbers them."""

    def apply(self, changes: TableChanges, copies: PageCopies) -> None:
        """Writes new entries of the page table, then copies pages."""

    def step(self, rows: Ints, starts: Ints, counts: Ints) -> Attention:
        """Returns the attention over this group's pages for tokens of rows: row `rows[i]` computes `counts[i]` tokens
        from position `starts[i]` on, int32 [rows]."""


NewPages = Callable[[PageShape, int, int, int, int, torch.device], Pages]
"""Allocates the pages of a group, from its shape, its numbers of layers, units and rows, the page size and the
device."""


class PageMemory:
    """`Pages` for the reference kernel. The page table is int64 [row ids, pages]."""

    def __init__(
        self, shape: PageShape, layers: int, units: int, rows: int, page_size: int, device: torch.device
    ) -> None:
        self._window = shape.window
        self.kv = PagedKV(
            layers, units, page_size, shape.kv_heads, shape.head_dim, device, getattr(torch, shape.element)
        )
        self._table = torch.zeros((rows, 1), device=device, dtype=torch.int64)

    @property
    def units(self) -> tuple[torch.Tensor, int]:
        """The tensor that holds the pages, and its dimension that numbers them."""
        return self.kv.data, 2

    def apply(self, changes: TableChanges, copies: PageCopies) -> None:
        """See `Pages.apply`."""
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
        """See `Pages.step`."""
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
        pages: NewPages = PageMemory,
        most_stepped: int = 0,
    ) -> None:
        """`pages` allocates those of a group. `most_stepped`: the most tokens of a row for which recurrent layers have
        kernels of their own, see `StepMemory.slots`; 0 if there are none."""
        self._device, self._most_stepped = device, most_stepped
        self.copies = copies_for(device)
        self._places = {layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.layers)}
        self.pages: dict[int, Pages] = {}  # by number of the group
        self.states: dict[int, StateSlots] = {}  # by number of the group
        self.inputs: dict[int, torch.Tensor] = {}  # kept, of each state group: [layers, rows, most_kept, inputs]
        for g, (group, n) in enumerate(zip(groups, units, strict=True)):
            if isinstance(group.shape, PageShape):
                self.pages[g] = pages(group.shape, len(group.layers), n, rows, page_size, device)
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
        return [self.pages[group].units] if group in self.pages else [(t, 1) for t in self.states[group].parts]

    def step(self, plan: Plan) -> MemoriesStep:
        """Returns the memory for the layers while `plan`, which must have been applied, is computed."""
        given = plan.rows, plan.starts, plan.counts
        attentions = {g: memory.step(*given) for g, memory in self.pages.items()}
        moved = zip(self.states, plan.states, strict=True)
        moves = {g: (indices(each.reads, self._device), indices(each.writes, self._device)) for g, each in moved}
        if int(plan.counts.max(initial=0)) <= self._most_stepped or not moves:
            return self.step_of(attentions, moves, self._spans(plan) if moves else None)
        step = MemoriesStep(self, self._places, attentions, moves, pieces(plan.counts, self._device))
        step.take_inputs(plan, self._device)
        return step

    def step_of(
        self,
        attentions: Mapping[int, Attention],
        moves: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
        spans: torch.Tensor | None,
    ) -> MemoriesStep:
        """Returns the memory for the layers of a step whose recurrent layers have kernels of their own. By number of
        the group: its attention, or the slots that it reads and writes, both integers, [rows]. `spans`: see
        `Slots`."""
        return MemoriesStep(self, self._places, attentions, moves, None, spans)

    def _spans(self, plan: Plan) -> torch.Tensor | None:
        """Returns the `Slots.spans` of a plan, or None if it needs none."""
        same = plan.states[0]  # rows absorb and keep the same in all groups
        if (plan.counts == 1).all() and not (same.absorbs.any() or same.keeps.any()):
            return None
        firsts = plan.counts.cumsum() - plan.counts
        columns = np.stack((plan.rows, firsts, plan.counts, same.absorbs, same.keeps))
        return torch.from_numpy(columns.astype(np.int32)).to(self._device)

    def pages_step(self, rows: Ints, starts: Ints, counts: Ints) -> PagesStep:
        """Returns the memory for layers of attention that compute `counts[i]` tokens of row `rows[i]` from position
        `starts[i]` on, int32 [rows]."""
        return PagesStep({g: pages.step(rows, starts, counts) for g, pages in self.pages.items()}, self._places)


class PagesStep:
    """The part of a `StepMemory` that layers of attention use."""

    def __init__(self, attentions: Mapping[int, Attention], places: Mapping[int, tuple[int, int]]) -> None:
        """`places`: for every layer, its group and its number in that group."""
        self._attentions, self._places = attentions, places

    def append(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        norms: Sequence[Norm] | None = None,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        """See `StepMemory.append`."""
        group, place = self._places[layer]
        return self._attentions[group].append(place, q, k, v, norms, rotation)

    def attend(
        self, layer: int, q: torch.Tensor, scale: float, sinks: torch.Tensor | None = None, cap: float = 0.0
    ) -> torch.Tensor:
        """See `StepMemory.attend`."""
        group, place = self._places[layer]
        return self._attentions[group](place, q, scale, sinks, cap)


class MemoriesStep(PagesStep):
    """The `StepMemory` of a step. The state slot that a row reads stays unchanged unless the row also writes to it."""

    def __init__(
        self,
        memories: Memories,
        places: Mapping[int, tuple[int, int]],
        attentions: Mapping[int, Attention],
        moves: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
        pieces: tuple[Piece, ...] | None,
        spans: torch.Tensor | None = None,
    ) -> None:
        """`places`: see `PagesStep`. `moves`, `spans`: see `Memories.step_of`. `pieces`: None if recurrent layers have
        kernels of their own."""
        super().__init__(attentions, places)
        self._slots, self._inputs, self._moves = memories.states, memories.inputs, moves
        self.pieces, self._stepped, self._spans = pieces or (), pieces is None, spans
        self.keeping: torch.Tensor | None = None
        self._absorbing: tuple[Absorbing, ...] = ()
        self._kept: list[torch.Tensor] = []

    def take_inputs(self, plan: Plan, device: torch.device) -> None:
        """Sets what the rows of `plan` absorb and keep."""
        same = plan.states[0]  # rows absorb and keep the same in all groups
        self._absorbing = absorbing(plan.rows, same.absorbs, device)
        if (keeps := same.keeps > 0).any():
            self.keeping = indices(np.flatnonzero(keeps), device)
            counts = plan.counts[keeps]
            kept = np.flatnonzero(np.repeat(keeps, plan.counts)), np.repeat(plan.rows[keeps], counts)
            self._kept = [indices(values, device) for values in (*kept, ragged_arange(counts))]

    def slots(self, layer: int) -> Slots | None:
        """See `StepMemory.slots`."""
        if not self._stepped:
            return None
        group, place = self._places[layer]
        convolution, recurrent = (part[place] for part in self._slots[group].parts)
        inputs = self._inputs[group][place]
        kept = inputs if self._spans is not None and inputs.shape[1] else None
        return Slots(convolution, recurrent, *self._moves[group], self._spans, kept)

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
