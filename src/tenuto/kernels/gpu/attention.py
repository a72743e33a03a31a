"""Paged attention on a CUDA device.

The pages of one layer are [units, 2, kv_heads, page_size, head_dim], keys before values, float32, float16 or bfloat16;
a page of one layer is contiguous. Slot `s` of page `table[row, i]` holds the key and value of the row's position
`i * page_size + s`. The page size is a power of two.

The result of a row does not depend on the contents of other rows of a launch. Splits (Dao et al., "Flash-Decoding for
long-context inference", 2023) and blocks are chosen by shapes, by the number of rows, and by the row's own length.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from triton import cdiv, next_power_of_2

from tenuto.base.plan import Ints
from tenuto.kernels.gpu import append_kernels
from tenuto.kernels.gpu import attention_kernels as kernels
from tenuto.kernels.ragged import ragged_arange

TILE = 128
"""Maximum number of tokens of a tile."""

_PROGRAMS = 32 * 132
"""So many programs keep an H200, which has 132 multiprocessors, busy to the end."""
_LEAST_KEYS, _MOST_LEAST_KEYS = 128, 2048
"""The least number of keys of a split, for few rows and for many: see `least_keys`."""
_KEYS = 64
"""The most keys that `decode` loads at a time."""
_KEY_BYTES = 16384
"""The most bytes of keys that `decode` loads at a time; as much is loaded of values."""
_MERGED = 2048
"""The most numbers of splits that a program of `decode` adds up at a time."""


def append(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    owners: torch.Tensor,
    positions: torch.Tensor,
    pages: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None,
    norms: Sequence[torch.Tensor] | None = None,
    epsilon: float = 0.0,
) -> torch.Tensor:
    """Normalises and rotates queries and keys, writes keys and values to `pages`, infinity and NaN as zero, and returns
    the queries, contiguous.

    `q`: [tokens, heads, head_dim], of which each head is contiguous; `k`, `v`: [tokens, kv_heads, head_dim], of which
    each token is contiguous. `table`: int32 [row ids, pages]. `owners`, `positions`: int32 [tokens], each token's row
    of the table and its position; with position -1 the token is not written, and its query is zero. `rotation`: cosine
    and sine, both [tokens, pairs], of the angles by which the leading pairs (i, i + pairs) of each head are rotated.
    `norms`: the weights of root mean square norms of each head of `q` and of `k`, float32 [head_dim]. All is computed
    in float32."""
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    assert q.stride(2) == 1, "heads are contiguous"
    assert all(x.stride()[1:] == (head_dim, 1) for x in (k, v)), "keys and values of a token are contiguous"
    out = torch.empty(q.shape, device=q.device, dtype=q.dtype)
    cos, sin = rotation or (None, None)
    q_weight, k_weight = norms or (None, None)
    padded, group_pad = next_power_of_2(head_dim), next_power_of_2(group)
    warps = group_pad * padded // 512
    if norms is not None and q.element_size() == 2:
        warps *= 4  # with fewer, registers would spill on some devices
    append_kernels.append[(tokens, kv_heads)](
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
        q.stride(0),
        q.stride(1),
        k.stride(0),
        v.stride(0),
        table.stride(0),
        pages.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_PAD=group_pad,
        DIM=head_dim,
        DIM_PAD=padded,
        PAIRS=0 if cos is None else cos.shape[1],
        PAGE=pages.shape[3],
        num_warps=min(max(warps, 1), 4),
    )
    return out


def counters(rows: int, kv_heads: int, device: torch.device) -> torch.Tensor:
    """Returns the `done` of `decode` for at most `rows` tokens."""
    return torch.zeros((rows, kv_heads), device=device, dtype=torch.int32)


def decode(
    q: torch.Tensor,
    table: torch.Tensor,
    owners: torch.Tensor,
    positions: torch.Tensor,
    pages: torch.Tensor,
    done: torch.Tensor,
    scale: float,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
    out: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the attention output of queries, each of which sees the keys of its row up to its own position.

    `q`: [tokens, heads, head_dim], contiguous; the result has its shape, and is written to `out` if that is given.
    `owners`, `positions`: int32 [tokens]; several tokens may have one row; with position -1 nothing is read and the
    output is zero. With `places`, int32 [tokens], these are only some of the tokens of `q`, by their index there, and
    only their output is written, at position -1 none; `out` may then be `q`. `done`, of `counters`, is zero before and
    after every launch; launches that use it follow each other on one stream. Scores are multiplied by `scale`.
    `window`, `sinks`, float32 [heads], and `cap` are those of `models.block.StepMemory.attend` and
    `kernels.paged.PagedAttention`."""
    rows, (heads, head_dim) = len(owners), q.shape[1:]
    kv_heads, page_size = pages.shape[2:4]
    assert len(done) >= rows, "every row has a count"
    padded, group = next_power_of_2(head_dim), heads // kv_heads
    block = key_block(padded, pages.element_size())
    keys = table.shape[1] * page_size
    least = least_keys(rows, kv_heads)
    splits = decode_splits(kv_heads, least, min(keys, window) if window else keys)
    out = torch.empty_like(q) if out is None else out
    parts = torch.empty((rows, heads, splits, head_dim), device=q.device, dtype=torch.float32)
    weights = torch.empty((rows, heads, splits), device=q.device, dtype=torch.float32)
    kernels.decode[(rows, kv_heads, min(splits, next_power_of_2(cdiv(_PROGRAMS, rows * kv_heads))))](
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
        table.stride(0),
        pages.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_PAD=max(next_power_of_2(group), 16),  # the fewest rows of a product on tensor cores
        DIM=head_dim,
        DIM_PAD=padded,
        PAGE=page_size,
        BLOCK=block,
        SPLITS=splits,
        MERGED=max(min(_MERGED // (next_power_of_2(group) * padded), splits), 1),
        LEAST=max(least // block, 1),
        WINDOW=window,
        CAP=cap,
        num_warps=2 if pages.element_size() < 4 and padded <= 128 else 4,  # with fewer, registers would spill
        num_stages=3,
    )
    return out


def key_block(padded: int, element_size: int) -> int:
    """Returns how many keys, each of `padded` elements of `element_size` bytes, `decode` loads at a time."""
    return 16 if element_size == 4 else min(max(_KEY_BYTES // (padded * element_size), 16), _KEYS)


def least_keys(rows: int, kv_heads: int) -> int:
    """Returns how many keys a split has at least. The more rows there are, the fewer splits keep the device busy, and
    each costs a program's start and its part of the sum; a power of two."""
    programs = rows * kv_heads  # with one split each
    if programs <= 64:
        return _LEAST_KEYS
    return int(min(max(next_power_of_2(programs), 2 * _LEAST_KEYS), _MOST_LEAST_KEYS))


def decode_splits(kv_heads: int, least: int, keys: int) -> int:
    """Returns how many splits, each of at least `least` keys, a row of at most `keys` keys has: so many that a single
    row occupies the device, unless it is too short; a power of two."""
    return int(min(next_power_of_2(cdiv(256, kv_heads)), 64, next_power_of_2(cdiv(keys, least))))


def prefill(
    q: torch.Tensor,
    tiles: torch.Tensor,
    table: torch.Tensor,
    pages: torch.Tensor,
    scale: float,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the attention output of the queries of `tiles`, int32 [n, 4] (see `tiles_of`), whose own keys are already
    in `pages`; the output of tokens in no tile is not written. `out` may be `q`. The other arguments are those of
    `decode`."""
    heads, head_dim = q.shape[1:]
    kv_heads, page_size = pages.shape[2:4]
    padded = next_power_of_2(head_dim)
    rows, block, stages, warps = prefill_constants(head_dim, pages.element_size(), shared_memory(q.device))
    out = torch.empty_like(q) if out is None else out
    kernels.prefill[(heads, len(tiles), TILE // rows)](
        q,
        out,
        tiles,
        table,
        pages,
        sinks,
        scale,
        table.stride(0),
        pages.stride(0),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        DIM=head_dim,
        DIM_PAD=padded,
        PAGE=page_size,
        ROWS=rows,
        BLOCK=block,
        WINDOW=window,
        CAP=cap,
        num_warps=warps,
        num_stages=stages,
    )
    return out


def prefill_constants(head_dim: int, element_size: int, shared: int) -> tuple[int, int, int, int]:
    """Returns the number of queries and of keys that a program of `prefill` computes at a time, its stages and warps.
    `shared`: bytes of shared memory that a program may use."""
    padded = next_power_of_2(head_dim)
    if element_size == 4:
        return 16, 16, 3, 4
    rows = 128 if 3 * 128 * padded * element_size <= shared else 64
    if head_dim == 128 and rows == 128 and shared >= 224 * 1024:
        return rows, 128, 2, 8  # 393 TFLOP/s for 8,192 tokens on an H200, and 348 with what follows
    most = 128 if shared >= 224 * 1024 else 64  # with more, registers would spill before compute capability 9.0
    block = min(max(8192 // padded, 32), most)
    # Half of the stages load page numbers, the others keys and values.
    fitting = (shared - rows * padded * element_size) // (2 * block * padded * element_size)
    return rows, block, min(max(2 * fitting - 1, 1), 5), 8


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Returns how many bytes of shared memory a program may use on `device`."""
    if device.type != "cuda":
        return 99 * 1024
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


def tiles_of(starts: Ints, counts: Ints, rows: Ints, tile: int = TILE) -> npt.NDArray[np.int32]:
    """Cuts chunks into tiles of at most `tile` tokens. Row `rows[i]` of the table computes `counts[i]` tokens from
    position `starts[i]`, int32 [chunks]; the chunks follow each other in the flat batch. Returns int32 [tiles, 4]: a
    tile's row, the index of its first token in the flat batch, that token's position and the number of tokens. Those
    with the most keys are first, so that the last programs to start are short."""
    pieces = -(-counts // tile)
    within = ragged_arange(pieces) * tile
    chunk = np.repeat(np.arange(len(counts)), pieces)
    firsts = np.cumsum(counts, dtype=np.int64) - counts
    sizes = np.minimum(counts[chunk] - within, tile)
    tiles = np.stack((rows[chunk], firsts[chunk] + within, starts[chunk] + within, sizes), axis=1)
    return tiles[np.argsort(-(tiles[:, 2] + sizes), kind="stable")].astype(np.int32)
