"""Shared parts of recurrent layers: batches of rows of equal length, slots of states, and causal convolution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from tenuto.base.plan import Ints
from tenuto.kernels.elements import StatePart

SCAN_BLOCK = 64
"""Number of tokens that a scan computes at once. A longer row is computed in such blocks, each from the state that the
one before it leaves."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a step with the same number of tokens, such as all decodes: `rows`, int64 [n], their indices among the
    step's rows, and `tokens`, int64 [n, length], the indices of their tokens in the flat batch."""

    rows: torch.Tensor
    tokens: torch.Tensor


def pieces(counts: Ints, device: torch.device) -> tuple[Piece, ...]:
    """Divides the rows of a step into pieces; row `i` computes `counts[i]` tokens, int32 [rows]."""
    firsts = np.cumsum(counts, dtype=np.int64) - counts
    found = []
    for count in np.unique(counts).tolist():
        rows = np.flatnonzero(counts == count)
        tokens = firsts[rows][:, None] + np.arange(count)
        found.append(Piece(torch.from_numpy(rows).to(device), torch.from_numpy(tokens).to(device)))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Absorbing:
    """Rows of a step that absorb the same number of inputs: `rows`, int64 [n], their indices among the step's rows,
    `ids`, int64 [n], their row ids, and that number."""

    rows: torch.Tensor
    ids: torch.Tensor
    count: int


def absorbing(ids: Ints, counts: Ints, device: torch.device) -> tuple[Absorbing, ...]:
    """Returns the rows of a step, with row ids `ids`, that absorb inputs; row `i` absorbs `counts[i]`; both int32
    [rows]."""
    found = []
    for count in np.unique(counts[counts > 0]).tolist():
        rows = np.flatnonzero(counts == count)
        places = torch.from_numpy(rows), torch.from_numpy(ids[rows].astype(np.int64))
        found.append(Absorbing(places[0].to(device), places[1].to(device), count))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Slots:
    """The states of one recurrent layer in all slots: that of the convolution and the recurrent one, both [slots,
    ...]. Row `i` reads slot `reads[i]`, or the zero state if that is negative, and writes slot `writes[i]`; both are
    integers, [rows].

    `spans`, int32 [5, rows], contiguous, has each row's id, the index of its first token, the number of its tokens, the
    number of inputs that it absorbs, and 1 if those of its tokens are kept, otherwise 0; see `base.plan.StateMoves`.
    Without it, row `i` has one token, token `i`. `kept`, float32 [row ids, most, inputs], contiguous, are the layer's
    kept inputs: those of the convolution, then others. Without it, no row absorbs or keeps any."""

    convolution: torch.Tensor
    recurrent: torch.Tensor
    reads: torch.Tensor
    writes: torch.Tensor
    spans: torch.Tensor | None = None
    kept: torch.Tensor | None = None


class StateSlots:
    """States of all layers of a group, [layers, slots, *shape] for each part. A slot is undefined until it is written,
    and always written completely."""

    def __init__(self, layers: int, slots: int, parts: Sequence[StatePart], device: torch.device) -> None:
        self.parts = [
            torch.zeros((layers, slots, *part.shape), device=device, dtype=getattr(torch, part.element))
            for part in parts
        ]

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns copies of the states of `layer` in `slots`, int64 [rows], each [rows, *shape]. A negative slot stands
        for the zero state."""
        fresh, places = slots < 0, slots.clamp(min=0)
        states = (part[layer].index_select(0, places) for part in self.parts)
        return tuple(state.masked_fill_(fresh.view(-1, *[1] * (state.dim() - 1)), 0) for state in states)

    def write(self, layer: int, slots: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        """Stores states, of the shapes that `read` returns, in `slots`, int64 [rows], all different."""
        for part, state in zip(self.parts, states, strict=True):
            part[layer].index_copy_(0, slots, state.to(part.dtype))


def convolve(
    x: torch.Tensor, before: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes a causal convolution of each channel over a row's tokens.

    `x` is [rows, length, channels], and `before`, [rows, channels, kernel - 1], has the inputs that precede it.
    `weight` is [channels, 1, kernel], and `bias` [channels]. Returns the outputs, of the shape of `x`, and the inputs
    that precede the next token, of the shape of `before`.
    """
    whole = torch.cat((before, x.transpose(1, 2)), dim=2)
    out = functional.conv1d(whole, weight, bias, groups=weight.shape[0])
    return out.transpose(1, 2), whole[:, :, x.shape[1] :]
