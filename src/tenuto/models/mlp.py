"""Gated feed-forward networks: Shazeer, arXiv:2002.05202."""

from __future__ import annotations

import torch

from tenuto.kernels.linear import linear
from tenuto.models.block import GATES, Places, Room
from tenuto.models.config import Mlp


class MlpBlock:
    """The weights of one network. Gate and up are one matrix, [2 width, hidden]."""

    prefix = "mlp."

    def __init__(self, shape: Mlp, hidden: int, room: Room) -> None:
        self._gated = GATES[shape.activation]
        self._gate_up = room.matrix(2 * shape.width, hidden)
        self._down = room.matrix(hidden, shape.width)

    def places(self) -> Places:
        """See `Places`."""
        gate, up = self._gate_up.chunk(2)
        return {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": self._down}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` and the result are [tokens, hidden]."""
        gate, up = linear(x, self._gate_up).chunk(2, dim=1)
        return linear(self._gated(gate, up), self._down)
