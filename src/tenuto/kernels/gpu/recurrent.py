"""Decode steps of recurrent layers on a CUDA device: one token per row, and states that are read from one slot and
written to another, or to the same.

A row whose slot to write is negative is padding: it writes nothing, and its output is zero. Written slots differ from
each other and from the slots that other rows read. States have any floating-point type and are computed in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tenuto.kernels.recurrent import Slots

_CHANNELS = 256
"""The number of channels of a convolution that a program computes."""
_STATE = 4096
"""A program computes about as many elements of a recurrent state. Small, so that one row already keeps a GPU busy."""
_LEAST_SQUARE = tl.constexpr(1e-6)
"""Added to the squared length of queries and keys, as in `models.gated_delta`."""


def convolve_step(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    slots: Slots,
) -> torch.Tensor:
    """Computes a causal convolution of each channel, then SiLU. `inputs` is [rows, channels], with contiguous rows,
    `weight` [channels, 1, kernel], `bias` [channels], and the states [slots, channels, kernel - 1], contiguous. Returns
    [rows, channels] in the element type of `inputs`."""
    rows, channels = inputs.shape
    found = torch.empty((rows, channels), device=inputs.device, dtype=inputs.dtype)
    _convolve[(rows, triton.cdiv(channels, _CHANNELS))](
        inputs,
        weight,
        bias,
        slots.convolution,
        slots.reads,
        slots.writes,
        found,
        inputs.stride(0),
        channels,
        KERNEL=weight.shape[-1],
        PLACES=triton.next_power_of_2(weight.shape[-1] - 1),
        BLOCK=_CHANNELS,
    )
    return found


def gated_delta_step(
    convolved: torch.Tensor,
    strengths: torch.Tensor,
    log_rates: torch.Tensor,
    decay_bias: torch.Tensor,
    slots: Slots,
    key_heads: int,
) -> torch.Tensor:
    """Computes one token of the gated delta rule, see `kernels.gated_delta.scan` and `models.gated_delta`.

    `convolved` is [rows, channels]: queries and keys of `key_heads` heads, not normalised yet, then values. `strengths`
    is [rows, key_heads, 2, value_heads / key_heads] in one piece: write strengths before the sigmoid, and decays before
    the softplus. `log_rates` and `decay_bias` are float32 [value_heads], and the states are [slots, value_heads,
    key_dim, value_dim], contiguous. Returns float32 [rows, value_heads, value_dim].
    """
    heads, key_dim, value_dim = slots.recurrent.shape[1:]
    rows, keys = len(convolved), triton.next_power_of_2(key_dim)
    block = min(max(_STATE // keys, 1), triton.next_power_of_2(value_dim))
    found = torch.empty((rows, heads, value_dim), device=convolved.device)
    _gated_delta[(rows, heads, triton.cdiv(value_dim, block))](
        convolved,
        strengths,
        log_rates,
        decay_bias,
        slots.recurrent,
        slots.reads,
        slots.writes,
        found,
        convolved.stride(0),
        strengths.stride(0),
        key_heads,
        SERVED=heads // key_heads,
        KEY_DIM=key_dim,
        KEYS=keys,
        VALUE_DIM=value_dim,
        BLOCK=block,
    )
    return found


def mamba2_step(
    convolved: torch.Tensor,
    steps: torch.Tensor,
    step_bias: torch.Tensor,
    log_rates: torch.Tensor,
    skip: torch.Tensor,
    slots: Slots,
    step_scale: float = 1.0,
    step_limits: tuple[float, float] = (0.0, float("inf")),
) -> torch.Tensor:
    """Computes one token of Mamba-2, see `kernels.mamba2.scan` and `models.mamba2`.

    `convolved` is [rows, channels]: inputs, B and C. `steps` is [rows, heads]; times `step_scale`, plus `step_bias`,
    after softplus, and limited to `step_limits` they are the time steps. `step_bias`, `log_rates` and `skip` are
    float32 [heads]. The states are [slots, heads, head_dim, size], contiguous. Rows are contiguous. Returns float32
    [rows, heads, head_dim].
    """
    heads, head_dim, size = slots.recurrent.shape[1:]
    rows, sizes = len(convolved), triton.next_power_of_2(size)
    block = min(max(_STATE // sizes, 1), triton.next_power_of_2(head_dim))
    found = torch.empty((rows, heads, head_dim), device=convolved.device)
    _mamba2[(rows, heads, triton.cdiv(head_dim, block))](
        convolved,
        steps,
        step_bias,
        log_rates,
        skip,
        slots.recurrent,
        slots.reads,
        slots.writes,
        found,
        convolved.stride(0),
        steps.stride(0),
        step_scale,
        *step_limits,
        (convolved.shape[1] - heads * head_dim) // (2 * size),
        HEAD_DIM=head_dim,
        BLOCK=block,
        SIZE=size,
        SIZES=sizes,
    )
    return found


def mamba_step(
    x: torch.Tensor,
    steps: torch.Tensor,
    step_bias: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    log_rates: torch.Tensor,
    skip: torch.Tensor,
    slots: Slots,
) -> torch.Tensor:
    """Computes one token of Mamba, see `kernels.mamba.scan` and `models.mamba`.

    `x`, the output of the convolution, and `steps`, before their bias and softplus, are [rows, channels], and `b` and
    `c` [rows, size]. Rows are contiguous. `step_bias` and `skip` are float32 [channels], `log_rates` is float32
    [channels, size], and the states are [slots, channels, size], contiguous. Returns float32 [rows, channels].
    """
    channels, size = slots.recurrent.shape[1:]
    rows, sizes = len(x), triton.next_power_of_2(size)
    block = max(_STATE // sizes // 4, 1)
    found = torch.empty((rows, channels), device=x.device)
    _mamba[(rows, triton.cdiv(channels, block))](
        x,
        steps,
        step_bias,
        b,
        c,
        log_rates,
        skip,
        slots.recurrent,
        slots.reads,
        slots.writes,
        found,
        x.stride(0),
        steps.stride(0),
        b.stride(0),
        c.stride(0),
        channels,
        BLOCK=block,
        SIZE=size,
        SIZES=sizes,
    )
    return found


@triton.jit
def _softplus(x):
    """Returns log(1 + exp(x)), also accurate where exp(x) is far less than 1 (Goldberg, "What every computer scientist
    should know about floating-point arithmetic", theorem 4)."""
    grown = tl.exp(tl.minimum(x, 20.0))
    total = 1.0 + grown
    small = tl.where(total == 1.0, grown, tl.log(total) * (grown / tl.where(total == 1.0, 1.0, total - 1.0)))
    return tl.where(x > 20.0, x, small)


@triton.jit
def _convolve(
    inputs,
    weight,
    bias,
    state,
    reads,
    writes,
    found,
    stride,
    channels,
    KERNEL: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program computes BLOCK channels of one row."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, PLACES)
    read = tl.load(reads + row).to(tl.int64)
    write = tl.load(writes + row).to(tl.int64)
    inside = channel < channels
    has_channel = inside & (write >= 0)
    has_place = has_channel[:, None] & (place < KERNEL - 1)[None, :]
    at = channel[:, None] * (KERNEL - 1) + place[None, :]
    taps = tl.load(weight + at + channel[:, None], mask=has_place, other=0.0).to(tl.float32)
    last = tl.load(weight + channel * KERNEL + KERNEL - 1, mask=has_channel, other=0.0).to(tl.float32)
    earlier = tl.load(state + read * channels * (KERNEL - 1) + at, mask=has_place & (read >= 0), other=0.0)
    x = tl.load(inputs + row * stride + channel, mask=has_channel, other=0.0)
    # Another thread may have read the place that a thread writes.
    tl.debug_barrier()
    after = state + write * channels * (KERNEL - 1)
    tl.store(after + at - 1, earlier, mask=has_place & (place > 0)[None, :])
    tl.store(after + channel * (KERNEL - 1) + KERNEL - 2, x.to(state.dtype.element_ty), mask=has_channel)
    total = tl.sum(earlier.to(tl.float32) * taps, axis=1) + x.to(tl.float32) * last
    if bias is not None:
        total += tl.load(bias + channel, mask=has_channel, other=0.0).to(tl.float32)
    total *= tl.sigmoid(total)
    tl.store(found + row * channels + channel, total.to(found.dtype.element_ty), mask=inside)


@triton.jit
def _gated_delta(
    convolved,
    strengths,
    log_rates,
    decay_bias,
    state,
    reads,
    writes,
    found,
    stride,
    strength_stride,
    key_heads,
    SERVED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program computes BLOCK elements of one value head of one row."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    key_head = head // SERVED
    read = tl.load(reads + row).to(tl.int64)
    write = tl.load(writes + row).to(tl.int64)
    key = tl.arange(0, KEYS)
    value = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    has_key = (key < KEY_DIM) & (write >= 0)
    has_value = (value < VALUE_DIM) & (write >= 0)

    line = convolved + row * stride
    q = tl.load(line + key_head * KEY_DIM + key, mask=has_key, other=0.0).to(tl.float32)
    k = tl.load(line + (key_heads + key_head) * KEY_DIM + key, mask=has_key, other=0.0).to(tl.float32)
    v = tl.load(line + 2 * key_heads * KEY_DIM + head * VALUE_DIM + value, mask=has_value, other=0.0).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, axis=0) + _LEAST_SQUARE) * KEY_DIM**-0.5
    k *= tl.rsqrt(tl.sum(k * k, axis=0) + _LEAST_SQUARE)
    spot = strengths + row * strength_stride + 2 * key_head * SERVED + head % SERVED
    beta = tl.sigmoid(tl.load(spot, mask=write >= 0, other=0.0).to(tl.float32))
    decay = _softplus(tl.load(spot + SERVED, mask=write >= 0, other=0.0).to(tl.float32) + tl.load(decay_bias + head))
    decay *= -tl.exp(tl.load(log_rates + head))

    heads = key_heads * SERVED
    inside = has_key[:, None] & has_value[None, :]
    at = key[:, None] * VALUE_DIM + value[None, :]
    before = state + (read * heads + head) * (KEY_DIM * VALUE_DIM) + at
    after = state + (write * heads + head) * (KEY_DIM * VALUE_DIM) + at
    s = tl.load(before, mask=inside & (read >= 0), other=0.0).to(tl.float32) * tl.exp(decay)
    written = beta * (v - tl.sum(s * k[:, None], axis=0))
    s += k[:, None] * written[None, :]
    tl.store(after, s.to(state.dtype.element_ty), mask=inside)
    given = tl.sum(s * q[:, None], axis=0)
    tl.store(found + (row * heads + head) * VALUE_DIM + value, given, mask=value < VALUE_DIM)


@triton.jit
def _mamba2(
    convolved,
    steps,
    step_bias,
    log_rates,
    skip,
    state,
    reads,
    writes,
    found,
    stride,
    step_stride,
    step_scale,
    least_step,
    most_step,
    groups,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    SIZES: tl.constexpr,
):
    """A program computes BLOCK elements of one head of one row."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    group = head // (heads // groups)
    read = tl.load(reads + row).to(tl.int64)
    write = tl.load(writes + row).to(tl.int64)
    element = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, SIZES)
    has_element = (element < HEAD_DIM) & (write >= 0)
    has_n = (n < SIZE) & (write >= 0)

    line = convolved + row * stride
    x = tl.load(line + head * HEAD_DIM + element, mask=has_element, other=0.0).to(tl.float32)
    line += heads * HEAD_DIM + group * SIZE
    b = tl.load(line + n, mask=has_n, other=0.0).to(tl.float32)
    c = tl.load(line + groups * SIZE + n, mask=has_n, other=0.0).to(tl.float32)
    step = tl.load(steps + row * step_stride + head, mask=write >= 0, other=0.0).to(tl.float32)
    step = _softplus(step * step_scale + tl.load(step_bias + head))
    step = tl.minimum(tl.maximum(step, least_step), most_step)
    rate = -tl.exp(tl.load(log_rates + head))

    inside = has_element[:, None] & has_n[None, :]
    at = element[:, None] * SIZE + n[None, :]
    before = state + (read * heads + head) * (HEAD_DIM * SIZE) + at
    after = state + (write * heads + head) * (HEAD_DIM * SIZE) + at
    h = tl.load(before, mask=inside & (read >= 0), other=0.0).to(tl.float32) * tl.exp(step * rate)
    h += (step * x)[:, None] * b[None, :]
    tl.store(after, h.to(state.dtype.element_ty), mask=inside)
    given = tl.sum(h * c[None, :], axis=1) + x * tl.load(skip + head)
    tl.store(found + (row * heads + head) * HEAD_DIM + element, given, mask=element < HEAD_DIM)


@triton.jit
def _mamba(
    x,
    steps,
    step_bias,
    b,
    c,
    log_rates,
    skip,
    state,
    reads,
    writes,
    found,
    stride,
    step_stride,
    b_stride,
    c_stride,
    channels,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    SIZES: tl.constexpr,
):
    """A program computes BLOCK channels of one row."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, SIZES)
    read = tl.load(reads + row).to(tl.int64)
    write = tl.load(writes + row).to(tl.int64)
    has_channel = (channel < channels) & (write >= 0)
    has_n = (n < SIZE) & (write >= 0)

    given = tl.load(x + row * stride + channel, mask=has_channel, other=0.0).to(tl.float32)
    step = tl.load(steps + row * step_stride + channel, mask=has_channel, other=0.0).to(tl.float32)
    step = _softplus(step + tl.load(step_bias + channel, mask=has_channel, other=0.0))
    entering = tl.load(b + row * b_stride + n, mask=has_n, other=0.0).to(tl.float32)
    leaving = tl.load(c + row * c_stride + n, mask=has_n, other=0.0).to(tl.float32)

    inside = has_channel[:, None] & has_n[None, :]
    at = channel[:, None] * SIZE + n[None, :]
    rates = -tl.exp(tl.load(log_rates + at, mask=inside, other=0.0))
    before = state + read * channels * SIZE + at
    after = state + write * channels * SIZE + at
    h = tl.load(before, mask=inside & (read >= 0), other=0.0).to(tl.float32) * tl.exp(step[:, None] * rates)
    h += (step * given)[:, None] * entering[None, :]
    tl.store(after, h.to(state.dtype.element_ty), mask=inside)
    given = tl.sum(h * leaving[None, :], axis=1) + given * tl.load(skip + channel, mask=has_channel, other=0.0)
    tl.store(found + row * channels + channel, given, mask=channel < channels)
