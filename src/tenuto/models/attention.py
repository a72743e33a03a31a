"""Attention with grouped queries."""

from __future__ import annotations

import torch

from tenuto.kernels.linear import linear
from tenuto.models.block import Norm, Places, Room, Step, scaled
from tenuto.models.config import Attention


class AttentionBlock:
    """One attention layer. A single matrix, [outputs, hidden], projects queries, keys and values, so that one
    matrix product does the work of three. If `gated`, each head's gate follows its query."""

    prefix = "self_attn."

    def __init__(self, shape: Attention, hidden: int, epsilon: float, room: Room) -> None:
        s = self._shape = shape
        width, kv_width = s.heads * s.head_dim, s.kv_heads * s.head_dim
        self._outputs = [2 * width if s.gated else width, kv_width, kv_width]
        self._qkv = room.matrix(sum(self._outputs), hidden)
        self._qkv_bias = room.matrix(sum(self._outputs)) if s.bias else None
        self._out = room.matrix(hidden, width)
        self._out_bias = room.matrix(hidden) if s.out_bias else None
        self._norms = (Norm(s.head_dim, epsilon, room), Norm(s.head_dim, epsilon, room)) if s.qk_norm else None
        self._sinks = room.floats(s.heads) if s.sinks else None
        self._frequencies = torch.from_numpy(s.rope.frequencies()).to(room.device) if s.rope is not None else None

    def places(self) -> Places:
        """Returns the destinations of the weights; see `Places`."""
        named = [f"{name}_proj" for name in "qkv"]
        parts = dict(
            zip((f"{name}.weight" for name in named), torch.split(self._qkv, self._outputs), strict=True),
            **{"o_proj.weight": self._out},
        )
        if self._qkv_bias is not None:
            parts |= zip((f"{name}.bias" for name in named), torch.split(self._qkv_bias, self._outputs), strict=True)
        if self._out_bias is not None:
            parts["o_proj.bias"] = self._out_bias
        if self._norms is not None:
            parts |= {"q_norm.weight": self._norms[0].weight, "k_norm.weight": self._norms[1].weight}
        if self._sinks is not None:
            parts["sinks"] = self._sinks
        return parts

    def __call__(self, x: torch.Tensor, layer: int, step: Step) -> torch.Tensor:
        """`x` and the result are [tokens, hidden]."""
        s, gate = self._shape, None
        q, k, v = (
            part.view(len(x), -1, s.head_dim)
            for part in torch.split(linear(x, self._qkv, self._qkv_bias), self._outputs, dim=1)
        )
        if s.gated:
            q, gate = q[:, 0::2], q[:, 1::2]
        if self._norms is not None:
            q, k = self._norms[0](q), self._norms[1](k)
        if s.rope is not None and self._frequencies is not None:
            cos, sin = step.rotation(s.rope, self._frequencies)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        found = step.memory.attend(layer, q, k, v, s.scale, self._sinks, s.cap)
        if gate is not None:
            found = found * gate.sigmoid()
        return scaled(linear(found.reshape(len(x), -1), self._out, self._out_bias), s.out_scale)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the leading pairs (i, i + pairs) of `x`, [tokens, heads, head_dim], by their token's angles; `cos` and
    `sin` are [tokens, 1, pairs]."""
    pairs = cos.shape[-1]
    first, second, rest = torch.split(x, [pairs, pairs, x.shape[-1] - 2 * pairs], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
