"""Decode steps as captured work: the host writes one block of numbers and goes on; the device does the rest."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from tenuto.base.plan import PREVIOUS_SAMPLE, Ints, Plan, TableChanges
from tenuto.exec.gpu.memory import DecodeAttention, GpuPages
from tenuto.exec.gpu.queue import Mark, Queue
from tenuto.exec.torch_memory import Memories
from tenuto.kernels.gpu.sampling import sample
from tenuto.kernels.recurrent import Piece
from tenuto.kernels.sampling import Choice
from tenuto.models.decoder import Decoder

IN_FLIGHT = 3
"""Number of steps whose numbers the host keeps: two in flight, and one whose result is being read."""

NOTHING = -1
"""The position of a row without a token."""


def bucket_of(rows: int) -> int:
    """Returns the number of rows of the captured step that computes `rows`: a power of two, or a multiple of 16."""
    return 1 << (rows - 1).bit_length() if rows <= 16 else -(-rows // 16) * 16


class _Block:
    """The numbers of one step, as views of one piece of memory, so that one copy moves all: `ints`, int32 [fields,
    rows], the fields being token, row id, position, and top-k, then for each state group the slots read and written,
    then for each paged group the row, index and page of a change; `floats`, float64 [4, rows], temperature, top-p,
    min-p and the random number."""

    def __init__(self, memory: torch.Tensor, fields: int, rows: int) -> None:
        """`memory`, uint8, has `size` bytes."""
        self.memory = memory
        at = 4 * 8 * rows
        self.floats = memory[:at].view(torch.float64).view(4, rows)
        self.ints = memory[at:].view(torch.int32).view(fields, rows)

    @staticmethod
    def size(fields: int, rows: int) -> int:
        return 4 * 8 * rows + 4 * fields * rows


class _Slot:
    """The host's side of a step: its numbers, and the tokens it samples, int32 [rows]."""

    def __init__(self, queue: Queue, fields: int, rows: int) -> None:
        self.block = _Block(queue.pinned(_Block.size(fields, rows)), fields, rows)
        self.ints, self.floats = self.block.ints.numpy(), self.block.floats.numpy()
        self.tokens = queue.pinned(4 * rows).view(torch.int32)
        self.done: Mark = queue.mark()
        self.done.record()


class Decodes:
    """The captured decode step of up to `rows` rows. Rows that a plan does not fill have no position, and their changes
    go where nothing is read: to the last row of page tables, the last slot of states, the last entry of `sampled`."""

    def __init__(self, model: Decoder, memories: Memories, sampled: torch.Tensor, rows: int, queue: Queue) -> None:
        """`sampled`, int32 [row ids + 1], are the tokens that rows sampled last."""
        self._memories, self._rows = memories, rows
        self._attended = {g: pages for g, pages in memories.pages.items() if isinstance(pages, GpuPages)}
        self._pages = list(self._attended.values())
        fields = 4 + 2 * len(memories.states) + 3 * len(self._pages)
        device = sampled.device
        self._block = _Block(torch.zeros(_Block.size(fields, rows), dtype=torch.uint8, device=device), fields, rows)
        self._slots = [_Slot(queue, fields, rows) for _ in range(IN_FLIGHT)]
        self._next = 0
        self._unused = self._without_work(len(sampled) - 1)
        self._block.memory.copy_(_host_block(self._unused, rows))
        self._replay, self._tokens = queue.capture(lambda: self._compute(model, sampled))

    def _without_work(self, row: int) -> npt.NDArray[np.int32]:
        """Returns the fields of an entry without work, int32 [fields]. `row` is that of no sequence."""
        states, pages = self._memories.states.values(), self._pages
        slots = [last for state in states for last in (-1, state.parts[0].shape[1] - 1)]
        return np.array([0, row, NOTHING, 0, *slots, *(value for _ in pages for value in (row, 0, 0))], np.int32)

    def _compute(self, model: Decoder, sampled: torch.Tensor) -> torch.Tensor:
        """Computes the step in `_block` and returns its tokens, int32 [rows]."""
        given, owners, positions, top_k = self._block.ints[:4]
        temperature, top_p, min_p, uniform = self._block.floats
        moves = self._block.ints[4:]
        n = 2 * len(self._memories.states)
        for pages, (row, index, page) in zip(self._pages, moves[n:].view(-1, 3, self._rows), strict=True):
            pages.table.index_put_((row.long(), index.long()), page)
        wide, each = owners.long(), torch.arange(self._rows, device=owners.device)
        tokens = torch.where(given == PREVIOUS_SAMPLE, sampled[wide], given)
        memory = self._memories.step_of(
            {g: DecodeAttention(pages, owners, positions) for g, pages in self._attended.items()},
            dict(zip(self._memories.states, moves[:n].long().view(-1, 2, self._rows), strict=True)),
            (Piece(each, each[:, None]),),
        )
        hidden = model.hidden(tokens.long(), positions.clamp(min=0).long(), memory)
        logits = model.projected(model.normed(hidden))
        found = sample(logits, temperature, top_k, top_p, min_p, uniform)
        sampled.index_copy_(0, wide, found.to(torch.int32))
        return found.to(torch.int32)

    def holds(self, plan: Plan) -> bool:
        """Whether the changes of page tables of a plan fit."""
        return all(len(changes.rows) <= self._rows for changes in plan.tables)

    def start(self, plan: Plan, tokens: Ints, choice: Choice) -> Callable[[], Ints]:
        """Queues a step. Its tokens are `tokens`, int32 [rows], where `PREVIOUS_SAMPLE` stands for what the step before
        samples. Returns a function that waits for the sampled tokens and returns them, int32 [rows]."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % IN_FLIGHT
        slot.done.synchronize()
        n, numbers = len(plan.rows), slot.ints
        numbers[:] = self._unused[:, None]
        numbers[:4, :n] = tokens, plan.rows, plan.starts, choice.top_k
        for place, moves in enumerate(plan.states):
            numbers[4 + 2 * place : 6 + 2 * place, :n] = moves.reads, moves.writes
        first = 4 + 2 * len(plan.states)
        for place, changes in enumerate(plan.tables):
            _put(numbers[first + 3 * place : first + 3 * place + 3], changes)
        slot.floats[:] = 0.0
        slot.floats[:, :n] = choice.temperature, choice.top_p, choice.min_p, choice.uniform
        self._block.memory.copy_(slot.block.memory, non_blocking=True)
        self._replay()
        slot.tokens.copy_(self._tokens, non_blocking=True)
        slot.done.record()
        return lambda: _result(slot, n)


def _result(slot: _Slot, n: int) -> Ints:
    slot.done.synchronize()
    return slot.tokens.numpy()[:n].copy()


def _put(fields: npt.NDArray[np.int32], changes: TableChanges) -> None:
    fields[:, : len(changes.rows)] = changes.rows, changes.index, changes.pages


def _host_block(entry: npt.NDArray[np.int32], rows: int) -> torch.Tensor:
    """Returns the memory of a block whose entries are all `entry`."""
    block = _Block(torch.zeros(_Block.size(len(entry), rows), dtype=torch.uint8), len(entry), rows)
    block.ints[:] = torch.from_numpy(entry)[:, None]
    return block.memory
