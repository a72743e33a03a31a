"""Multiplication by quantized weights on a CUDA device. They are read in their bits, and become numbers just before
they are multiplied.

For one row, threads multiply the weights that they have read. For more, tensor cores multiply, and weights are
rounded to the inputs' element type. They are the factor on the left, because it may stay in registers. Where there are
few tiles of outputs and rows, inputs are divided among several programs, whose sums another kernel adds up. For many
rows, the matrix is decoded for the time of the product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

from tenuto.kernels.quantized import LANES, Numbers, Quantized

_NARROW = 8192
"""With fewer outputs, more warps share a program of one row, because there are few programs."""
_PROGRAMS = 256
"""Inputs are divided until there are about as many programs."""
_MANY = 192
"""For more rows, it is faster to decode a matrix once, for the time of the product, and to let PyTorch multiply."""
_DECODED = 64
"""The number of outputs that a program decodes at a time."""
REGISTERS = 224
"""Registers of a thread; without a bound, the compiler sometimes takes so few that it has to spill some."""
_SWATH = 8
"""Neighbouring programs compute this many tiles of rows with the same weights, then the next weights."""

_LANES = tl.constexpr(LANES)
_INT4, _INT8, _FP8, _FP4 = (tl.constexpr(i) for i in range(4))
_KINDS = {Numbers.INT4: 0, Numbers.INT8: 1, Numbers.FP8: 2, Numbers.FP4: 3}


def linear(x: torch.Tensor, weight: Quantized, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiplies `x` [rows, inputs] by the transpose of `weight` and adds `bias` [outputs]. Sums are float32, in an
    order that does not depend on other rows, but on their number. The rows of `x` are contiguous. Returns [rows,
    outputs] in the element type of `x`."""
    rows, inputs = x.shape
    outputs, chunks = weight.words.shape[:2]
    found = torch.empty((rows, outputs), device=x.device, dtype=x.dtype)
    if rows == 0:
        return found
    constants = constants_of(weight)
    factors = x, weight.words, weight.scales, weight.minima, bias, found
    if rows == 1:
        block, together, warps = one_constants(weight)
        even = inputs % (together * weight.numbers.chunk) == 0
        _one[(triton.cdiv(outputs, block),)](
            *factors, inputs, outputs, chunks, EVEN=even, BLOCK=block, PARTS=together, **constants, num_warps=warps
        )
        return found
    if rows > _MANY:
        return functional.linear(x, decoded(weight, x.dtype), bias)
    block, tile, warps, stages = many_constants(rows, weight)
    tiles = triton.cdiv(outputs, block) * triton.cdiv(rows, tile)
    splits = max(1, min(_PROGRAMS // tiles, chunks // 4)) if rows <= 64 else 1
    parts = torch.empty((splits, rows, outputs), device=x.device) if splits > 1 else None
    even = inputs == chunks * weight.numbers.chunk
    _many[(tiles, splits)](
        *factors,
        rows,
        inputs,
        outputs,
        chunks,
        x.stride(0),
        parts,
        EVEN=even,
        BLOCK=block,
        ROWS=tile,
        SWATH=_SWATH,
        **constants,
        num_warps=warps,
        num_stages=stages,
        maxnreg=REGISTERS,
    )
    if parts is not None:
        _add_up[(triton.cdiv(outputs, 1024), rows)](parts, bias, found, rows, outputs, SPLITS=splits, BLOCK=1024)
    return found


def decoded(weight: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """Returns the weights in `dtype`, [outputs, inputs]."""
    outputs, chunks = weight.words.shape[:2]
    found = torch.empty((outputs, weight.inputs), device=weight.words.device, dtype=dtype)
    _decode[(triton.cdiv(outputs, _DECODED), chunks)](
        weight.words,
        weight.scales,
        weight.minima,
        found,
        weight.inputs,
        outputs,
        chunks,
        BLOCK=_DECODED,
        **constants_of(weight),
    )
    return found


def constants_of(weight: Quantized) -> dict[str, int]:
    """Returns the constants that all kernels for a matrix of this type have."""
    return {
        "KIND": _KINDS[weight.numbers],
        "GROUP": weight.group,
        "GROUPS": len(weight.scales),
        "CHUNK": weight.numbers.chunk,
    }


def one_constants(weight: Quantized) -> tuple[int, int, int]:
    """Returns the outputs of a block of one row, the chunks that are loaded at a time, and the warps."""
    if len(weight.words) < _NARROW:
        return (16, 8, 16) if weight.minima is None else (8, 4, 8)  # minima take registers
    return 32, weight.numbers.bits // 4, 4


def many_constants(rows: int, weight: Quantized) -> tuple[int, int, int, int]:
    """Returns the outputs and rows of a tile, its warps and the stages of its loads."""
    tile = min(max(triton.next_power_of_2(rows), 16), 64)
    large = weight.numbers.bits == 8 and weight.group >= LANES  # scales of smaller groups take registers
    return 128 if tile == 16 or (tile == 64 and large) else 64, tile, 4, 3


@triton.jit
def _numbers(words, scale, minimum, PLACE: tl.constexpr, KIND: tl.constexpr):
    """Returns the weights, float32, whose numbers are number PLACE of words; see `kernels.quantized`. Bits of integers
    become those of a float between a power of two and the next, without a conversion."""
    if KIND == _FP8:
        # Sign, exponent and mantissa where float32 has its own; the value is 2 ** 120 times too small, the scale as
        # much too large.
        bits = ((words << (24 - 8 * PLACE)) >> 4) & -0x78100000
        return bits.to(tl.float32, bitcast=True) * scale
    if KIND == _FP4:  # the same, 2 ** 126 times too small
        bits = ((words << (28 - 4 * PLACE)) >> 6) & -0x7E400000
        return bits.to(tl.float32, bitcast=True) * 1.8446744073709552e19 * scale  # 2 ** 64
    each: tl.constexpr = 8 if KIND == _INT8 else 4
    at: tl.constexpr = 12 + each * PLACE % 8
    shift: tl.constexpr = each * PLACE - at
    moved = words >> shift if shift > 0 else words << -shift
    bits = moved & (2**each - 1 << at) | (150 - at << 23)
    return bits.to(tl.float32, bitcast=True) * scale + (minimum - 2.0 ** (23 - at) * scale)


@triton.jit
def _scaled(scales, minima, place, KIND: tl.constexpr):
    """Returns scales and minima, float32."""
    if KIND == _FP4:
        exponent = tl.load(scales + place).to(tl.int32) + 62  # 2 ** 62 times as much, see `_numbers`
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        return scale, scale
    scale = tl.load(scales + place).to(tl.float32)
    if KIND == _FP8:
        scale *= 1.329227995784916e36  # 2 ** 120, see `_numbers`
        minimum = scale  # not used
    elif minima is not None:
        minimum = tl.load(minima + place).to(tl.float32)
    else:
        minimum = scale * (-8.0 if KIND == _INT4 else -128.0)
    return scale, minimum


@triton.jit
def _scaled_lanes(
    scales, minima, group, output, outputs, KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr
):
    """Returns scales and minima of a row of lanes, float32 [outputs, 1]; [outputs, lanes] if two groups share it."""
    scale, minimum = _scaled(scales, minima, tl.minimum(group, GROUPS - 1) * outputs + output, KIND)
    scale, minimum = scale[:, None], minimum[:, None]
    if GROUP < _LANES:
        later = (tl.arange(0, _LANES) >= GROUP)[None, :]
        second, least = _scaled(scales, minima, tl.minimum(group + 1, GROUPS - 1) * outputs + output, KIND)
        scale, minimum = tl.where(later, second[:, None], scale), tl.where(later, least[:, None], minimum)
    return scale, minimum


@triton.jit
def _tiny_numbers(words, scale, minimum, PLACE: tl.constexpr, KIND: tl.constexpr):
    """Returns what `_numbers` does, 2 ** 64 times too small. One instruction takes the bits of a number out of a word:
    where float32 has the highest bits of its mantissa and the lowest of its exponent, they count up from 0."""
    if KIND >= _FP8:  # or FP4
        return _numbers(words, scale * 5.421010862427522e-20, minimum, PLACE, KIND)  # 2 ** -64
    each: tl.constexpr = 8 if KIND == _INT8 else 4
    at: tl.constexpr = 16 + each * PLACE % 8
    shift: tl.constexpr = each * PLACE - at
    moved = words >> shift if shift > 0 else words << -shift
    bits = (moved & (2**each - 1 << at)).to(tl.float32, bitcast=True)  # the number times 2 ** (at - 149)
    return bits * (scale * 2.0 ** (85 - at)) + minimum * 5.421010862427522e-20


@triton.jit
def _one(
    x,
    words,
    scales,
    minima,
    bias,
    found,
    inputs,
    outputs,
    chunks,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A program computes BLOCK outputs of the row, PARTS chunks at a time, while it loads the next ones. Each thread
    adds up its own lanes."""
    output = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    last = tl.minimum(output, outputs - 1)  # outputs behind the last are computed like it, and not stored
    kept = last[:, None, None]
    lane = tl.arange(0, _LANES)[None, None, :]
    part = tl.arange(0, PARTS)[None, :, None]
    own = words + kept.to(tl.int64) * chunks * _LANES + lane
    sums = tl.zeros([BLOCK, PARTS, _LANES], tl.float32)
    following = tl.load(own + part * _LANES, mask=part < chunks, other=0)
    for first in range(0, chunks, PARTS):
        chunk = first + part
        w = following
        following = tl.load(own + (chunk + PARTS) * _LANES, mask=chunk + PARTS < chunks, other=0)
        for place in tl.static_range(CHUNK // _LANES):
            at = chunk * CHUNK + place * _LANES
            if place * _LANES % GROUP == 0:
                group = (at + lane if GROUP < _LANES else at) // GROUP
                scale, minimum = _scaled(scales, minima, tl.minimum(group, GROUPS - 1) * outputs + kept, KIND)
            v = tl.load(x + at + lane) if EVEN else tl.load(x + at + lane, mask=at < inputs, other=0.0)
            sums += _tiny_numbers(w, scale, minimum, place, KIND) * v.to(tl.float32)
    total = tl.sum(tl.sum(sums, axis=2), axis=1) * 1.8446744073709552e19  # 2 ** 64
    if bias is not None:
        total += tl.load(bias + last).to(tl.float32)
    tl.store(found + output, total.to(found.dtype.element_ty), mask=output < outputs)


@triton.jit
def add_chunk(
    sums,
    values,
    present,
    words,
    scales,
    minima,
    output,
    chunk,
    inputs,
    outputs,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Returns `sums`, float32 [outputs, rows], with the products of one chunk of the inputs added. `values`: where the
    first inputs of rows are, [lanes, rows]; unless EVEN, rows that are not `present` are 0. `words`: where the first
    ones of outputs are, [outputs, lanes]. `output`: the numbers of these among all `outputs` of the matrix."""
    w = tl.load(words + chunk * _LANES)
    for place in tl.static_range(CHUNK // _LANES):
        at = chunk * CHUNK + place * _LANES
        if place * _LANES % GROUP == 0:
            scale, minimum = _scaled_lanes(scales, minima, at // GROUP, output, outputs, KIND, GROUP, GROUPS)
        v = tl.load(values + at) if EVEN else tl.load(values + at, mask=(at < inputs) & present[None, :], other=0.0)
        weights = _numbers(w, scale, minimum, place, KIND).to(v.dtype)
        sums = tl.dot(weights, v, sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["rows"])
def _many(
    x,
    words,
    scales,
    minima,
    bias,
    found,
    rows,
    inputs,
    outputs,
    chunks,
    stride,
    parts,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SWATH: tl.constexpr,
):
    """A program computes BLOCK outputs of ROWS rows, from one part of the inputs. Its grid is [tiles, parts of the
    inputs]. With `parts`, float32 [parts, rows, outputs], it stores sums there."""
    tall, wide = tl.cdiv(rows, ROWS), tl.cdiv(outputs, BLOCK)
    swath = tl.program_id(0) // (SWATH * wide)
    height = tl.minimum(tall - swath * SWATH, SWATH)
    within = tl.program_id(0) % (SWATH * wide)
    row = (swath * SWATH + within % height) * ROWS + tl.arange(0, ROWS)
    output = within // height * BLOCK + tl.arange(0, BLOCK)
    kept = tl.minimum(output, outputs - 1)
    lane = tl.arange(0, _LANES)
    own = words + kept.to(tl.int64)[:, None] * chunks * _LANES + lane[None, :]
    values = x + tl.minimum(row, rows - 1).to(tl.int64)[None, :] * stride + lane[:, None]
    each = tl.cdiv(chunks, tl.num_programs(1))
    begin = tl.program_id(1) * each
    sums = tl.zeros([BLOCK, ROWS], tl.float32)
    for chunk in range(begin, tl.minimum(begin + each, chunks)):
        sums = add_chunk(
            sums,
            values,
            row < rows,
            own,
            scales,
            minima,
            kept,
            chunk,
            inputs,
            outputs,
            KIND,
            GROUP,
            GROUPS,
            CHUNK,
            EVEN,
        )
    inside = (row < rows)[None, :] & (output < outputs)[:, None]
    spots = row.to(tl.int64)[None, :] * outputs + output[:, None]
    if parts is not None:
        tl.store(parts + tl.program_id(1).to(tl.int64) * rows * outputs + spots, sums, mask=inside)
    else:
        if bias is not None:
            sums += tl.load(bias + kept).to(tl.float32)[:, None]
        tl.store(found + spots, sums.to(found.dtype.element_ty), mask=inside)


@triton.jit
def _decode(
    words,
    scales,
    minima,
    found,
    inputs,
    outputs,
    chunks,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program decodes a chunk of BLOCK outputs. Its grid is [blocks, chunks]."""
    output = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = tl.minimum(output, outputs - 1)
    lane = tl.arange(0, _LANES)
    chunk = tl.program_id(1)
    w = tl.load(words + (kept.to(tl.int64)[:, None] * chunks + chunk) * _LANES + lane[None, :])
    spots = found + output.to(tl.int64)[:, None] * inputs + lane[None, :]
    for place in tl.static_range(CHUNK // _LANES):
        at = chunk * CHUNK + place * _LANES
        if place * _LANES % GROUP == 0:
            scale, minimum = _scaled_lanes(scales, minima, at // GROUP, kept, outputs, KIND, GROUP, GROUPS)
        weights = _numbers(w, scale, minimum, place, KIND)
        tl.store(spots + at, weights.to(found.dtype.element_ty), mask=(output < outputs)[:, None] & (at < inputs))


@triton.jit(do_not_specialize=["rows"])
def _add_up(parts, bias, found, rows, outputs, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """A program adds up BLOCK outputs of a row."""
    output = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = output < outputs
    spots = tl.program_id(1).to(tl.int64) * outputs + output
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(SPLITS):
        total += tl.load(parts + split * rows.to(tl.int64) * outputs + spots, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(found + spots, total.to(found.dtype.element_ty), mask=inside)
