"""The Triton functions of `recurrent`, which says what they compute. Capital arguments are known at compilation.

A program computes a part of one row, one input after another: those that the row absorbs, then its own tokens. Without
`spans` (see `kernels.recurrent.Slots`) a row has one token, whose index is the row's, and absorbs and keeps nothing.
`tokens` is the number of all tokens. Behind theirs, `convolve` has `most` results for each row: those of the inputs
that it absorbs, and some that are undefined.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LEAST_SQUARE = tl.constexpr(1e-6)
"""Added to the squared length of queries and keys, as in `models.gated_delta`."""


@triton.jit
def _span(spans, row):
    """Returns a row's id, the index of its first token, the number of its tokens, how many inputs it absorbs, and
    whether it keeps those of its tokens."""
    rows = tl.num_programs(0)
    spans += row
    ident = tl.load(spans).to(tl.int64)
    first = tl.load(spans + rows).to(tl.int64)
    return ident, first, tl.load(spans + 2 * rows), tl.load(spans + 3 * rows), tl.load(spans + 4 * rows)


@triton.jit
def _place(t, absorbed, first, row, tokens, most):
    """Returns the index of the row's input `t` among the results of `convolve`."""
    return tl.where(t < absorbed, tokens + row * most + t, first + t - absorbed)


@triton.jit
def _softplus(x):
    """Returns log(1 + exp(x)), also accurate where exp(x) is far less than 1 (Goldberg, "What every computer scientist
    should know about floating-point arithmetic", theorem 4)."""
    grown = tl.exp(tl.minimum(x, 20.0))
    total = 1.0 + grown
    small = tl.where(total == 1.0, grown, tl.log(total) * (grown / tl.where(total == 1.0, 1.0, total - 1.0)))
    return tl.where(x > 20.0, x, small)


@triton.jit(do_not_specialize=["tokens"])
def convolve(
    inputs,
    others,
    weight,
    bias,
    state,
    reads,
    writes,
    spans,
    kept,
    found,
    tokens,
    stride,
    other_stride,
    channels,
    width,
    most,
    KERNEL: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program computes BLOCK of the `width` columns of one row: channels, then others, which are only copied. It
    alone reads and writes their state and their kept inputs."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, PLACES)
    read = tl.load(reads + row).to(tl.int64)
    write = tl.load(writes + row).to(tl.int64)
    first = row
    count = 1
    absorbed = 0
    end = 1
    if spans is not None:
        ident, first, count, absorbed, keeps = _span(spans, row)
        end = tl.where(keeps > 0, absorbed, absorbed + count)
        if kept is not None:
            kept += ident * most * width
    present = (column < width) & (write >= 0)
    has_channel = present & (column < channels)
    has_place = has_channel[:, None] & (place < KERNEL - 1)[None, :]
    at = column[:, None] * (KERNEL - 1) + place[None, :]
    taps = tl.load(weight + at + column[:, None], mask=has_place, other=0.0).to(tl.float32)
    last = tl.load(weight + column * KERNEL + KERNEL - 1, mask=has_channel, other=0.0).to(tl.float32)
    offset = tl.zeros([BLOCK], tl.float32)
    if bias is not None:
        offset += tl.load(bias + column, mask=has_channel, other=0.0).to(tl.float32)
    before = state + read * channels * (KERNEL - 1) + at
    has_before = has_place & (read >= 0)
    own = inputs + first * stride + column
    beside = others + first * other_stride + column - channels
    for t in range(absorbed + count):
        x = _input(own, beside, kept, t, absorbed, column, present, channels, stride, other_stride, width)
        earlier = _earlier(own, kept, before, t, absorbed, column, has_place, has_before, stride, width, KERNEL, PLACES)
        total = tl.sum(earlier * taps, axis=1) + x * last + offset
        total *= tl.sigmoid(total)
        total = tl.where(column < channels, total, x)
        spot = _place(t, absorbed, first, row, tokens, most) * width + column
        tl.store(found + spot, total.to(found.dtype.element_ty), mask=column < width)
    earlier = _earlier(own, kept, before, end, absorbed, column, has_place, has_before, stride, width, KERNEL, PLACES)
    # Another thread may have read the place that a thread writes.
    tl.debug_barrier()
    tl.store(state + write * channels * (KERNEL - 1) + at, earlier.to(state.dtype.element_ty), mask=has_place)
    if kept is not None:
        for t in range(tl.where(keeps > 0, count, 0)):
            x = _input(own, beside, None, t, 0, column, present, channels, stride, other_stride, width)
            tl.store(kept + t * width + column, x, mask=present)


@triton.jit
def _input(own, beside, kept, t, absorbed, column, present, channels, stride, other_stride, width):
    """Returns input `t` of a row, float32 [BLOCK]. `own` and `beside` are those of its first token."""
    new = present & (t >= absorbed)
    x = tl.load(own + (t - absorbed) * stride, mask=new & (column < channels), other=0.0).to(tl.float32)
    x += tl.load(beside + (t - absorbed) * other_stride, mask=new & (column >= channels), other=0.0).to(tl.float32)
    if kept is not None:
        x += tl.load(kept + t * width + column, mask=present & (t < absorbed), other=0.0)
    return x


@triton.jit
def _earlier(
    own,
    kept,
    before,
    t,
    absorbed,
    column,
    has_place,
    has_before,
    stride,
    width,
    KERNEL: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Returns the inputs before input `t` of a row that a convolution reads, float32 [BLOCK, PLACES]. `before` points
    at those before the row's first one."""
    at = (t - (KERNEL - 1) + tl.arange(0, PLACES))[None, :]
    x = tl.load(before + t, mask=has_before & (at < 0), other=0.0).to(tl.float32)
    fresh = has_place & (at >= absorbed)
    x += tl.load(own[:, None] + (at - absorbed) * stride, mask=fresh, other=0.0).to(tl.float32)
    if kept is not None:
        replayed = has_place & (at >= 0) & (at < absorbed)
        x += tl.load(kept + at * width + column[:, None], mask=replayed, other=0.0)
    return x


@triton.jit(do_not_specialize=["tokens"])
def gated_delta(
    convolved,
    strengths,
    log_rates,
    decay_bias,
    state,
    reads,
    writes,
    spans,
    found,
    tokens,
    stride,
    strength_stride,
    key_heads,
    most,
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
    first = row
    count = 1
    absorbed = 0
    keeps = 0
    if spans is not None:
        _, first, count, absorbed, keeps = _span(spans, row)
    key = tl.arange(0, KEYS)
    value = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    has_key = (key < KEY_DIM) & (write >= 0)
    has_value = (value < VALUE_DIM) & (write >= 0)
    bias = tl.load(decay_bias + head)
    rate = -tl.exp(tl.load(log_rates + head))

    heads = key_heads * SERVED
    inside = has_key[:, None] & has_value[None, :]
    at = key[:, None] * VALUE_DIM + value[None, :]
    before = state + (read * heads + head) * (KEY_DIM * VALUE_DIM) + at
    after = state + (write * heads + head) * (KEY_DIM * VALUE_DIM) + at
    s = tl.load(before, mask=inside & (read >= 0), other=0.0).to(tl.float32)
    for t in range(absorbed + count):
        if spans is not None:
            tl.store(after, s.to(state.dtype.element_ty), mask=inside & (keeps > 0) & (t == absorbed))
        place = _place(t, absorbed, first, row, tokens, most)
        line = convolved + place * stride
        q = tl.load(line + key_head * KEY_DIM + key, mask=has_key, other=0.0).to(tl.float32)
        k = tl.load(line + (key_heads + key_head) * KEY_DIM + key, mask=has_key, other=0.0).to(tl.float32)
        v = tl.load(line + 2 * key_heads * KEY_DIM + head * VALUE_DIM + value, mask=has_value, other=0.0)
        q *= tl.rsqrt(tl.sum(q * q, axis=0) + _LEAST_SQUARE) * KEY_DIM**-0.5
        k *= tl.rsqrt(tl.sum(k * k, axis=0) + _LEAST_SQUARE)
        spot = strengths + place * strength_stride + 2 * key_head * SERVED + head % SERVED
        beta = tl.sigmoid(tl.load(spot, mask=write >= 0, other=0.0).to(tl.float32))
        decay = rate * _softplus(tl.load(spot + SERVED, mask=write >= 0, other=0.0).to(tl.float32) + bias)
        s *= tl.exp(decay)
        written = beta * (v.to(tl.float32) - tl.sum(s * k[:, None], axis=0))
        s += k[:, None] * written[None, :]
        given = tl.sum(s * q[:, None], axis=0)
        spot = found + (place * heads + head) * VALUE_DIM + value
        tl.store(spot, given, mask=(value < VALUE_DIM) & (t >= absorbed))
    tl.store(after, s.to(state.dtype.element_ty), mask=inside & (keeps == 0))


@triton.jit(do_not_specialize=["tokens"])
def mamba2(
    convolved,
    steps,
    step_bias,
    log_rates,
    skip,
    state,
    reads,
    writes,
    spans,
    found,
    tokens,
    stride,
    step_stride,
    step_scale,
    least_step,
    most_step,
    groups,
    most,
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
    first = row
    count = 1
    absorbed = 0
    keeps = 0
    if spans is not None:
        _, first, count, absorbed, keeps = _span(spans, row)
    element = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, SIZES)
    has_element = (element < HEAD_DIM) & (write >= 0)
    has_n = (n < SIZE) & (write >= 0)
    bias = tl.load(step_bias + head)
    rate = -tl.exp(tl.load(log_rates + head))
    through = tl.load(skip + head)

    inside = has_element[:, None] & has_n[None, :]
    at = element[:, None] * SIZE + n[None, :]
    before = state + (read * heads + head) * (HEAD_DIM * SIZE) + at
    after = state + (write * heads + head) * (HEAD_DIM * SIZE) + at
    h = tl.load(before, mask=inside & (read >= 0), other=0.0).to(tl.float32)
    for t in range(absorbed + count):
        if spans is not None:
            tl.store(after, h.to(state.dtype.element_ty), mask=inside & (keeps > 0) & (t == absorbed))
        place = _place(t, absorbed, first, row, tokens, most)
        line = convolved + place * stride
        x = tl.load(line + head * HEAD_DIM + element, mask=has_element, other=0.0).to(tl.float32)
        line += heads * HEAD_DIM + group * SIZE
        b = tl.load(line + n, mask=has_n, other=0.0).to(tl.float32)
        c = tl.load(line + groups * SIZE + n, mask=has_n, other=0.0).to(tl.float32)
        step = tl.load(steps + place * step_stride + head, mask=write >= 0, other=0.0).to(tl.float32)
        step = tl.minimum(tl.maximum(_softplus(step * step_scale + bias), least_step), most_step)
        h *= tl.exp(step * rate)
        h += (step * x)[:, None] * b[None, :]
        given = tl.sum(h * c[None, :], axis=1) + x * through
        spot = found + (place * heads + head) * HEAD_DIM + element
        tl.store(spot, given, mask=(element < HEAD_DIM) & (t >= absorbed))
    tl.store(after, h.to(state.dtype.element_ty), mask=inside & (keeps == 0))


@triton.jit(do_not_specialize=["tokens"])
def mamba(
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
    spans,
    found,
    tokens,
    stride,
    step_stride,
    b_stride,
    c_stride,
    channels,
    most,
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
    first = row
    count = 1
    absorbed = 0
    keeps = 0
    if spans is not None:
        _, first, count, absorbed, keeps = _span(spans, row)
    has_channel = (channel < channels) & (write >= 0)
    has_n = (n < SIZE) & (write >= 0)
    bias = tl.load(step_bias + channel, mask=has_channel, other=0.0)
    through = tl.load(skip + channel, mask=has_channel, other=0.0)

    inside = has_channel[:, None] & has_n[None, :]
    at = channel[:, None] * SIZE + n[None, :]
    rates = -tl.exp(tl.load(log_rates + at, mask=inside, other=0.0))
    after = state + write * channels * SIZE + at
    h = tl.load(state + read * channels * SIZE + at, mask=inside & (read >= 0), other=0.0).to(tl.float32)
    for t in range(absorbed + count):
        if spans is not None:
            tl.store(after, h.to(state.dtype.element_ty), mask=inside & (keeps > 0) & (t == absorbed))
        place = _place(t, absorbed, first, row, tokens, most)
        given = tl.load(x + place * stride + channel, mask=has_channel, other=0.0).to(tl.float32)
        step = tl.load(steps + place * step_stride + channel, mask=has_channel, other=0.0).to(tl.float32)
        step = _softplus(step + bias)
        entering = tl.load(b + place * b_stride + n, mask=has_n, other=0.0).to(tl.float32)
        leaving = tl.load(c + place * c_stride + n, mask=has_n, other=0.0).to(tl.float32)
        h *= tl.exp(step[:, None] * rates)
        h += (step * given)[:, None] * entering[None, :]
        given = tl.sum(h * leaving[None, :], axis=1) + given * through
        tl.store(found + place * channels + channel, given, mask=(channel < channels) & (t >= absorbed))
    tl.store(after, h.to(state.dtype.element_ty), mask=inside & (keeps == 0))
