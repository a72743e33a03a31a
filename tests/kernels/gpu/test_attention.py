"""The attention kernels for GPUs compute what the portable ones compute, and read nothing else."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from tenuto.kernels.gpu import attention
from tests.kernels.gpu.conftest import TYPES
from tests.kernels.gpu.rows import Rows, close, ints, on_device

HEAD_DIMS = [64, 80, 96, 128, 256]
GROUPS = [(1, 1), (4, 1), (2, 3), (1, 8), (1, 16)]
shapes = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 16, 32]),
        "head_dim": st.sampled_from(HEAD_DIMS),
        "dtype": st.sampled_from(TYPES),
        "seed": st.integers(0, 99),
    }
)
extras = st.fixed_dictionaries(
    {"window": st.sampled_from([0, 0, 1, 7, 40, 300]), "cap": st.sampled_from([0.0, 0.0, 3.0]), "sinks": st.booleans()}
)


def made(rows: Rows, extra: dict) -> dict:
    """Returns `extra` with scores of sinks, of which one is far above and one far below all other scores."""
    sinks = None
    if extra["sinks"]:
        sinks = torch.randn(rows.kv_heads * rows.group, generator=rows.generator) * 2
        sinks[0], sinks[-1] = 30.0, -90.0
    return {**extra, "sinks": sinks, "scale": rows.head_dim**-0.5}


def decoded(rows: Rows, q: torch.Tensor, owners: object, positions: object, **extra: object) -> torch.Tensor:
    """Decodes twice: the second launch finds the counts as the first did, and computes the same."""
    done = attention.counters(len(q), rows.kv_heads, torch.device("cpu"))
    given = q, rows.table, ints(owners), ints(positions), rows.pages, done
    found = on_device(attention.decode, *given, **extra)
    assert not done.any(), "every count is zero again"
    assert torch.equal(on_device(attention.decode, *given, **extra), found)
    return found


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([1, 2, 31, 32, 33, 64, 65, 127, 129, 300, 700]), min_size=1, max_size=4),
    heads=st.sampled_from(GROUPS),
    shape=shapes,
    extra=extras,
)
def test_a_decode_step_attends_as_the_portable_kernel_does(lengths, heads, shape, extra) -> None:
    rows = Rows(lengths, shape["page_size"], heads, shape["head_dim"], shape["dtype"], shape["seed"])
    rows.fill([max(length - extra["window"], 0) if extra["window"] else 0 for length in lengths])
    extra = made(rows, extra)
    q = rows.queries(len(lengths) + 2)
    owners = np.concatenate((rows.ids, [0, 0]))
    positions = np.array([*lengths, 0, 0]) - 1
    found = decoded(rows, q, owners, positions, **extra)
    close(found[:-2], rows.expected(q[:-2], [1] * len(lengths), **extra))
    assert not found[-2:].any(), "padding is zero"


def test_a_row_does_not_depend_on_what_the_others_hold_or_on_who_adds_its_splits_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = Rows([1100, 3, 700], 32, (1, 4), 64)
    rows.fill()
    q = rows.queries(3)

    def chosen(*order: int) -> torch.Tensor:
        positions = [rows.lengths[i] - 1 for i in order]
        return decoded(rows, q[list(order)].contiguous(), rows.ids[list(order)], positions, scale=0.125)

    alone = torch.cat([chosen(0), chosen(1), chosen(2)])
    assert torch.equal(chosen(2, 0, 1), alone[[2, 0, 1]])
    for programs in (3, 6, 9):  # as with so many rows that a program computes all splits of one, or every second or so
        monkeypatch.setattr(attention, "_PROGRAMS", programs)
        assert torch.equal(chosen(0, 1, 2), alone)


def test_many_rows_have_fewer_splits_and_give_the_same_up_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows([1100, 3, 700, 129], 32, (2, 4), 64)
    rows.fill()
    q = rows.queries(4)
    expected = rows.expected(q, [1] * 4, scale=0.125)
    for least in (16, 128, 512, 4096):
        monkeypatch.setattr(attention, "least_keys", lambda *_, least=least: least)
        close(decoded(rows, q, rows.ids, np.array(rows.lengths) - 1, scale=0.125), expected)


def test_splits_get_longer_as_rows_get_more() -> None:
    least = [attention.least_keys(rows, 8) for rows in (1, 4, 16, 64, 128, 256, 512)]
    assert least == sorted(least)
    assert (least[0], least[-1]) == (128, 2048)
    assert 2048 // least[0] * 8 >= 128, "one row of 2,048 keys and 8 KV heads has a program for every multiprocessor"
    assert attention.decode_splits(8, least[0], 2048) == 16
    assert attention.decode_splits(8, attention.least_keys(256, 8), 2304) == 2


@settings(max_examples=12, deadline=None)
@given(
    chunks=st.lists(
        st.tuples(st.sampled_from([0, 1, 30, 64, 130]), st.sampled_from([1, 2, 17, 127, 128, 129])),
        min_size=1,
        max_size=3,
    ),
    heads=st.sampled_from(GROUPS[:4]),
    shape=shapes,
    extra=extras,
)
def test_a_prefill_attends_as_the_portable_kernel_does(chunks, heads, shape, extra) -> None:
    starts, counts = (np.array(x, np.int32) for x in zip(*chunks, strict=True))
    rows = Rows((starts + counts).tolist(), shape["page_size"], heads, shape["head_dim"], shape["dtype"], shape["seed"])
    rows.fill(np.maximum(starts + 1 - extra["window"], 0).tolist() if extra["window"] else None)
    extra = made(rows, extra)
    q = rows.queries(int(counts.sum()))
    tiles = attention.tiles_of(starts, counts, rows.ids)
    tiles = np.concatenate((tiles, [[0, 0, -1, 0]]))  # padding
    found = on_device(attention.prefill, q, ints(tiles), rows.table, rows.pages, **extra)
    close(found, rows.expected(q, counts.tolist(), **extra))


@settings(max_examples=12, deadline=None)
@given(
    chunks=st.lists(
        st.tuples(st.sampled_from([0, 1, 64, 300]), st.sampled_from([1, 1, 2, 17, 129])), min_size=1, max_size=4
    ),
    heads=st.sampled_from(GROUPS[:4]),
    shape=shapes,
    extra=extras,
)
def test_decodes_and_prefills_of_one_step_write_over_their_queries_and_over_nothing_else(
    chunks, heads, shape, extra
) -> None:
    starts, counts = (np.array(x, np.int32) for x in zip(*chunks, strict=True))
    rows = Rows((starts + counts).tolist(), shape["page_size"], heads, shape["head_dim"], shape["dtype"], shape["seed"])
    rows.fill(np.maximum(starts + 1 - extra["window"], 0).tolist() if extra["window"] else None)
    extra, many, one = made(rows, extra), int(counts.sum()), counts == 1
    q = rows.queries(many + 5)
    expected = rows.expected(q[:many].contiguous(), counts.tolist(), **extra)
    before = q.clone()
    tiles = attention.tiles_of(starts, counts, rows.ids)
    tiles = np.concatenate((tiles[~np.isin(tiles[:, 0], rows.ids[one])], [[0, 0, 0, 0]]))
    alone, firsts = np.where(one, starts, -1), counts.cumsum() - counts
    padded = [[*each, more, more] for each, more in ((rows.ids, 0), (alone, -1), (firsts, 0))]

    def both(q: torch.Tensor, table: torch.Tensor, given: list[torch.Tensor], **options) -> torch.Tensor:
        tiles, owners, alone, firsts, done = given
        attention.prefill(q, tiles, table, options.pop("pages"), out=q, **options)
        return attention.decode(q, table, owners, alone, rows.pages.to(q.device), done, out=q, places=firsts, **options)

    done = attention.counters(len(counts) + 2, rows.kv_heads, torch.device("cpu"))
    given = [*(ints(each) for each in (tiles, *padded)), done]
    found = on_device(both, q, rows.table, given, pages=rows.pages, **extra)
    assert not done.any()
    close(found[:many], expected)
    assert torch.equal(found[many:], before[many:])


def test_tiles_cover_each_token_once_the_longest_first() -> None:
    starts, counts, ids = (np.array(x, np.int32) for x in ([5, 0, 1000], [300, 128, 1], [2, 0, 7]))
    tiles = attention.tiles_of(starts, counts, ids)
    assert tiles.tolist() == [
        [7, 428, 1000, 1],
        [2, 256, 261, 44],
        [2, 128, 133, 128],
        [2, 0, 5, 128],
        [0, 300, 0, 128],
    ]


@settings(max_examples=12, deadline=None)
@given(
    heads=st.sampled_from(GROUPS),
    shape=shapes,
    normed=st.booleans(),
    fraction=st.sampled_from([0.0, 0.25, 1.0]),
    places=st.lists(st.integers(-1, 99), min_size=1, max_size=6),
)
def test_an_append_normalises_rotates_and_writes_what_may_be_read(heads, shape, normed, fraction, places) -> None:
    kv_heads, group = heads
    head_dim, dtype, page_size = shape["head_dim"], shape["dtype"], shape["page_size"]
    rows = Rows([100] * len(places), page_size, heads, head_dim, dtype, shape["seed"])
    projection = rows.random(len(places), (2 * group + 2) * kv_heads, head_dim)
    q, k, v = projection.split([2 * group * kv_heads, kv_heads, kv_heads], dim=1)
    q = q[:, ::2]  # as where every head has a gate behind it
    norms = [torch.randn(head_dim, generator=rows.generator) for _ in range(2)] if normed else None
    pairs = int(head_dim * fraction) // 2
    angles = torch.randn(len(places), pairs, generator=rows.generator)
    rotation = (angles.cos(), angles.sin()) if pairs else None
    before = rows.pages.clone()

    def placed(x: torch.Tensor, index: int) -> torch.Tensor:
        x = x.float()
        if norms:
            x = functional.rms_norm(x, (head_dim,), norms[index], 1e-5)
        turned = torch.complex(x[..., :pairs], x[..., pairs : 2 * pairs]) * torch.polar(torch.ones(()), angles)[:, None]
        return torch.cat((turned.real, turned.imag, x[..., 2 * pairs :]), dim=-1)

    found = on_device(
        attention.append, q, k, v, rows.table, ints(rows.ids), ints(places), rows.pages, rotation, norms, epsilon=1e-5
    )
    assert found.is_contiguous()
    used = [i for i, place in enumerate(places) if place >= 0]
    close(found[used], placed(q, 0)[used])
    assert not found[[i for i in range(len(places)) if i not in used]].any(), "padding is zero"
    for i in used:
        unit, slot = int(rows.table[rows.ids[i], places[i] // page_size]), places[i] % page_size
        close(rows.pages[unit, 0, :, slot], placed(k, 1)[i])
        assert torch.equal(rows.pages[unit, 1, :, slot], v[i])
        rows.pages[unit, :, :, slot] = before[unit, :, :, slot]
    torch.testing.assert_close(rows.pages, before, rtol=0, atol=0, equal_nan=True, msg="nothing else is written")


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_an_append_stores_zeros_for_what_is_not_finite(broken: float) -> None:
    rows = Rows([4, 4], 4, (1, 2), 64)
    q, k, v = rows.queries(2), torch.ones(2, 1, 64).half(), torch.ones(2, 1, 64).half()
    k[0, 0, 3], v[0, 0, 5], v[1] = broken, broken, broken
    k[1, 0, 0] = 60000
    rotation = (torch.full((2, 32), 1.5), torch.zeros(2, 32))  # so that the large key overflows
    on_device(attention.append, q, k, v, rows.table, ints(rows.ids), ints([0, 0]), rows.pages, rotation)
    stored = rows.pages[rows.table[rows.ids, 0].long(), :, 0, 0]
    assert stored.isfinite().all()
    assert stored[0, 0, 3] == stored[0, 1, 5] == stored[1, 0, 0] == 0
    assert stored[0, 1].count_nonzero() == 63
    assert stored[0, 0].count_nonzero() == 62, "a rotation spreads it to the other of its pair"
    assert not stored[1, 1].any()
