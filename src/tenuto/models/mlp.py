"""Gated feed-forward networks: Shazeer, arXiv:2002.05202."""

from __future__ import annotations

import torch

from tenuto.kernels.linear import linear
from tenuto.models.block import UNGATED, Places, Room, activate, scaled
from tenuto.models.config import Mlp


class MlpBlock:
    """One feed-forward network. Gate and up projection form one matrix, [2 * width, hidden], or without a gate [width,
    hidden]."""

    prefix = "mlp."

    def __init__(self, shape: Mlp, hidden: int, room: Room) -> None:
        self._shape = shape
        self._parts = ["up_proj"] if shape.activation in UNGATED else ["gate_proj", "up_proj"]
        self._gate_up = room.matrix(len(self._parts) * shape.width, hidden)
        self._down = room.matrix(hidden, shape.width)

    def places(self) -> Places:
        """Returns the destinations of the weights; see `Places`."""
        parts = zip(self._parts, self._gate_up.chunk(len(self._parts)), strict=True)
        return {f"{name}.weight": part for name, part in parts} | {"down_proj.weight": self._down}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` and the result are [tokens, hidden]."""
        s = self._shape
        activated = activate(s.activation, linear(x, self._gate_up), s.gate_scale)
        return scaled(linear(activated, self._down), s.out_scale)
