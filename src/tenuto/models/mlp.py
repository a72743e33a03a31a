"""Gated feed-forward networks: Shazeer, arXiv:2002.05202."""

from __future__ import annotations

import torch

from tenuto.kernels.linear import linear
from tenuto.models.block import UNGATED, Room, activate, scaled
from tenuto.models.config import Mlp


class MlpBlock:
    """One feed-forward network. Gate and up projection form one matrix, [2 * width, hidden], or without a gate [width,
    hidden]."""

    def __init__(self, shape: Mlp, hidden: int, name: str, room: Room) -> None:
        """The names of its weights begin with `name`."""
        self._shape = shape
        parts = ["up_proj"] if shape.activation in UNGATED else ["gate_proj", "up_proj"]
        self._gate_up = room.stacked({f"{name}{part}.weight": shape.width for part in parts}, hidden)
        self._down = room.matrix(f"{name}down_proj.weight", hidden, shape.width)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` and the result are [tokens, hidden]."""
        s = self._shape
        activated = activate(s.activation, linear(x, self._gate_up), s.gate_scale)
        return scaled(linear(activated, self._down), s.out_scale)
