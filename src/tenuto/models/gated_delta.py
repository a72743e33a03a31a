"""The gated delta net layer (Yang et al., arXiv:2412.06464) in Qwen3-Next's form."""

from __future__ import annotations

import torch
from torch.nn import functional

from tenuto.kernels.linear import linear
from tenuto.kernels.scans import gated_delta_scan
from tenuto.models.block import Norm, Room, Step, recur
from tenuto.models.config import GatedDelta

_LEAST_SQUARE = 1e-6
"""Added to the squared length of queries and keys before they are normalised."""


class GatedDeltaBlock:
    """One gated delta net.

    Each input projection has one block per key head. A block of `_qkvz` holds its query, its key, and the values and
    output gates of the value heads it serves; a block of `_ba` holds their write strengths and decays.
    """

    def __init__(self, shape: GatedDelta, hidden: int, epsilon: float, name: str, room: Room) -> None:
        """The names of its weights begin with `name`."""
        s, part = shape, f"{name}linear_attn."
        self._shape, self._fused = s, room.fused
        self._scan = gated_delta_scan(room.device, room.dtype)
        self._served = s.value_heads // s.key_heads
        self._values = s.value_heads * s.value_dim
        self._qkvz = room.factor(f"{part}in_proj_qkvz.weight", 2 * (s.key_heads * s.key_dim + self._values), hidden)
        self._ba = room.factor(f"{part}in_proj_ba.weight", 2 * s.value_heads, hidden)
        self._conv = room.matrix(f"{part}conv1d.weight", s.convolved, 1, s.kernel)
        self._log_rates = room.floats(f"{part}A_log", s.value_heads)
        self._decay_bias = room.floats(f"{part}dt_bias", s.value_heads)
        self._norm = Norm(f"{part}norm", s.value_dim, epsilon, room)
        self._out = room.factor(f"{part}out_proj.weight", hidden, self._values)

    def __call__(self, x: torch.Tensor, layer: int, step: Step) -> torch.Tensor:
        """`x` and the result are [tokens, hidden]."""
        s = self._shape
        served = self._served * s.value_dim
        heads = linear(x, self._qkvz).view(len(x), s.key_heads, -1)
        *qkv, z = torch.split(heads, [s.key_dim, s.key_dim, served, served], dim=2)
        inputs = torch.cat([part.flatten(1) for part in qkv], dim=1)
        raw = linear(x, self._ba)
        slots = step.memory.slots(layer)
        if self._fused is not None and slots is not None:
            convolved, strengths = self._fused.convolve_step(inputs, raw, self._conv, None, slots)
            rates = self._log_rates, self._decay_bias
            return self._gated(self._fused.gated_delta_step(convolved, strengths, *rates, slots, s.key_heads), z)
        found = torch.empty(len(x), s.value_heads, s.value_dim, device=x.device)
        recur(step, layer, inputs, raw, self._conv, None, self._recurrence, found)
        return self._gated(found, z)

    def _recurrence(
        self, convolved: torch.Tensor, raw: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `recur`."""
        strengths = raw.view(*raw.shape[:2], self._shape.key_heads, 2, -1).float()
        beta, decay = strengths[..., 0, :].flatten(2).sigmoid(), strengths[..., 1, :].flatten(2)
        decay = -self._log_rates.exp() * functional.softplus(decay + self._decay_bias)
        return self._scan(*self._heads(convolved.float()), decay, beta, state)

    def _gated(self, found: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Returns the layer's output, [tokens, hidden], for that of the heads, float32 [tokens, value_heads,
        value_dim], and their gates `z`."""
        if self._fused is not None:
            norm = self._norm
            flat = self._fused.gated_norm(found.flatten(1), z, norm.weight, norm.epsilon, self._shape.value_heads)
            return linear(flat, self._out)
        gated = self._norm(found) * functional.silu(z.reshape(found.shape).float())
        return linear(gated.flatten(1).to(z.dtype), self._out)

    def _heads(self, convolved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns queries, keys and values of every value head, float32 [rows, length, value_heads, elements], from the
        convolution's output, [rows, length, channels]. Queries and keys are normalised, queries also scaled."""
        s = self._shape
        keys = s.key_heads * s.key_dim
        q, k, v = torch.split(convolved, [keys, keys, self._values], dim=2)
        q, k = (self._normalised(part) for part in (q, k))
        return q * s.key_dim**-0.5, k, v.reshape(*v.shape[:2], s.value_heads, -1)

    def _normalised(self, channels: torch.Tensor) -> torch.Tensor:
        heads = channels.reshape(*channels.shape[:2], self._shape.key_heads, -1)
        lengths = heads.square().sum(dim=-1, keepdim=True) + _LEAST_SQUARE
        return (heads * lengths.rsqrt()).repeat_interleave(self._served, dim=2)
