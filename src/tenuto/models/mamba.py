"""The Mamba layer: Gu and Dao, arXiv:2312.00752."""

from __future__ import annotations

import torch
from torch.nn import functional

from tenuto.kernels import mamba
from tenuto.kernels.linear import linear
from tenuto.kernels.recurrent import convolve
from tenuto.models.block import Places, Room, Step
from tenuto.models.config import Mamba


class MambaBlock:
    """One Mamba layer. The input projection computes the convolution's inputs and a gate. A second projection, of the
    convolution's output, computes the low-rank time steps, B and C."""

    prefix = "mamba."

    def __init__(self, shape: Mamba, hidden: int, room: Room) -> None:
        s = self._shape = shape
        self._in = room.matrix(2 * s.channels, hidden)
        self._in_bias = room.matrix(2 * s.channels) if s.proj_bias else None
        self._conv = room.matrix(s.channels, 1, s.kernel)
        self._conv_bias = room.matrix(s.channels) if s.conv_bias else None
        self._select = room.matrix(s.rank + 2 * s.state, s.channels)
        self._steps = room.matrix(s.channels, s.rank)
        self._step_bias = room.floats(s.channels)
        self._log_rates = room.floats(s.channels, s.state)
        self._skip = room.floats(s.channels)
        self._out = room.matrix(hidden, s.channels)
        self._out_bias = room.matrix(hidden) if s.proj_bias else None

    def places(self) -> Places:
        """Returns the destinations of the weights; see `Places`."""
        parts = {
            "in_proj.weight": self._in,
            "conv1d.weight": self._conv,
            "x_proj.weight": self._select,
            "dt_proj.weight": self._steps,
            "dt_proj.bias": self._step_bias,
            "A_log": self._log_rates,
            "D": self._skip,
            "out_proj.weight": self._out,
        }
        if self._conv_bias is not None:
            parts["conv1d.bias"] = self._conv_bias
        if self._in_bias is not None and self._out_bias is not None:
            parts |= {"in_proj.bias": self._in_bias, "out_proj.bias": self._out_bias}
        return parts

    def __call__(self, x: torch.Tensor, layer: int, step: Step) -> torch.Tensor:
        """`x` and the result are [tokens, hidden]."""
        inputs, gate = linear(x, self._in, self._in_bias).chunk(2, dim=1)
        convolution, state = step.memory.read(layer)
        found = torch.empty(len(x), self._shape.channels, device=x.device)
        for piece in step.memory.pieces:
            out, convolution[piece.rows] = convolve(
                inputs[piece.tokens], convolution[piece.rows], self._conv, self._conv_bias
            )
            found[piece.tokens], state[piece.rows] = self._scan(functional.silu(out), state[piece.rows])
        step.memory.write(layer, convolution, state)
        gated = found * functional.silu(gate.float())
        return linear(gated.to(x.dtype), self._out, self._out_bias)

    def _scan(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output for rows of equal length, float32 [rows, length, channels], and the state after them. `x`
        is the convolution's output, [rows, length, channels]."""
        s, shape = self._shape, x.shape[:2]
        low, b, c = torch.split(linear(x.flatten(0, 1), self._select), [s.rank, s.state, s.state], dim=1)
        steps = functional.softplus(linear(low, self._steps).float() + self._step_bias).view(*shape, -1)
        b, c = (part.reshape(*shape, -1) for part in (b, c))
        rates = -self._log_rates.exp()
        given, state = mamba.scan(x.float(), steps, rates, b.float(), c.float(), state.float())
        return given + x.float() * self._skip, state
