"""The Mamba-2 layer: Dao and Gu, arXiv:2405.21060."""

from __future__ import annotations

import torch
from torch.nn import functional

from tenuto.kernels.linear import linear
from tenuto.kernels.scans import mamba2_scan
from tenuto.models.block import Norm, Room, Step, recur, scaled
from tenuto.models.config import Mamba2


class Mamba2Block:
    """One Mamba-2 layer. The input projection computes the gate, the convolution's inputs, and the time steps."""

    def __init__(self, shape: Mamba2, hidden: int, epsilon: float, name: str, room: Room) -> None:
        """The names of its weights begin with `name`."""
        s, part = shape, f"{name}mamba."
        self._shape = s
        self._scan_rows = mamba2_scan(room.device)
        inputs = s.channels + s.convolved + s.heads
        self._in = room.matrix(f"{part}in_proj.weight", inputs, hidden)
        self._in_bias = room.matrix(f"{part}in_proj.bias", inputs) if s.proj_bias else None
        self._conv = room.matrix(f"{part}conv1d.weight", s.convolved, 1, s.kernel)
        parts = zip(s.convolved_parts, s.input_scales, strict=True)
        self._input_scales = torch.cat([torch.full((n,), scale) for n, scale in parts]).to(room.device, room.dtype)
        self._conv_bias = room.matrix(f"{part}conv1d.bias", s.convolved) if s.conv_bias else None
        self._log_rates = room.floats(f"{part}A_log", s.heads)
        self._step_bias = room.floats(f"{part}dt_bias", s.heads)
        self._skip = room.floats(f"{part}D", s.heads)
        self._norm = Norm(f"{part}norm", s.channels, epsilon, room, groups=s.groups) if s.normed else None
        self._out = room.matrix(f"{part}out_proj.weight", hidden, s.channels)
        self._out_bias = room.matrix(f"{part}out_proj.bias", hidden) if s.proj_bias else None

    def __call__(self, x: torch.Tensor, layer: int, step: Step) -> torch.Tensor:
        """`x` and the result are [tokens, hidden]."""
        s = self._shape
        sizes = [s.channels, s.convolved, s.heads]
        gate, inputs, steps = torch.split(linear(x, self._in, self._in_bias), sizes, dim=1)
        if s.input_scales != (1.0, 1.0, 1.0):
            inputs = inputs * self._input_scales
        found = torch.empty(len(x), s.channels, device=x.device)

        recur(step, layer, inputs, steps, self._conv, self._conv_bias, self._scan, found)
        return scaled(linear(self._gated(found, gate).to(x.dtype), self._out, self._out_bias), s.out_scale)

    def _gated(self, found: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Returns the heads' output `found`, gated and normalised, in the order that `gate_first` sets; float32
        [tokens, channels]."""
        s, opened = self._shape, functional.silu(scaled(gate.float(), self._shape.gate_scale))
        if self._norm is None:
            return found * opened
        return self._norm(found * opened) if s.gate_first else self._norm(found) * opened

    def _scan(
        self, convolved: torch.Tensor, steps: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output for rows of equal length, float32 [rows, length, channels], and the state after them.
        `convolved` is [rows, length, channels of the convolution], `steps` [rows, length, heads]."""
        s = self._shape
        parts = torch.split(convolved.float(), list(s.convolved_parts), dim=2)
        heads = (s.heads, s.groups, s.groups)
        x, b, c = (part.reshape(*part.shape[:2], n, -1) for part, n in zip(parts, heads, strict=True))
        steps = functional.softplus(scaled(steps.float(), s.step_scale) + self._step_bias).clamp(
            s.least_step, s.most_step
        )
        out, state = self._scan_rows(x, steps, -self._log_rates.exp(), b, c, state)
        return (out + x * self._skip[:, None]).flatten(2), state
