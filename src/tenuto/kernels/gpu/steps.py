"""The two ends of a decode step on a CUDA device: it reads its numbers from host memory and writes its tokens there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tenuto.kernels.sampling import OPTIONS

_BLOCK = 128
"""The number of rows, or of changes of a page table, that a program reads."""
_FIELDS = tl.constexpr(len(OPTIONS.names or ()))
_PREVIOUS = tl.constexpr(-1)
"""`base.plan.PREVIOUS_SAMPLE`."""
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST, _SECOND = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)
"""Constants of `kernels.sampling.uniforms`."""

OWN = 3
"""The fields that a step has for each row before those of states: token, row id, position."""
CHANGED = 3
"""The fields of changes of a page table: row id, index, page."""


@dataclass(frozen=True, slots=True)
class Entries:
    """The numbers of several steps, in host memory that the device addresses, [entries, ...].

    `counts`, int32 [entries, 1 + page tables]: the numbers of rows and of changes of each table. `numbers`, int32
    [entries, fields, most]: those of each row, `OWN` of them and the slots that each state group reads and writes, then
    `CHANGED` of each table. `options`, float64 [entries, most, fields]: records of `kernels.sampling.OPTIONS`. The step
    writes `tokens`, int32 [entries, most]. On the device, int32 [1] each: `turn`, the entry of the next step, and
    `place`, that of the one that is computed.
    """

    counts: torch.Tensor
    numbers: torch.Tensor
    options: torch.Tensor
    tokens: torch.Tensor
    turn: torch.Tensor
    place: torch.Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step, on the device. `numbers`, int32 [fields, rows]: see `Entries`. An entry without a row
    has position and slots of -1, and zeros. `choice`: the options for sampling, each [rows], in the order that
    `sample` takes them."""

    numbers: torch.Tensor
    choice: tuple[torch.Tensor, ...]


def begin(entries: Entries, fields: int, rows: int, sampled: torch.Tensor) -> Rows:
    """Reads the next step of at most `rows` rows. `fields`: the number of each row. A token that is the row's previous
    sample is read from `sampled`, int32 [row ids]. Random numbers are those of `kernels.sampling.uniforms`."""
    device = sampled.device
    numbers = torch.empty((fields, rows), device=device, dtype=torch.int32)
    floats = torch.empty((4, rows), device=device, dtype=torch.float64)
    top_k = torch.empty(rows, device=device, dtype=torch.int32)
    _begin[(triton.cdiv(rows, _BLOCK),)](
        entries.turn,
        entries.place,
        entries.counts,
        entries.numbers,
        entries.options,
        entries.options.view(torch.int64),
        sampled,
        numbers,
        floats,
        top_k,
        rows,
        entries.numbers.shape[2],
        entries.counts.shape[1],
        entries.numbers.shape[1],
        FIELDS=fields,
        OWN=OWN,
        BLOCK=_BLOCK,
    )
    temperature, top_p, min_p, uniform = floats
    return Rows(numbers, (temperature, top_k, top_p, min_p, uniform))


def change(entries: Entries, number: int, fields: int, table: torch.Tensor) -> None:
    """Makes the step's changes of page table `number`, int32 [row ids, pages]. `fields`: see `begin`."""
    most = entries.numbers.shape[2]
    _change[(triton.cdiv(most, _BLOCK),)](
        entries.place,
        entries.counts,
        entries.numbers,
        table,
        table.stride(0),
        most,
        entries.counts.shape[1],
        entries.numbers.shape[1],
        NUMBER=number,
        FIRST=fields + CHANGED * number,
        BLOCK=_BLOCK,
    )


def finish(entries: Entries, rows: Rows, found: torch.Tensor, sampled: torch.Tensor) -> None:
    """Ends the step, whose rows sampled the tokens `found`, int64 [rows]."""
    _finish[(triton.cdiv(len(found), _BLOCK),)](
        entries.turn,
        entries.place,
        rows.numbers,
        found,
        sampled,
        entries.tokens,
        len(found),
        entries.tokens.shape[1],
        ENTRIES=len(entries.tokens),
        BLOCK=_BLOCK,
    )


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)


@triton.jit
def _begin(
    turn,
    place,
    counts,
    numbers,
    records,
    whole,
    sampled,
    found,
    floats,
    top_k,
    rows,
    most,
    counted,
    lines,
    FIELDS: tl.constexpr,
    OWN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program reads BLOCK rows. Host memory is read past the caches, which may hold an earlier step."""
    entry = tl.load(turn)
    if tl.program_id(0) == 0:
        tl.store(place, entry)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    stored = i < rows
    given = i < tl.load(counts + entry * counted, cache_modifier=".cv")
    numbers += entry * lines * most + i
    token = tl.load(numbers, given, 0, cache_modifier=".cv")
    owner = tl.load(numbers + most, given, 0, cache_modifier=".cv")
    position = tl.load(numbers + 2 * most, given, -1, cache_modifier=".cv")
    token = tl.where(token == _PREVIOUS, tl.load(sampled + owner, given, 0), token)
    tl.store(found + i, token, stored)
    tl.store(found + rows + i, owner, stored)
    tl.store(found + 2 * rows + i, position, stored)
    for field in tl.static_range(OWN, FIELDS):
        slot = tl.load(numbers + field * most, given, -1, cache_modifier=".cv")
        tl.store(found + field * rows + i, slot, stored)
    record = (entry * most + i) * _FIELDS
    for field in tl.static_range(3):
        value = tl.load(records + record + field, given, 0.0, cache_modifier=".cv")
        tl.store(floats + field * rows + i, value, stored)
    k = tl.load(whole + record + 3, given, 0, cache_modifier=".cv")
    tl.store(top_k + i, k.to(tl.int32), stored)
    seed = tl.load(whole + record + 4, given, 0, cache_modifier=".cv").to(tl.uint64)
    state = _mix(seed + _GOLDEN) + (position + 2).to(tl.uint64) * _GOLDEN  # the sample's position, plus 1
    uniform = (_mix(state) >> 12).to(tl.int64).to(tl.float64) * 2.220446049250313e-16  # 2 ** -52
    tl.store(floats + 3 * rows + i, uniform, stored)


@triton.jit
def _change(
    place,
    counts,
    numbers,
    table,
    stride,
    most,
    counted,
    lines,
    NUMBER: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program makes BLOCK changes."""
    entry = tl.load(place)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    given = i < tl.load(counts + entry * counted + 1 + NUMBER, cache_modifier=".cv")
    numbers += (entry * lines + FIRST) * most + i
    owner = tl.load(numbers, given, 0, cache_modifier=".cv").to(tl.int64)
    index = tl.load(numbers + most, given, 0, cache_modifier=".cv")
    page = tl.load(numbers + 2 * most, given, 0, cache_modifier=".cv")
    tl.store(table + owner * stride + index, page, given)


@triton.jit
def _finish(
    turn,
    place,
    numbers,
    found,
    sampled,
    tokens,
    rows,
    most,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program stores the tokens of BLOCK rows, on the device and in host memory."""
    entry = tl.load(place)
    if tl.program_id(0) == 0:
        tl.store(turn, (entry + 1) % ENTRIES)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    given = (i < rows) & (tl.load(numbers + 2 * rows + i, i < rows, -1) >= 0)
    token = tl.load(found + i, given, 0).to(tl.int32)
    tl.store(sampled + tl.load(numbers + rows + i, given, 0), token, given)
    tl.store(tokens + entry * most + i, token, given)
