"""The two ends of a captured step on a CUDA device, which reads its numbers from host memory and writes its tokens
there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tenuto.kernels.sampling import OPTIONS

_BLOCK = 128
"""The number of rows, or of changes of a page table, that a program reads."""
_SPREAD, _CHUNK = 32, 64
"""The number of tokens that a program reads, and of rows that it looks at at a time."""
_FIELDS = tl.constexpr(len(OPTIONS.names or ()))
_PREVIOUS = tl.constexpr(-1)
"""`base.plan.PREVIOUS_SAMPLE`."""
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST, _SECOND = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)
"""Constants of `kernels.sampling.uniforms`."""

OWN = 5
"""The fields that a step has for each row before those of states: row id, position of the first token, number of
tokens, index of the first token in the step, and whether the row samples after its last token."""
CHANGED = 3
"""The fields of changes of a page table: row id, index, page."""
_DERIVED = tl.constexpr(3)
"""The fields that `begin` adds behind the others, see `Rows`."""
_NEVER = tl.constexpr(2**30)
"""The index of the first token of no row: behind all tokens."""


@dataclass(frozen=True, slots=True)
class Entries:
    """The numbers of several steps, in host memory that the device addresses, [entries, ...].

    `counts`, int32 [entries, 2 + page tables]: the numbers of rows, of tokens, and of changes of each table. `inputs`,
    int32 [entries, most tokens]: ids of tokens. `numbers`, int32 [entries, fields, most]: those of each row, `OWN` of
    them and the slots that each state group reads and writes. `changes`, int32 [entries, CHANGED of each table, most
    changes]. `options`, float64 [entries, most, fields]: records of `kernels.sampling.OPTIONS`. The step writes
    `tokens`, int32 [entries, most], where rows sample. On the device, int32 [1] each: `turn`, the entry of the next
    step, and `place`, that of the one that is computed.
    """

    counts: torch.Tensor
    inputs: torch.Tensor
    numbers: torch.Tensor
    changes: torch.Tensor
    options: torch.Tensor
    tokens: torch.Tensor
    turn: torch.Tensor
    place: torch.Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step, on the device. `numbers`, int32 [fields, rows]: see `Entries`; an entry without a row has
    slots of -1, a first token behind all others, and zeros. `lasts`: the index of each row's last token, or 0 without a
    row. `alone`: the position of its token if it computes one, or else -1. `sampling`: the position after which it
    samples, or -1; all int32 [rows]. `choice`: the options for sampling, each [rows], in the order that `sample` takes
    them."""

    numbers: torch.Tensor
    lasts: torch.Tensor
    alone: torch.Tensor
    sampling: torch.Tensor
    choice: tuple[torch.Tensor, ...]

    @property
    def ids(self) -> torch.Tensor:
        """The row of the page tables of each."""
        return self.numbers[0]

    @property
    def firsts(self) -> torch.Tensor:
        """The index of each row's first token."""
        return self.numbers[3]

    @property
    def moves(self) -> torch.Tensor:
        """The slots that each state group reads and writes, int32 [groups, 2, rows]."""
        return self.numbers[OWN:].view(-1, 2, self.numbers.shape[1])


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a step, on the device, int32 [tokens] each: ids, each one's row of the page tables, and its
    position, which is -1 where there is no token. `tiles`: see `attention.tiles_of`; int32 [most of them, 4], those of
    rows with several tokens, then some without tokens."""

    ids: torch.Tensor
    owners: torch.Tensor
    positions: torch.Tensor
    tiles: torch.Tensor


def begin(entries: Entries, fields: int, rows: int) -> Rows:
    """Reads the next step of at most `rows` rows. `fields`: the number of each row. Random numbers are those of
    `kernels.sampling.uniforms`."""
    device = entries.turn.device
    numbers = torch.empty((fields + _DERIVED.value, rows), device=device, dtype=torch.int32)
    floats = torch.empty((4, rows), device=device, dtype=torch.float64)
    top_k = torch.empty(rows, device=device, dtype=torch.int32)
    _begin[(triton.cdiv(rows, _BLOCK),)](
        entries.turn,
        entries.place,
        entries.counts,
        entries.numbers,
        entries.options,
        entries.options.view(torch.int64),
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
    lasts, alone, sampling = numbers[fields:]
    return Rows(numbers[:fields], lasts, alone, sampling, (temperature, top_k, top_p, min_p, uniform))


def single(entries: Entries, rows: Rows, sampled: torch.Tensor) -> torch.Tensor:
    """Returns the ids of the tokens of a step in which each row computes one, int32 [rows]; see `spread`."""
    found = torch.empty_like(rows.alone)
    _single[(triton.cdiv(len(found), _BLOCK),)](
        entries.place,
        entries.inputs,
        rows.alone,
        rows.ids,
        sampled,
        found,
        len(found),
        entries.inputs.shape[1],
        BLOCK=_BLOCK,
    )
    return found


def spread(entries: Entries, rows: Rows, tokens: int, tile: int, sampled: torch.Tensor) -> Tokens:
    """Reads the step's tokens, at most `tokens`, and cuts those of rows with several into tiles of `tile`. A token that
    is the row's previous sample is read from `sampled`, int32 [row ids]."""
    many = len(rows.lasts)
    most = tokens // tile + min(many, tokens // 2)
    found = torch.empty((3, tokens), device=sampled.device, dtype=torch.int32)
    tiles = torch.empty((most, 4), device=sampled.device, dtype=torch.int32)
    _spread[(triton.cdiv(tokens, _SPREAD),)](
        entries.place,
        entries.counts,
        entries.inputs,
        rows.numbers,
        sampled,
        found,
        tiles,
        many,
        tokens,
        most,
        entries.inputs.shape[1],
        entries.counts.shape[1],
        TILE=tile,
        BLOCK=_SPREAD,
        CHUNK=_CHUNK,
    )
    ids, owners, positions = found
    return Tokens(ids, owners, positions, tiles)


def change(entries: Entries, number: int, table: torch.Tensor) -> None:
    """Makes the step's changes of page table `number`, int32 [row ids, pages]."""
    most = entries.changes.shape[2]
    _change[(triton.cdiv(most, _BLOCK),)](
        entries.place,
        entries.counts,
        entries.changes,
        table,
        table.stride(0),
        most,
        entries.counts.shape[1],
        entries.changes.shape[1],
        NUMBER=number,
        CHANGED=CHANGED,
        BLOCK=_BLOCK,
    )


def finish(entries: Entries, rows: Rows, found: torch.Tensor, sampled: torch.Tensor) -> None:
    """Ends the step, whose rows sampled the tokens `found`, int64 [rows]; rows that do not sample ignore theirs."""
    _finish[(triton.cdiv(len(found), _BLOCK),)](
        entries.turn,
        entries.place,
        rows.ids,
        rows.sampling,
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
    start = tl.load(numbers + most, given, 0, cache_modifier=".cv")
    count = tl.load(numbers + 2 * most, given, 0, cache_modifier=".cv")
    first = tl.load(numbers + 3 * most, given, _NEVER, cache_modifier=".cv")
    samples = tl.load(numbers + 4 * most, given, 0, cache_modifier=".cv")
    tl.store(found + i, tl.load(numbers, given, 0, cache_modifier=".cv"), stored)
    tl.store(found + rows + i, start, stored)
    tl.store(found + 2 * rows + i, count, stored)
    tl.store(found + 3 * rows + i, first, stored)
    tl.store(found + 4 * rows + i, samples, stored)
    for field in tl.static_range(OWN, FIELDS):
        slot = tl.load(numbers + field * most, given, -1, cache_modifier=".cv")
        tl.store(found + field * rows + i, slot, stored)
    last = start + count - 1
    tl.store(found + FIELDS * rows + i, tl.where(given, first + count - 1, 0), stored)
    tl.store(found + (FIELDS + 1) * rows + i, tl.where(count == 1, start, -1), stored)
    tl.store(found + (FIELDS + 2) * rows + i, tl.where(samples > 0, last, -1), stored)
    record = (entry * most + i) * _FIELDS
    for field in tl.static_range(3):
        value = tl.load(records + record + field, given, 0.0, cache_modifier=".cv")
        tl.store(floats + field * rows + i, value, stored)
    k = tl.load(whole + record + 3, given, 0, cache_modifier=".cv")
    tl.store(top_k + i, k.to(tl.int32), stored)
    seed = tl.load(whole + record + 4, given, 0, cache_modifier=".cv").to(tl.uint64)
    state = _mix(seed + _GOLDEN) + (last + 2).to(tl.uint64) * _GOLDEN  # the sample's position, plus 1
    uniform = (_mix(state) >> 12).to(tl.int64).to(tl.float64) * 2.220446049250313e-16  # 2 ** -52
    tl.store(floats + 3 * rows + i, uniform, stored)


@triton.jit
def _single(place, inputs, alone, ids, sampled, found, rows, most, BLOCK: tl.constexpr):
    """A program reads the tokens of BLOCK rows."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    given = tl.load(alone + i, i < rows, -1) >= 0
    token = tl.load(inputs + tl.load(place) * most + i, given, 0, cache_modifier=".cv")
    owner = tl.load(ids + i, given, 0)
    token = tl.where(token == _PREVIOUS, tl.load(sampled + owner, given, 0), token)
    tl.store(found + i, token, i < rows)


@triton.jit
def _spread(
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
    row = tl.zeros([BLOCK], tl.int32) - 1
    for begin in range(0, rows, CHUNK):
        r = begin + tl.arange(0, CHUNK)
        firsts = tl.load(numbers + 3 * rows + r, r < rows, _NEVER)
        row += tl.sum((firsts[None, :] <= i[:, None]).to(tl.int32), axis=1)
    owner = tl.load(numbers + row, given, 0)
    start = tl.load(numbers + rows + row, given, 0)
    count = tl.load(numbers + 2 * rows + row, given, 0)
    within = i - tl.load(numbers + 3 * rows + row, given, 0)
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
        starts = tl.load(numbers + rows + r, r < rows, 0)
        many = tl.load(numbers + 2 * rows + r, r < rows, 0)
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
def _change(
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
    given = i < tl.load(counts + entry * counted + 2 + NUMBER, cache_modifier=".cv")
    changes += (entry * lines + CHANGED * NUMBER) * most + i
    owner = tl.load(changes, given, 0, cache_modifier=".cv").to(tl.int64)
    index = tl.load(changes + most, given, 0, cache_modifier=".cv")
    page = tl.load(changes + 2 * most, given, 0, cache_modifier=".cv")
    tl.store(table + owner * stride + index, page, given)


@triton.jit
def _finish(
    turn,
    place,
    ids,
    sampling,
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
    given = (i < rows) & (tl.load(sampling + i, i < rows, -1) >= 0)
    token = tl.load(found + i, given, 0).to(tl.int32)
    tl.store(sampled + tl.load(ids + i, given, 0), token, given)
    tl.store(tokens + entry * most + i, token, given)
