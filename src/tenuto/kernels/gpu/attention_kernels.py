"""The Triton functions of `attention`, which says what they compute. Capital arguments are known at compilation.

Softmax is computed online (Milakov and Gimelshein, arXiv:1805.02867), with powers of two instead of e. A program keeps,
for each of its queries, the highest score so far, the sum of the weights relative to it, and the weighted sum of the
values.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)
"""The highest score of no keys: below all scores, but finite, so that differences of two scores are numbers."""
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(
    queries,
    places,
    peaks,
    totals,
    sums,
    entries,
    pages,
    head,
    start,
    stop,
    scale,
    unit_stride,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Lets queries, [n, DIM_PAD] at the positions `places`, attend to the keys of KV head `head` at the positions from
    `start` to before `stop`, and returns peaks, totals and sums with these. Without `MASKED` all queries see all the
    keys, and their number is a multiple of BLOCK."""
    d = tl.arange(0, DIM_PAD)
    for begin in range(start, stop, BLOCK):
        keys = begin + tl.arange(0, BLOCK)
        held, present, nothing, absent = None, None, None, None
        if MASKED:
            held, nothing, absent = keys < stop, 0, 0.0
            present = held[:, None] & (d < DIM)[None, :]
        elif DIM < DIM_PAD:
            present, absent = (d < DIM)[None, :], 0.0
        units = tl.load(entries + keys // PAGE, held, nothing).to(tl.int64)
        slots = pages + units * unit_stride + (head * PAGE + keys % PAGE) * DIM
        k = tl.load(slots[:, None] + d[None, :], present, absent)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
        if CAP > 0:
            # The hyperbolic tangent of x is 1 - 2 / (1 + e ** 2x).
            scores = CAP * LOG2E - (2 * CAP * LOG2E) / (1 + tl.exp2(scores * (2 * LOG2E / CAP * scale)))
        else:
            scores = scores * (scale * LOG2E)
        if MASKED:
            seen = keys[None, :] <= places[:, None]
            if WINDOW > 0:
                seen = seen & (keys[None, :] > places[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peaks, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(peaks - higher)
        totals = totals * shrink + tl.sum(weights, axis=1)
        v = tl.load(slots[:, None] + KV_HEADS * PAGE * DIM + d[None, :], present, absent)
        sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, None], input_precision="ieee")
        peaks = higher
    return peaks, totals, sums


@triton.jit
def _splits(position, WINDOW: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the first key that a query at `position` sees, how many keys each split has, and how many splits there
    are: none at position -1."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position + 1 - WINDOW, 0)
    blocks = tl.cdiv(position + 1 - first, BLOCK)
    wanted = tl.maximum(tl.minimum(tl.cdiv(blocks, LEAST), SPLITS), 1)
    each = tl.maximum(tl.cdiv(blocks, wanted), 1)
    return first, each * BLOCK, tl.cdiv(blocks, each)


@triton.jit
def decode(
    q,
    out,
    parts,
    weights,
    done,
    table,
    owners,
    positions,
    places,
    pages,
    sinks,
    scale,
    table_stride,
    unit_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    MERGED: tl.constexpr,
    LEAST: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
):
    """A program computes splits of one row for one KV head: the one with its number, and every further one as far away
    as there are programs. Its grid is [rows, KV heads, programs]. If there is one split, its output is the result. Else
    it is stored in `parts`, float32 [rows, heads, SPLITS, DIM], and the binary logarithm of its weight in `weights`,
    float32 [rows, heads, SPLITS]; and the program that is done last, by the count in `done`, int32 [rows, KV heads],
    adds all splits up, in their order, and sets the count back to zero."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions + row)
    first, each, used = _splits(position, WINDOW, SPLITS, LEAST, BLOCK)
    programs = tl.minimum(used, tl.num_programs(2))
    group = tl.arange(0, GROUP_PAD)
    present = group < GROUP
    d = tl.arange(0, DIM_PAD)
    heads = head * GROUP + group
    mask = present[:, None] & (d < DIM)[None, :]
    place = row * (KV_HEADS * GROUP) + heads
    token = row
    if places is not None:
        token = tl.load(places + row).to(tl.int64)
    spots = (token * (KV_HEADS * GROUP) + heads)[:, None] * DIM + d[None, :]
    if position < 0:
        if places is None:
            tl.store(out + spots, tl.zeros([GROUP_PAD, DIM_PAD], out.dtype.element_ty), mask & (tl.program_id(2) == 0))
    elif tl.program_id(2) < programs:
        entries = table + tl.load(owners + row).to(tl.int64) * table_stride
        queries = tl.load(q + spots, mask, 0.0)
        seen = tl.zeros([GROUP_PAD], tl.int32) + position
        for split in range(tl.program_id(2), used, tl.num_programs(2)):
            peaks = tl.full([GROUP_PAD], LOWEST, tl.float32)
            totals = tl.zeros([GROUP_PAD], tl.float32)
            if sinks is not None:
                sunk = tl.load(sinks + heads, present & (split == 0), float("-inf")) * LOG2E
                peaks = tl.maximum(peaks, sunk)
                totals = tl.exp2(sunk - peaks)
            start = first + split * each
            stop = tl.minimum(start + each, position + 1)
            peaks, totals, sums = _attend(
                queries,
                seen,
                peaks,
                totals,
                tl.zeros([GROUP_PAD, DIM_PAD], tl.float32),
                entries,
                pages,
                head,
                start,
                stop,
                scale,
                unit_stride,
                KV_HEADS,
                DIM,
                DIM_PAD,
                PAGE,
                BLOCK,
                0,
                CAP,
                True,
            )
            found = sums / totals[:, None]
            if (used == 1) | (SPLITS == 1):
                tl.store(out + spots, found.to(out.dtype.element_ty), mask)
            else:
                tl.store(parts + (place * SPLITS + split)[:, None] * DIM + d[None, :], found, mask)
                tl.store(weights + place * SPLITS + split, peaks + tl.log2(totals), present)
        if SPLITS > 1:
            own = row * KV_HEADS + head
            spot = out + (token * KV_HEADS + head) * GROUP * DIM
            given = parts + own * GROUP * SPLITS * DIM, weights + own * GROUP * SPLITS
            _count(done + own, programs, spot, *given, used, GROUP, DIM, DIM_PAD, SPLITS, MERGED)


@triton.jit
def _count(
    count,
    programs,
    out,
    parts,
    weights,
    used,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Counts this program as done if there are several splits. If all `programs` are, it adds the splits up and sets
    the count back. See `_merge`."""
    if used > 1:
        tl.debug_barrier()  # all threads have stored their part before one of them counts it
        if tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == programs - 1:
            _merge(out, parts, weights, used, GROUP, DIM, DIM_PAD, SPLITS, MERGED)
            tl.store(count, 0)


@triton.jit
def _merge(
    out,
    parts,
    weights,
    used,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Adds up the `used` splits of the query heads that read one KV head of one row, MERGED at a time. Other programs
    have stored the splits, so they are read past the nearest cache, which other multiprocessors do not write to."""
    HEADS: tl.constexpr = triton.next_power_of_2(GROUP)  # noqa: N806 - known at compilation
    group = tl.arange(0, HEADS)
    d = tl.arange(0, DIM_PAD)
    place = tl.minimum(group, GROUP - 1)  # what is too much is read twice and not used
    split = tl.arange(0, SPLITS)
    logs = tl.load(weights + place[:, None] * SPLITS + tl.minimum(split, used - 1)[None, :], cache_modifier=".cg")
    peaks = tl.max(logs, axis=1)
    totals = tl.zeros([HEADS], tl.float32)
    sums = tl.zeros([HEADS, DIM_PAD], tl.float32)
    inside, nothing = None, None
    if DIM < DIM_PAD:
        inside, nothing = (d < DIM)[None, None, :], 0.0
    for begin in range(0, used, MERGED):
        some = begin + tl.arange(0, MERGED)
        at = place[:, None] * SPLITS + tl.minimum(some, used - 1)[None, :]
        weight = tl.load(weights + at, cache_modifier=".cg")
        shares = tl.where((some < used)[None, :], tl.exp2(weight - peaks[:, None]), 0.0)
        values = tl.load(parts + at[:, :, None] * DIM + d[None, None, :], inside, nothing, cache_modifier=".cg")
        sums += tl.sum(values * shares[:, :, None], axis=1)
        totals += tl.sum(shares, axis=1)
    found = (sums / totals[:, None]).to(out.dtype.element_ty)
    tl.store(out + place[:, None] * DIM + d[None, :], found, (group < GROUP)[:, None] & (d < DIM)[None, :])


@triton.jit
def prefill(
    q,
    out,
    tiles,
    table,
    pages,
    sinks,
    scale,
    table_stride,
    unit_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
):
    """A program computes ROWS tokens of a tile for one head. Its grid is [heads, tiles, parts of a tile]."""
    head = tl.program_id(0)
    tile = tiles + tl.program_id(1) * 4
    skipped = tl.program_id(2) * ROWS
    token = (tl.load(tile + 1) + skipped).to(tl.int64)
    position = tl.load(tile + 2) + skipped
    count = tl.minimum(tl.load(tile + 3) - skipped, ROWS)
    if count > 0:
        entries = table + tl.load(tile).to(tl.int64) * table_stride
        t = tl.arange(0, ROWS)
        d = tl.arange(0, DIM_PAD)
        present = (t < count)[:, None] & (d < DIM)[None, :]
        spots = ((token + t) * (KV_HEADS * GROUP) + head)[:, None] * DIM + d[None, :]
        queries = tl.load(q + spots, present, 0.0)
        places = position + tl.minimum(t, count - 1)
        peaks = tl.full([ROWS], LOWEST, tl.float32)
        totals = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, DIM_PAD], tl.float32)
        if sinks is not None:
            sunk = tl.load(sinks + head) * LOG2E
            peaks = tl.maximum(peaks, sunk)
            totals = tl.exp2(sunk - peaks)
        # Without a window, all queries see the keys of the blocks before the first query.
        first = tl.maximum(position + 1 - WINDOW, 0) if WINDOW > 0 else (position + 1) // BLOCK * BLOCK
        kv_head = head // GROUP
        if WINDOW == 0:
            peaks, totals, sums = _attend(
                queries,
                places,
                peaks,
                totals,
                sums,
                entries,
                pages,
                kv_head,
                0,
                first,
                scale,
                unit_stride,
                KV_HEADS,
                DIM,
                DIM_PAD,
                PAGE,
                BLOCK,
                0,
                CAP,
                False,
            )
        peaks, totals, sums = _attend(
            queries,
            places,
            peaks,
            totals,
            sums,
            entries,
            pages,
            kv_head,
            first,
            position + count,
            scale,
            unit_stride,
            KV_HEADS,
            DIM,
            DIM_PAD,
            PAGE,
            BLOCK,
            WINDOW,
            CAP,
            True,
        )
        tl.store(out + spots, (sums / totals[:, None]).to(out.dtype.element_ty), present)
