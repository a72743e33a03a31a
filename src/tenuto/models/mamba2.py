"""The Mamba-2 layer: Dao and Gu, arXiv:2405.21060."""

from __future__ import annotations

import torch
from torch.nn import functional

from tenuto.kernels.linear import linear
from tenuto.kernels.mamba2 import scan
from tenuto.kernels.recurrent import convolve
from tenuto.models.block import Norm, Places, Room, Step
from tenuto.models.config import Mamba2


class Mamba2Block:
    """The weights of one Mamba-2 layer. The projection in computes a gate, what is convolved, and time steps."""

    prefix = "mamba."

    def __init__(self, shape: Mamba2, hidden: int, epsilon: float, room: Room) -> None:
        s = self._shape = shape
        inputs = s.channels + s.convolved + s.heads
        self._in = room.matrix(inputs, hidden)
        self._in_bias = room.matrix(inputs) if s.proj_bias else None
        self._conv = room.matrix(s.convolved, 1, s.kernel)
        self._conv_bias = room.matrix(s.convolved) if s.conv_bias else None
        self._log_rates = room.floats(s.heads)
        self._step_bias = room.floats(s.heads)
        self._skip = room.floats(s.heads)
        self._norm = Norm(s.channels, epsilon, room, groups=s.groups)
        self._out = room.matrix(hidden, s.channels)
        self._out_bias = room.matrix(hidden) if s.proj_bias else None

    def places(self) -> Places:
        """See `Places`."""
        parts = {
            "in_proj.weight": self._in,
            "conv1d.weight": self._conv,
            "A_log": self._log_rates,
            "dt_bias": self._step_bias,
            "D": self._skip,
            "norm.weight": self._norm.weight,
            "out_proj.weight": self._out,
        }
        if self._conv_bias is not None:
            parts["conv1d.bias"] = self._conv_bias
        if self._in_bias is not None and self._out_bias is not None:
            parts |= {"in_proj.bias": self._in_bias, "out_proj.bias": self._out_bias}
        return parts

    def __call__(self, x: torch.Tensor, layer: int, step: Step) -> torch.Tensor:
        """`x` and the result are [tokens, hidden]."""
        s = self._shape
        sizes = [s.channels, s.convolved, s.heads]
        gate, inputs, steps = torch.split(linear(x, self._in, self._in_bias), sizes, dim=1)
        convolution, state = step.memory.read(layer)
        found = torch.empty(len(x), s.channels, device=x.device)
        for piece in step.memory.pieces:
            out, convolution[piece.rows] = convolve(
                inputs[piece.tokens], convolution[piece.rows], self._conv, self._conv_bias
            )
            found[piece.tokens], state[piece.rows] = self._scan(out, steps[piece.tokens], state[piece.rows])
        step.memory.write(layer, convolution, state)
        gated = self._norm(found * functional.silu(gate.float()))
        return linear(gated.to(x.dtype), self._out, self._out_bias)

    def _scan(
        self, convolved: torch.Tensor, steps: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What comes out of rows of equal length, float32 [rows, length, channels], and the state after them.
        `convolved` is [rows, length, channels of the convolution], `steps` [rows, length, heads]."""
        s = self._shape
        shared = s.groups * s.state
        parts = torch.split(functional.silu(convolved).float(), [s.channels, shared, shared], dim=2)
        heads = (s.heads, s.groups, s.groups)
        x, b, c = (part.reshape(*part.shape[:2], n, -1) for part, n in zip(parts, heads, strict=True))
        steps = functional.softplus(steps.float() + self._step_bias).clamp(s.least_step, s.most_step)
        out, state = scan(x, steps, -self._log_rates.exp(), b, c, state.float())
        return (out + x * self._skip[:, None]).flatten(2), state
