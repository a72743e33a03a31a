"""Scales that make outlier dimensions of keys smaller before keys are quantized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from tenuto.models.config import Attention, ModelConfig
from tenuto.models.native.panels import Panels
from tenuto.models.weights import Floats

PART = 32
"""Number of dimensions of a quantized key that share a scale."""
MOST_STEPS = 5
"""If a dimension is over 2 ** 5 times as large as the median of its part, the layer's keys and values stay in 16 bits:
rounding that dimension to one of 256 steps would change scores more than all other dimensions together."""
_LEAST = -24.0
_TINY = np.float32(1e-30)


@dataclass(frozen=True, slots=True)
class KeyScales:
    """The scales of a model's keys, by mixer number. Keys are multiplied by `scales`, powers of two, float32 [kv_heads
    * head_dim], and queries are divided by them, so attention scores do not change. Mixers in `wide` keep their keys
    and values in 16 bits."""

    scales: Mapping[int, Floats]
    wide: frozenset[int]

    @property
    def digest(self) -> str:
        """Stands for the scales: keys that were multiplied by others mean something else."""
        found = sha256(repr(sorted(self.wide)).encode())
        for number, scales in sorted(self.scales.items()):
            found.update(f"{number}:".encode() + scales.tobytes())
        return found.hexdigest()[:16]


UNSCALED = KeyScales({}, frozenset())


def key_scales(config: ModelConfig, panels: Panels) -> KeyScales:
    """Computes the scales of a model's keys from its weights.

    In some models keys are far larger in a few dimensions than in the others: in Qwen2 because of biases, in Qwen3
    because of the weights of norms. Each part of 32 dimensions shares one quantization scale, so one such
    dimension would leave only a few of 256 steps to the others. It is scaled down to the median of its part. Raises
    `ModelError`."""
    scales, found, number = dict[int, Floats](), set[int](), 0
    for name, layer in config.named_layers():
        for mixer in layer.mixers:
            steps = _steps(panels, mixer, name, config.hidden) if isinstance(mixer, Attention) else None
            if steps is not None and steps.min() < -MOST_STEPS:
                found.add(number)
            elif steps is not None and steps.any():
                scales[number] = np.exp2(np.maximum(steps, _LEAST)).astype(np.float32).ravel()
            number += 1
    return KeyScales(scales, frozenset(found))


def _steps(panels: Panels, a: Attention, name: str, hidden: int) -> Floats | None:
    """Returns the binary logarithms of a layer's scales, float32 [kv_heads, head_dim], or `None` without a key bias or
    norm, which cause outliers. The names of its weights begin with `name`."""
    shape, part = (a.kv_heads, a.head_dim), f"{name}self_attn."
    panels.require(
        f"{part}k_proj.weight", a.kv_heads * a.head_dim, hidden
    )  # checked before memory proportional to the outputs is allocated
    if a.qk_norm:
        sizes = np.tile(np.abs(panels.look(f"{part}k_norm.weight", a.head_dim)), (a.kv_heads, 1))
    elif a.bias:
        bias = panels.look(f"{part}k_proj.bias", a.kv_heads * a.head_dim)
        weights = panels.look(f"{part}k_proj.weight", a.kv_heads * a.head_dim, hidden)
        products = weights * panels.look(f"{name}input_layernorm.weight", hidden)  # sizes for inputs of size 1
        sizes = np.sqrt(np.square(products).sum(axis=1) + np.square(bias)).reshape(shape)
    else:
        return None
    steps = np.zeros(shape, np.float32)
    for first in range(0, a.head_dim, PART):
        own = sizes[:, first : first + PART]
        usual = np.maximum(np.median(own, axis=1, keepdims=True), _TINY)
        steps[:, first : first + PART] = -np.round(np.log2(np.maximum(own / usual, 1)))
    if a.rope is not None:  # dimensions that are rotated together have to be scaled together
        pairs = a.rope.rotated // 2
        steps[:, :pairs] = steps[:, pairs : 2 * pairs] = np.minimum(steps[:, :pairs], steps[:, pairs : 2 * pairs])
    return steps
