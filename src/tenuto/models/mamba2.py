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
        self._shape, self._fused = s, room.fused
        self._scan_rows = mamba2_scan(room.device)
        inputs = s.channels + s.convolved + s.heads
        self._in = room.factor(f"{part}in_proj.weight", inputs, hidden)
        self._in_bias = room.matrix(f"{part}in_proj.bias", inputs) if s.proj_bias else None
        self._conv = room.matrix(f"{part}conv1d.weight", s.convolved, 1, s.kernel)
        parts = zip(s.convolved_parts, s.input_scales, strict=True)
        self._input_scales = torch.cat([torch.full((n,), scale) for n, scale in parts]).to(room.device, room.dtype)
        self._conv_bias = room.matrix(f"{part}conv1d.bias", s.convolved) if s.conv_bias else None
        self._log_rates = room.floats(f"{part}A_log", s.heads)
        self._step_bias = room.floats(f"{part}dt_bias", s.heads)
        self._skip = room.floats(f"{part}D", s.heads)
        self._norm = Norm(f"{part}norm", s.channels, epsilon, room, groups=s.groups) if s.normed else None
        self._out = room.factor(f"{part}out_proj.weight", hidden, s.channels)
        self._out_bias = room.matrix(f"{part}out_proj.bias", hidden) if s.proj_bias else None

    def __call__(self, x: torch.Tensor, layer: int, step: Step) -> torch.Tensor:
        """`x` and the result are [tokens, hidden]."""
        s = self._shape
        sizes = [s.channels, s.convolved, s.heads]
        gate, inputs, steps = torch.split(linear(x, self._in, self._in_bias), sizes, dim=1)
        if s.input_scales != (1.0, 1.0, 1.0):
            inputs = inputs * self._input_scales
        slots = step.memory.slots(layer)
        if self._fused is not None and slots is not None:
            convolved, steps = self._fused.convolve_step(inputs, steps, self._conv, self._conv_bias, slots)
            found = self._fused.mamba2_step(
                convolved,
                steps,
                self._step_bias,
                self._log_rates,
                self._skip,
                slots,
                s.step_scale,
                (s.least_step, s.most_step),
            ).flatten(1)
        else:
            found = torch.empty(len(x), s.channels, device=x.device)
            recur(step, layer, inputs, steps, self._conv, self._conv_bias, self._scan, found)
        return scaled(linear(self._gated(found, gate), self._out, self._out_bias), s.out_scale)

    def _gated(self, found: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Returns the heads' output `found`, float32 [tokens, channels], gated and normalised, in the order that
        `gate_first` sets, in the element type of `gate`."""
        s, norm = self._shape, self._norm
        if self._fused is not None:
            weight, epsilon, groups = (norm.weight, norm.epsilon, s.groups) if norm is not None else (None, 0.0, 1)
            order = {"gate_first": s.gate_first, "gate_scale": s.gate_scale}
            return self._fused.gated_norm(found, gate[:, None], weight, epsilon, groups, **order)
        opened = functional.silu(scaled(gate.float(), s.gate_scale))
        if norm is not None and not s.gate_first:
            return (norm(found) * opened).to(gate.dtype)
        gated = found * opened
        return (gated if norm is None else norm(gated)).to(gate.dtype)

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
