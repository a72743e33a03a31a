"""The Mamba layer: Gu and Dao, arXiv:2312.00752."""

from __future__ import annotations

import torch
from torch.nn import functional

from tenuto.kernels import mamba
from tenuto.kernels.linear import linear
from tenuto.models.block import Room, Step, recur
from tenuto.models.config import Mamba


class MambaBlock:
    """One Mamba layer. The input projection computes the convolution's inputs and a gate. A second projection, of the
    convolution's output, computes the low-rank time steps, B and C."""

    def __init__(self, shape: Mamba, hidden: int, name: str, room: Room) -> None:
        """The names of its weights begin with `name`."""
        s, part = shape, f"{name}mamba."
        self._shape, self._fused = s, room.fused
        self._in = room.factor(f"{part}in_proj.weight", 2 * s.channels, hidden)
        self._in_bias = room.matrix(f"{part}in_proj.bias", 2 * s.channels) if s.proj_bias else None
        self._conv = room.matrix(f"{part}conv1d.weight", s.channels, 1, s.kernel)
        self._conv_bias = room.matrix(f"{part}conv1d.bias", s.channels) if s.conv_bias else None
        self._select = room.factor(f"{part}x_proj.weight", s.rank + 2 * s.state, s.channels)
        self._steps = room.factor(f"{part}dt_proj.weight", s.channels, s.rank)
        self._step_bias = room.floats(f"{part}dt_proj.bias", s.channels)
        self._log_rates = room.floats(f"{part}A_log", s.channels, s.state)
        self._skip = room.floats(f"{part}D", s.channels)
        self._out = room.factor(f"{part}out_proj.weight", hidden, s.channels)
        self._out_bias = room.matrix(f"{part}out_proj.bias", hidden) if s.proj_bias else None

    def __call__(self, x: torch.Tensor, layer: int, step: Step) -> torch.Tensor:
        """`x` and the result are [tokens, hidden]."""
        inputs, gate = linear(x, self._in, self._in_bias).chunk(2, dim=1)
        slots = step.memory.slots(layer)
        if self._fused is not None and slots is not None:
            convolved, _ = self._fused.convolve_step(inputs, inputs[:, :0], self._conv, self._conv_bias, slots)
            low, b, c = self._selected(convolved)
            rates = self._log_rates, self._skip
            steps = linear(low, self._steps)
            found = self._fused.mamba_step(convolved, steps, self._step_bias, b, c, *rates, slots)
        else:
            found = torch.empty(len(x), self._shape.channels, device=x.device)
            recur(step, layer, inputs, inputs[:, :0], self._conv, self._conv_bias, self._scan, found)
        gated = found * functional.silu(gate.float())
        return linear(gated.to(x.dtype), self._out, self._out_bias)

    def _selected(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the low-rank time steps, B and C for the output of the convolution, all [tokens, n]."""
        s = self._shape
        return torch.split(linear(x, self._select), [s.rank, s.state, s.state], dim=1)

    def _scan(self, x: torch.Tensor, _: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `recur`."""
        shape = x.shape[:2]
        low, b, c = self._selected(x.flatten(0, 1))
        steps = functional.softplus(linear(low, self._steps).float() + self._step_bias).view(*shape, -1)
        b, c = (part.reshape(*shape, -1) for part in (b, c))
        rates = -self._log_rates.exp()
        given, state = mamba.scan(x.float(), steps, rates, b.float(), c.float(), state)
        return given + x.float() * self._skip, state
