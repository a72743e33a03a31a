"""Gated feed-forward networks: Shazeer, arXiv:2002.05202."""

from __future__ import annotations

import torch

from tenuto.kernels.linear import linear
from tenuto.models.block import UNGATED, Room, Step, activate, scaled
from tenuto.models.config import Mlp


class MlpBlock:
    """One feed-forward network. Gate and up projection form one matrix, [2 * width, hidden], or without a gate [width,
    hidden]."""

    def __init__(self, shape: Mlp, hidden: int, name: str, room: Room) -> None:
        """The names of its weights begin with `name`."""
        self._shape, self._fused, self._sum = shape, room.fused, room.ranks.sum
        parts = ["up_proj"] if shape.activation in UNGATED else ["gate_proj", "up_proj"]
        self._inner = {f"{name}{part}": shape.width for part in parts}
        self._outer = {f"{name}down_proj": hidden}
        self._gate_up = room.factors({f"{part}.weight": width for part, width in self._inner.items()}, hidden)
        self._down = room.factor(f"{name}down_proj.weight", hidden, shape.width)

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """`x` and the result are [tokens, hidden]."""
        s = self._shape
        projected = step.adapt(linear(x, self._gate_up), x, self._inner)
        activated = activate(s.activation, projected, s.gate_scale, self._fused)
        return scaled(self._sum(step.adapt(linear(activated, self._down), activated, self._outer)), s.out_scale)
