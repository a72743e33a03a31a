"""Attention with grouped queries."""

from __future__ import annotations

import torch

from tenuto.kernels.linear import linear
from tenuto.models.block import Norm, Room, Step, scaled
from tenuto.models.config import Attention


class AttentionBlock:
    """One attention layer. A single matrix, [outputs, hidden], projects queries, keys and values, so that one
    matrix product does the work of three. If `gated`, each head's gate follows its query."""

    def __init__(self, shape: Attention, hidden: int, epsilon: float, name: str, room: Room) -> None:
        """The names of its weights begin with `name`."""
        s, part = shape, f"{name}self_attn."
        self._shape, self._sum = s, room.ranks.sum
        width, kv_width = s.heads * s.head_dim, s.kv_heads * s.head_dim
        self._outputs = [2 * width if s.gated else width, kv_width, kv_width]
        outputs = dict(zip("qkv", self._outputs, strict=True))
        self._inner = {f"{part}{n}_proj": size for n, size in outputs.items()}
        self._outer = {f"{part}o_proj": hidden}
        self._qkv = room.factors({f"{part}{n}_proj.weight": size for n, size in outputs.items()}, hidden)
        self._qkv_bias = room.stacked({f"{part}{n}_proj.bias": size for n, size in outputs.items()}) if s.bias else None
        self._out = room.factor(f"{part}o_proj.weight", hidden, width)
        self._out_bias = room.matrix(f"{part}o_proj.bias", hidden) if s.out_bias else None
        self._norms = [Norm(f"{part}{n}_norm", s.head_dim, epsilon, room) for n in "qk"] if s.qk_norm else None
        self._sinks = room.floats(f"{part}sinks", s.heads) if s.sinks else None
        self._frequencies = torch.from_numpy(s.rope.frequencies()).to(room.device) if s.rope is not None else None

    def __call__(self, x: torch.Tensor, layer: int, step: Step) -> torch.Tensor:
        """`x` and the result are [tokens, hidden]."""
        s, gate = self._shape, None
        projected = step.adapt(linear(x, self._qkv, self._qkv_bias), x, self._inner)
        q, k, v = (part.view(len(x), -1, s.head_dim) for part in torch.split(projected, self._outputs, dim=1))
        if s.gated:
            q, gate = q[:, 0::2], q[:, 1::2]
        rotation = None
        if s.rope is not None and self._frequencies is not None:
            rotation = step.rotation(s.rope, self._frequencies)
        q = step.memory.append(layer, q, k, v, self._norms, rotation)
        found = step.memory.attend(layer, q, s.scale, self._sinks, s.cap)
        if gate is not None:
            found = found * gate.sigmoid()
        found = found.reshape(len(x), -1)
        found = self._sum(step.adapt(linear(found, self._out, self._out_bias), found, self._outer))
        return scaled(found, s.out_scale)
