"""Paged attention equals attention over whole sequences, for any batch, and reads only pages that its rows own."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.kernels.paged import QUERY_BLOCK, PagedAttention, PagedKV, _blocks
from tenuto.kernels.ragged import ragged_arange

CPU = torch.device("cpu")
HEAD_DIM = 8


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, window: int = 0) -> torch.Tensor:
    """Computes causal attention in float64, one query at a time: `q` [n, heads, d] at `start`, `k`, `v` [start + n, kv,
    d]."""
    group = q.shape[1] // k.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64)
    for i in range(len(q)):
        for h in range(q.shape[1]):
            last = start + i + 1
            keys, values = (x[max(0, last - window) if window else 0 : last, h // group].double() for x in (k, v))
            out[i, h] = (keys @ q[i, h].double() / HEAD_DIM**0.5).softmax(0) @ values
    return out


def ints(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


class Sequences:
    """Rows of one cache, with pages scattered over the pool, beside the same keys and values kept whole."""

    def __init__(
        self, rows: int, page_size: int, kv_heads: int, group: int, longest: int, seed: int, window: int = 0
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.kv_heads, self.group, self.window = kv_heads, group, window
        width = -(-longest // page_size)
        self.kv = PagedKV(1, rows * width + 1, page_size, kv_heads, HEAD_DIM, CPU, torch.float32)
        self.table = torch.randperm(rows * width, generator=self.generator).view(rows, width) + 1
        self.whole = [(torch.empty(0, kv_heads, HEAD_DIM), torch.empty(0, kv_heads, HEAD_DIM)) for _ in range(rows)]

    def random(self, tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, HEAD_DIM, generator=self.generator)

    def step(self, rows: list[int], counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes a step and returns (ours, naive), both float64."""
        starts = [len(self.whole[row][0]) for row in rows]
        q = self.random(sum(counts), self.kv_heads * self.group)
        k, v = self.random(sum(counts), self.kv_heads), self.random(sum(counts), self.kv_heads)
        expected = []
        parts = (torch.split(x, counts) for x in (q, k, v))
        for row, start, queries, new_keys, new_values in zip(rows, starts, *parts, strict=True):
            keys, values = self.whole[row]
            self.whole[row] = keys, values = torch.cat((keys, new_keys)), torch.cat((values, new_values))
            expected.append(naive(queries, keys, values, start, self.window))
        table = self.told(rows, starts)
        self.attention = PagedAttention(self.kv, table, ints(rows), ints(starts), ints(counts), self.window)
        self.attention.append(0, q, k, v)
        return self.attention(0, q).double(), torch.cat(expected)

    def told(self, rows: list[int], starts: list[int]) -> torch.Tensor:
        """Returns the page table as a plan leaves it: entries before the windows name pages that do not exist."""
        table = self.table.clone()
        for row, start in zip(rows, starts, strict=True):
            if self.window:
                table[row, : max(0, start - self.window + 1) // self.kv.page_size] = 10**6
        return table


@settings(max_examples=40, deadline=None)
@given(
    page_size=st.sampled_from([1, 3, 16]),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    steps=st.lists(st.dictionaries(st.integers(0, 4), st.integers(1, 9), min_size=1), min_size=1, max_size=5),
    seed=st.integers(0, 99),
)
def test_a_mixed_batch_attends_as_whole_sequences_would(
    page_size: int, kv_heads: int, group: int, steps: list[dict[int, int]], seed: int
) -> None:
    sequences = Sequences(5, page_size, kv_heads, group, 45, seed)
    for work in steps:
        ours, expected = sequences.step(list(work), list(work.values()))
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    page_size=st.sampled_from([1, 3, 16]),
    group=st.integers(1, 2),
    window=st.integers(1, 20),
    steps=st.lists(st.dictionaries(st.integers(0, 4), st.integers(1, 19), min_size=1), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_a_window_hides_earlier_tokens_and_their_pages_are_not_read(
    page_size: int, group: int, window: int, steps: list[dict[int, int]], seed: int
) -> None:
    sequences = Sequences(5, page_size, 1, group, 120, seed, window)
    for work in steps:
        ours, expected = sequences.step(list(work), list(work.values()))
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
        read = max(batch.length for batch in sequences.attention._batches)
        assert read < window + page_size + max(work.values())


def test_long_chunks_attend_within_their_window() -> None:
    sequences = Sequences(2, 16, 1, 2, 900, seed=0, window=70)
    for rows, counts in (([0, 1], [QUERY_BLOCK * 2 + 5, 3]), ([1, 0], [QUERY_BLOCK * 3, QUERY_BLOCK])):
        ours, expected = sequences.step(rows, counts)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
        assert max(batch.length for batch in sequences.attention._batches) < 70 + 16 + QUERY_BLOCK


def test_chunks_longer_than_a_query_block_attend_as_whole_sequences_would() -> None:
    sequences = Sequences(3, 16, 1, 2, 700, seed=0)
    for rows, counts in (([0, 1], [QUERY_BLOCK * 2 + 5, 3]), ([1, 0, 2], [QUERY_BLOCK + 1, QUERY_BLOCK, 1])):
        ours, expected = sequences.step(rows, counts)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_garbage_of_a_pages_last_owner_does_not_reach_the_next() -> None:
    sequences = Sequences(1, 4, 1, 1, 8, seed=1)
    attention = PagedAttention(sequences.kv, sequences.table, ints([0]), ints([0]), ints([8]))
    broken = torch.full((8, 1, HEAD_DIM), torch.nan)
    broken[::2] = torch.inf
    attention.append(0, broken, broken, broken)
    attention(0, broken)
    ours, expected = sequences.step([0], [1])
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_a_copy_takes_exactly_the_first_slots_of_a_page() -> None:
    kv = PagedKV(2, 5, 4, 1, HEAD_DIM, CPU, torch.float32)
    kv.data.normal_(generator=torch.Generator().manual_seed(0))
    before = kv.data.clone()
    kv.copy(ints([1, 1, 0]), ints([3, 4, 2]), ints([3, 1, 4]))
    before[:, :, 3, :3], before[:, :, 4, :1], before[:, :, 2] = (
        before[:, :, 1, :3],
        before[:, :, 1, :1],
        before[:, :, 0],
    )
    assert torch.equal(kv.data, before)


def test_ragged_arange_counts_up_within_each_part() -> None:
    assert ragged_arange(ints([3, 0, 2])).tolist() == [0, 1, 2, 0, 1]
    assert ragged_arange(ints([])).tolist() == []


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 400)), min_size=1, max_size=30))
def test_query_blocks_cover_every_token_once_and_pad_little(chunks: list[tuple[int, int]]) -> None:
    starts, counts = (ints(list(values)) for values in zip(*chunks, strict=True))
    covered: list[int] = []
    for blocks in _blocks(ints(list(range(len(chunks)))), starts, counts):
        count, begins = blocks.count, blocks.begins
        assert count <= QUERY_BLOCK
        lengths = begins + count
        assert lengths.max() == lengths[0]
        assert ((lengths >= 0.75 * lengths[0]) | (lengths >= lengths[0] - 32)).all()
        for row, first, begin in zip(blocks.rows, blocks.firsts, begins, strict=True):
            offset = first - counts[:row].sum()
            assert begin == starts[row] + offset
            covered.extend(range(first, first + count))
    assert sorted(covered) == list(range(counts.sum()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_to_the_reference(dtype: torch.dtype) -> None:
    kv = PagedKV(1, 9, 8, 2, HEAD_DIM, CPU, dtype)
    table = torch.arange(1, 9)[None]
    q, k, v = (torch.randn(60, heads, HEAD_DIM, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    attention = PagedAttention(kv, table, ints([0]), ints([0]), ints([60]))
    attention.append(0, q.to(dtype), k.to(dtype), v.to(dtype))
    ours = attention(0, q.to(dtype))
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), naive(q, k, v, 0), rtol=0.03, atol=0.03)
