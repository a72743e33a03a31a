"""The Triton functions of `attention.append`, which says what they compute. Capital arguments are known at
compilation."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def append(
    q,
    k,
    v,
    out,
    table,
    owners,
    positions,
    pages,
    cos,
    sin,
    q_weight,
    k_weight,
    epsilon,
    q_stride,
    q_head_stride,
    k_stride,
    v_stride,
    table_stride,
    unit_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAIRS: tl.constexpr,
    PAGE: tl.constexpr,
):
    """A program computes one KV head of one token, and the query heads that read it. Its grid is [tokens, KV heads]."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions + token)
    d = tl.arange(0, DIM_PAD)
    inside = d < DIM
    one = tl.arange(0, 1)
    group = tl.arange(0, GROUP_PAD)
    heads = head * GROUP + group
    present = (group < GROUP)[:, None] & inside[None, :]
    place = out + (token * KV_HEADS * GROUP + heads)[:, None] * DIM + d[None, :]
    if position < 0:
        tl.store(place, tl.zeros([GROUP_PAD, DIM_PAD], out.dtype.element_ty), present)
    else:
        queries = q + token * q_stride + heads * q_head_stride
        queries = _placed(queries, group < GROUP, q_weight, cos, sin, token, epsilon, DIM, DIM_PAD, PAIRS)
        tl.store(place, queries.to(out.dtype.element_ty), present)
        owner = tl.load(owners + token).to(tl.int64)
        unit = tl.load(table + owner * table_stride + position // PAGE).to(tl.int64)
        slot = pages + unit * unit_stride + (head * PAGE + position % PAGE) * DIM + d[None, :]
        key = k + token * k_stride + (head + one) * DIM
        key = _placed(key, one == 0, k_weight, cos, sin, token, epsilon, DIM, DIM_PAD, PAIRS)
        tl.store(slot, _finite(key, pages.dtype.element_ty), inside[None, :])
        value = tl.load(v + token * v_stride + head * DIM + d[None, :], inside[None, :], 0.0)
        tl.store(slot + KV_HEADS * PAGE * DIM, _finite(value, pages.dtype.element_ty), inside[None, :])


@triton.jit
def _placed(
    heads,
    present,
    weight,
    cos,
    sin,
    token,
    epsilon,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Returns heads, of which `heads` points at the first elements, normalised and rotated, float32 [n, DIM_PAD]."""
    d = tl.arange(0, DIM_PAD)
    inside = d < DIM
    mask = present[:, None] & inside[None, :]
    x = tl.load(heads[:, None] + d[None, :], mask, 0.0).to(tl.float32)
    factor = 1.0
    if weight is not None:
        factor = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + epsilon)[:, None]
        x = x * factor * tl.load(weight + d, inside, 0.0)[None, :]
    if PAIRS > 0:
        partner = tl.where(d < PAIRS, d + PAIRS, tl.where(d < 2 * PAIRS, d - PAIRS, d))
        y = tl.load(heads[:, None] + partner[None, :], mask, 0.0).to(tl.float32)
        if weight is not None:
            y = y * factor * tl.load(weight + partner, inside, 0.0)[None, :]
        y = tl.where((d < PAIRS)[None, :], -y, y)
        angle = token * PAIRS + d % PAIRS
        turned = d < 2 * PAIRS
        x = x * tl.load(cos + angle, turned, 1.0)[None, :] + y * tl.load(sin + angle, turned, 0.0)[None, :]
    return x


@triton.jit
def _finite(x, dtype: tl.constexpr):
    """Returns `x` in `dtype`, with zeros for infinity and NaN."""
    x = x.to(dtype)
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, tl.zeros_like(x))
