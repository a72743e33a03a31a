"""The Triton functions of `steps`, which says what they compute. Capital arguments are known at compilation. Host
memory is read past the caches, which may hold an earlier step."""

from __future__ import annotations

import triton
import triton.language as tl

from tenuto.kernels.sampling import OPTIONS

_OPTIONS = tl.constexpr(len(OPTIONS.names or ()))
_PREVIOUS = tl.constexpr(-1)
"""`base.plan.PREVIOUS_SAMPLE`."""
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST_FACTOR, _SECOND_FACTOR = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)
"""Constants of `kernels.sampling.uniforms`."""

_START, _SAMPLES, _OUTPUT, _ID, _FIRST, _COUNT = (tl.constexpr(i) for i in range(6))
"""The numbers of fields of a row, see `steps.OWN`."""
_NEVER = tl.constexpr(2**30)
"""The index of the first token and of the first sample of no row: behind all others."""
_NO_SLOT = tl.constexpr(-1)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * _FIRST_FACTOR
    x = (x ^ (x >> 27)) * _SECOND_FACTOR
    return x ^ (x >> 31)


@triton.jit
def begin(
    turn,
    place,
    counts,
    numbers,
    found,
    rows,
    most,
    counted,
    lines,
    FIELDS: tl.constexpr,
    OWN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program reads BLOCK rows."""
    entry = tl.load(turn)
    if tl.program_id(0) == 0:
        tl.store(place, entry)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    stored = i < rows
    given = i < tl.load(counts + entry * counted, cache_modifier=".cv")
    numbers += entry * lines * most + i
    for field in tl.static_range(FIELDS):
        absent = 0
        if field >= OWN:
            absent = _NO_SLOT
        if field == _FIRST:
            absent = _NEVER
        if field == _OUTPUT:
            absent = _NEVER
        value = tl.load(numbers + field * most, given, absent, cache_modifier=".cv")
        tl.store(found + field * rows + i, value, stored)
    start = tl.load(numbers + _START * most, given, 0, cache_modifier=".cv")
    count = tl.load(numbers + _COUNT * most, given, 0, cache_modifier=".cv")
    tl.store(found + FIELDS * rows + i, tl.where(count == 1, start, -1), stored)


@triton.jit
def _row_of(lines, i, rows, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Returns the last row whose entry of `lines` is at most `i`, which is [BLOCK], or -1."""
    row = tl.zeros([BLOCK], tl.int32) - 1
    for begin in range(0, rows, CHUNK):
        r = begin + tl.arange(0, CHUNK)
        firsts = tl.load(lines + r, r < rows, _NEVER)
        row += tl.sum((firsts[None, :] <= i[:, None]).to(tl.int32), axis=1)
    return row


@triton.jit
def select(
    place,
    counts,
    records,
    whole,
    numbers,
    found,
    floats,
    top_k,
    rows,
    outputs,
    most,
    counted,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A program finds BLOCK samples and reads their options."""
    entry = tl.load(place)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    stored = i < outputs
    given = i < tl.load(counts + entry * counted + 2, cache_modifier=".cv")
    row = _row_of(numbers + _OUTPUT * rows, i, rows, BLOCK, CHUNK)
    count = tl.load(numbers + _COUNT * rows + row, given, 0)
    left = tl.load(numbers + _SAMPLES * rows + row, given, 0) + tl.load(numbers + _OUTPUT * rows + row, given, 0) - i
    token = tl.load(numbers + _FIRST * rows + row, given, 0) + count - left
    tl.store(found + i, tl.where(given, token, 0), stored)
    owner = tl.load(numbers + _ID * rows + row, given, -1)
    tl.store(found + outputs + i, tl.where(left == 1, owner, -1), stored)
    record = (entry * most + row) * _OPTIONS
    for field in tl.static_range(3):
        value = tl.load(records + record + field, given, 0.0, cache_modifier=".cv")
        tl.store(floats + field * outputs + i, value, stored)
    k = tl.load(whole + record + 3, given, 0, cache_modifier=".cv")
    tl.store(top_k + i, k.to(tl.int32), stored)
    seed = tl.load(whole + record + 4, given, 0, cache_modifier=".cv").to(tl.uint64)
    position = tl.load(numbers + _START * rows + row, given, 0) + count - left + 1
    state = _mix(seed + _GOLDEN) + tl.where(given, position + 1, 0).to(tl.uint64) * _GOLDEN
    uniform = (_mix(state) >> 12).to(tl.int64).to(tl.float64) * 2.220446049250313e-16  # 2 ** -52
    tl.store(floats + 3 * outputs + i, uniform, stored)


@triton.jit
def trace(
    place,
    counts,
    inputs,
    numbers,
    found,
    rows,
    outputs,
    most,
    counted,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A program finds BLOCK samples: their rows, positions, and guesses."""
    entry = tl.load(place)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    stored = i < outputs
    given = i < tl.load(counts + entry * counted + 2, cache_modifier=".cv")
    row = _row_of(numbers + _OUTPUT * rows, i, rows, BLOCK, CHUNK)
    count = tl.load(numbers + _COUNT * rows + row, given, 0)
    samples = tl.load(numbers + _SAMPLES * rows + row, given, 0)
    left = samples + tl.load(numbers + _OUTPUT * rows + row, given, 0) - i
    token = tl.load(numbers + _FIRST * rows + row, given, 0) + count - left
    guess = tl.load(inputs + entry * most + token, given & (left < samples), -1, cache_modifier=".cv")
    tl.store(found + i, tl.load(numbers + _ID * rows + row, given, -1), stored)
    tl.store(found + outputs + i, tl.load(numbers + _START * rows + row, given, 0) + count - left + 1, stored)
    tl.store(found + 2 * outputs + i, guess, stored)


@triton.jit
def single(place, inputs, alone, ids, sampled, found, rows, most, BLOCK: tl.constexpr):
    """A program reads the tokens of BLOCK rows."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    given = tl.load(alone + i, i < rows, -1) >= 0
    token = tl.load(inputs + tl.load(place) * most + i, given, 0, cache_modifier=".cv")
    owner = tl.load(ids + i, given, 0)
    token = tl.where(token == _PREVIOUS, tl.load(sampled + owner, given, 0), token)
    tl.store(found + i, token, i < rows)


@triton.jit
def spread(
    place,
    counts,
    inputs,
    numbers,
    sampled,
    found,
    tiles,
    rows,
    tokens,
    most_tiles,
    most,
    counted,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A program reads BLOCK tokens. Those that begin tiles write these to their places, by the number of tiles with
    more keys, and of those with as many in earlier rows. It looks at CHUNK rows at a time."""
    entry = tl.load(place)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    given = i < tl.load(counts + entry * counted + 1, cache_modifier=".cv")
    row = _row_of(numbers + _FIRST * rows, i, rows, BLOCK, CHUNK)
    owner = tl.load(numbers + _ID * rows + row, given, 0)
    start = tl.load(numbers + _START * rows + row, given, 0)
    count = tl.load(numbers + _COUNT * rows + row, given, 0)
    within = i - tl.load(numbers + _FIRST * rows + row, given, 0)
    token = tl.load(inputs + entry * most + i, given, 0, cache_modifier=".cv")
    token = tl.where(token == _PREVIOUS, tl.load(sampled + owner, given, 0), token)
    position = tl.where(given, start + within, -1)
    tl.store(found + i, token, i < tokens)
    tl.store(found + tokens + i, owner, i < tokens)
    tl.store(found + 2 * tokens + i, position, i < tokens)

    size = tl.minimum(count - within, TILE)
    keys = position + size
    rank = tl.zeros([BLOCK], tl.int32)
    total = tl.full((), 0, tl.int32)
    for begin in range(0, rows, CHUNK):
        r = begin + tl.arange(0, CHUNK)
        starts = tl.load(numbers + _START * rows + r, r < rows, 0)
        many = tl.load(numbers + _COUNT * rows + r, r < rows, 0)
        pieces = tl.where(many > 1, tl.cdiv(many, TILE), 0)
        reached = tl.maximum(keys[:, None] - starts[None, :], 0)  # of each row's tokens by that many keys
        whole = reached >= many[None, :]
        fewer = tl.where(whole, pieces[None, :], reached // TILE)  # tiles of the row with no more keys
        ends = (reached > 0) & (reached % TILE == 0) & (reached < many[None, :]) | (reached == many[None, :])
        tied = ends & (many > 1)[None, :] & (r[None, :] < row[:, None])
        rank += tl.sum(pieces[None, :] - fewer + tied.to(tl.int32), axis=1)
        total += tl.sum(pieces, axis=0)
    first = given & (count > 1) & (within % TILE == 0)
    tl.store(tiles + 4 * rank, owner, first)
    tl.store(tiles + 4 * rank + 1, i, first)
    tl.store(tiles + 4 * rank + 2, position, first)
    tl.store(tiles + 4 * rank + 3, size, first)
    spare = (i >= total) & (i < most_tiles)
    for field in tl.static_range(4):
        tl.store(tiles + 4 * i + field, tl.zeros([BLOCK], tl.int32), spare)


@triton.jit
def adapters_of(numbers, found, rows, tokens, ADAPTER: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """A program finds the adapters of BLOCK tokens."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = _row_of(numbers + _FIRST * rows, i, rows, BLOCK, CHUNK)
    within = i - tl.load(numbers + _FIRST * rows + row, row >= 0, 0)
    given = (row >= 0) & (within < tl.load(numbers + _COUNT * rows + row, row >= 0, 0))
    tl.store(found + i, tl.load(numbers + ADAPTER * rows + row, given, 0).to(tl.int64), i < tokens)


@triton.jit
def change(
    place,
    counts,
    changes,
    table,
    stride,
    most,
    counted,
    lines,
    NUMBER: tl.constexpr,
    CHANGED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program makes BLOCK changes."""
    entry = tl.load(place)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    given = i < tl.load(counts + entry * counted + 3 + NUMBER, cache_modifier=".cv")
    changes += (entry * lines + CHANGED * NUMBER) * most + i
    owner = tl.load(changes, given, 0, cache_modifier=".cv").to(tl.int64)
    index = tl.load(changes + most, given, 0, cache_modifier=".cv")
    page = tl.load(changes + 2 * most, given, 0, cache_modifier=".cv")
    tl.store(table + owner * stride + index, page, given)


@triton.jit
def allow(
    place,
    counts,
    masked,
    masks,
    logits,
    vocab,
    stride,
    most,
    most_masks,
    words,
    counted,
    WORDS: tl.constexpr,
):
    """A program masks 32 * WORDS logits of one sample. Its grid is [samples, blocks]."""
    entry = tl.load(place)
    i = tl.program_id(0)
    given = i < tl.load(counts + entry * counted + 2, cache_modifier=".cv")
    mask = tl.load(masked + entry * most + i, given, -1, cache_modifier=".cv")
    if mask >= 0:
        word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
        line = masks + (entry * most_masks + mask).to(tl.int64) * words
        bits = tl.load(line + word, word < words, 0, cache_modifier=".cv")
        bit = tl.arange(0, 32)
        at = word[:, None] * 32 + bit[None, :]
        refused = ((bits[:, None] >> bit[None, :]) & 1) == 0
        spot = logits + i.to(tl.int64) * stride + at
        tl.store(spot, tl.full([WORDS, 32], float("-inf"), tl.float32), refused & (at < vocab))


@triton.jit
def report(
    place,
    counts,
    chosen,
    ids,
    top,
    chosen_there,
    ids_there,
    top_there,
    samples,
    width,
    ids_stride,
    top_stride,
    most,
    counted,
    LIKELIEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program copies BLOCK of all likeliest tokens, and of the samples, as far as there are any."""
    entry = tl.load(place)
    samples = tl.minimum(samples, tl.load(counts + entry * counted + 2, cache_modifier=".cv"))
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(chosen_there + entry * most + i, tl.load(chosen + i, i < samples, 0.0), i < samples)
    sample, rank = i // tl.maximum(width, 1), i % tl.maximum(width, 1)
    given = i < samples * width
    spot = (entry * most + sample) * LIKELIEST + rank
    tl.store(ids_there + spot, tl.load(ids + sample * ids_stride + rank, given, 0).to(tl.int32), given)
    tl.store(top_there + spot, tl.load(top + sample * top_stride + rank, given, 0.0), given)


@triton.jit
def finish(
    turn,
    place,
    counts,
    owners,
    found,
    sampled,
    tokens,
    outputs,
    most,
    counted,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program stores BLOCK sampled tokens, on the device and in host memory."""
    entry = tl.load(place)
    if tl.program_id(0) == 0:
        tl.store(turn, (entry + 1) % ENTRIES)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    given = (i < outputs) & (i < tl.load(counts + entry * counted + 2, cache_modifier=".cv"))
    token = tl.load(found + i, given, 0).to(tl.int32)
    owner = tl.load(owners + i, given, -1)
    tl.store(sampled + owner, token, owner >= 0)
    tl.store(tokens + entry * most + i, token, given)
