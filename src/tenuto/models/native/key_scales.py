"""What keys are multiplied by before they become bytes."""

from __future__ import annotations

import numpy as np

from tenuto.models.config import Attention
from tenuto.models.native.panels import Panels
from tenuto.models.weights import Floats

PART = 32
"""Dimensions of a key that share a scale as bytes."""
_LEAST = -24.0
_TINY = np.float32(1e-30)


def key_scales(panels: Panels, a: Attention, part: str, norm: str, hidden: int) -> Floats | None:
    """Powers of two, float32 [kv_heads * head_dim], that keys of an attention layer are multiplied by before they
    become bytes, and queries divided by. Scores stay what they are. `None`: all are 1.

    Some models have a few dimensions in which keys are far larger than in the others: Qwen2 by its biases, Qwen3 by
    the weights of its norms. As bytes, 32 dimensions share a scale, so one such dimension would leave the others a few
    steps of 256. How large each is follows from the weights, so they are scaled down to the median of their part.
    `part` begins the names of the layer's weights; `norm` names the norm of its input, of `hidden` elements.
    """
    shape = (a.kv_heads, a.head_dim)
    if a.qk_norm:
        sizes = np.tile(np.abs(panels.look(f"{part}k_norm.weight", a.head_dim)), (a.kv_heads, 1))
    elif a.bias:
        bias = panels.look(f"{part}k_proj.bias", a.kv_heads * a.head_dim)
        weights = panels.look(f"{part}k_proj.weight", a.kv_heads * a.head_dim, hidden)
        products = weights * panels.look(f"{norm}.weight", hidden)  # of inputs that are 1 in the quadratic mean
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
    return np.exp2(np.maximum(steps, _LEAST)).astype(np.float32).ravel() if steps.any() else None
