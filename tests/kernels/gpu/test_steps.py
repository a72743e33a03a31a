"""The two ends of a captured step pass numbers and tokens through host memory."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.base.plan import NO_SLOT, PREVIOUS_SAMPLE
from tenuto.base.sampling import MAX_LOGPROBS
from tenuto.kernels.gpu.attention import tiles_of
from tenuto.kernels.gpu.steps import (
    ADAPTER,
    CHANGED,
    OWN,
    SPAN,
    Entries,
    adapters_of,
    allow,
    begin,
    change,
    finish,
    report,
    select,
    single,
    spread,
    trace,
)
from tenuto.kernels.sampling import OPTIONS, Masks, uniforms
from tenuto.kernels.torch_sampling import mask
from tests.kernels.gpu.conftest import DEVICE

IDS, MOST, FIELDS, TABLES = 100, 150, OWN + 2, 2
MOST_TOKENS, MOST_CHANGES, TILE = 800, 200, 16
MOST_SAMPLES, MOST_MASKS, WORDS = 260, 11, 5


def pinned(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    found = torch.zeros(shape, dtype=dtype)
    return found.pin_memory() if torch.cuda.is_available() else found


class Host:
    """A step as the host writes it, among what earlier steps left. Rows have the numbers of tokens `counts`. Each
    samples after none, the last, or several of them."""

    def __init__(self, counts: list[int], turn: int, seed: int) -> None:
        self.draw = np.random.default_rng(seed)
        ints = {
            "counts": (3, 3 + TABLES),
            "inputs": (3, MOST_TOKENS),
            "numbers": (3, FIELDS, MOST),
            "changes": (3, CHANGED * TABLES, MOST_CHANGES),
            "masked": (3, MOST_SAMPLES),
            "masks": (3, MOST_MASKS, WORDS),
            "tokens": (3, MOST_SAMPLES),
            "top_tokens": (3, MOST_SAMPLES, MAX_LOGPROBS),
        }
        shared = {name: pinned(torch.int32, *shape) for name, shape in ints.items()}
        for each in shared.values():
            each.random_(0, 7)
        floats = {"chosen": (3, MOST_SAMPLES), "top": (3, MOST_SAMPLES, MAX_LOGPROBS)}
        shared |= {name: pinned(torch.float32, *shape) for name, shape in floats.items()}
        records = pinned(torch.float64, 3, MOST, len(OPTIONS.names or ()))
        turns = [torch.tensor([each], dtype=torch.int32, device=DEVICE) for each in (turn, 9)]
        self.entries = Entries(**shared, options=records, turn=turns[0], place=turns[1])
        self.n, self.turn, self.counts = len(counts), turn, np.array(counts, np.int32)
        many = int(self.counts.sum())
        self.changed = [0, int(self.draw.integers(1, MOST_CHANGES))]
        self.inputs = self.entries.inputs[turn].numpy()[:many]
        self.inputs[:] = self.draw.integers(PREVIOUS_SAMPLE, 3, many)
        self.numbers = self.entries.numbers[turn].numpy()[:, : self.n]
        self.starts, self.samples, outputs, self.ids, self.firsts = self.numbers[: SPAN + 2]
        self.ids[:] = self.draw.permutation(IDS)[: self.n]
        self.starts[:] = self.draw.integers(0, 5, self.n) * TILE * self.draw.integers(1, 9, self.n)
        self.firsts[:], self.numbers[SPAN + 2] = self.counts.cumsum() - self.counts, self.counts
        self.numbers[SPAN + 3 : OWN] = self.draw.integers(0, 3, (OWN - SPAN - 3, self.n))
        self.samples[:] = np.minimum(self.draw.integers(0, 4, self.n), self.counts)
        outputs[:] = self.samples.cumsum() - self.samples
        self.numbers[OWN], self.numbers[OWN + 1] = NO_SLOT, 1
        self.sampled = int(self.samples.sum())
        self.entries.counts[turn] = torch.tensor([self.n, many, self.sampled, *self.changed])
        self.options = records[turn].numpy().view(OPTIONS)[: self.n, 0]
        for name in OPTIONS.names or ():
            self.options[name] = self.draw.integers(0, 2**62 if name == "seed" else 99, self.n)

    @property
    def places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The row of each sample, the index of the token before it, and the number of the row's samples after it."""
        of = np.arange(self.n).repeat(self.samples)
        left = self.samples.cumsum()[of] - np.arange(self.sampled) - 1
        return of, (self.firsts + self.counts)[of] - left - 1, left


turns, seeds = st.integers(0, 2), st.integers(0, 9)


@settings(max_examples=20, deadline=None)
@given(
    counts=st.lists(st.sampled_from([1, 1, 2, 7]), max_size=40), rows=st.sampled_from([40, 140]), turn=turns, seed=seeds
)
def test_a_step_reads_what_the_host_wrote_and_writes_what_it_samples(counts, rows, turn, seed) -> None:
    host = Host(counts, turn, seed)
    entries, n = host.entries, host.n
    begun = begin(entries, FIELDS, rows)
    found = begun.numbers.cpu().numpy()
    assert (found[:, :n] == host.numbers).all()
    assert (found[:, n:] == np.array([0, 0, 2**30, 0, 2**30, 0, 0, 0, 0, -1, -1])[:, None]).all()
    assert begun.alone.tolist() == [*np.where(host.counts == 1, host.starts, -1), *[-1] * (rows - n)]

    many, spare = host.sampled, 1 + rows % 7
    sampling = select(entries, begun, many + spare)
    of, after, left = host.places
    assert sampling.after.tolist() == [*after, *[0] * spare]
    assert sampling.owners.tolist() == [*np.where(left == 0, host.ids[of], -1), *[-1] * spare]
    temperature, top_k, top_p, min_p, uniform = (each.cpu().numpy() for each in sampling.choice)
    for name, values in {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}.items():
        assert (values[:many] == host.options[name][of]).all()
        assert not values[many:].any()
    positions = host.starts[of].astype(np.int64) + after - host.firsts[of] + 1
    assert (uniform[:many] == uniforms(host.options["seed"][of], positions)).all()

    traced = trace(entries, begun, many + spare)
    rows_of, at, guesses = (each.tolist() for each in (traced.rows, traced.positions, traced.guesses))
    assert rows_of == [*host.ids[of], *[-1] * spare]
    assert at[:many] == positions.tolist()
    first = left == host.samples[of] - 1
    assert guesses == [*np.where(first, -1, host.inputs[after]), *[-1] * spare]

    table = torch.arange(IDS * 30, dtype=torch.int32, device=DEVICE).view(IDS, 30)
    expected = table.cpu().numpy().copy()
    changed = host.changed[1]
    moved = entries.changes[turn].numpy()[CHANGED : 2 * CHANGED, :changed]
    moved[:] = np.arange(changed) % IDS, np.arange(changed) // IDS, host.draw.integers(0, 9999, changed)
    expected[moved[0], moved[1]] = moved[2]
    for number in range(TABLES):
        change(entries, number, table)
    assert (table.cpu().numpy() == expected).all()

    before, sampled = entries.tokens.clone(), torch.arange(IDS, dtype=torch.int32, device=DEVICE)
    finish(entries, sampling, torch.arange(many + spare, device=DEVICE) + 100, sampled)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    known, last = np.arange(IDS), left == 0
    known[host.ids[of[last]]] = np.flatnonzero(last) + 100
    before[turn, :many] = torch.arange(many) + 100
    assert (sampled.cpu().numpy() == known).all()
    assert torch.equal(entries.tokens, before)
    assert int(entries.turn) == (turn + 1) % 3


@settings(max_examples=20, deadline=None)
@given(
    counts=st.lists(st.sampled_from([1, 2, 7]), max_size=9),
    vocab=st.sampled_from([1, 31, 32, 130, 150, 5000]),
    spare=st.integers(1, 3),
    turn=turns,
    seed=seeds,
)
def test_samples_with_a_mask_keep_the_logits_that_it_allows(counts, vocab, spare, turn, seed) -> None:
    host = Host(counts, turn, seed)
    many, entries = host.sampled, host.entries
    begin(entries, FIELDS, host.n + 1)
    masked, masks = entries.masked[turn].numpy(), entries.masks[turn].numpy()
    chosen = host.draw.permutation(many)[: MOST_MASKS - 1]
    masked[:many] = -1
    masked[chosen] = host.draw.permutation(MOST_MASKS)[: len(chosen)]
    masks[:] = host.draw.integers(-(2**31), 2**31, masks.shape)
    masks[:, 0] |= 1  # what allows no token is no mask
    logits = torch.randn(many + spare, vocab + 3, generator=torch.Generator().manual_seed(seed))
    expected = logits.clone()
    mask(expected[:, :vocab], Masks(chosen, masks[masked[chosen]].view(np.uint32)))
    given = logits.to(DEVICE)
    allow(entries, given[:, :vocab])
    assert torch.equal(given.cpu(), expected)


@settings(max_examples=10, deadline=None)
@given(samples=st.integers(1, 150), width=st.sampled_from([0, 1, 7, MAX_LOGPROBS]), turn=turns)
def test_log_probabilities_reach_the_host(samples, width, turn) -> None:
    host = Host([1], turn, 0)
    entries, draw = host.entries, torch.Generator().manual_seed(samples)
    entries.counts[turn, 2] = taken = samples - samples // 3  # the others are of a larger captured step
    begin(entries, FIELDS, 4)
    before = [each.clone() for each in (entries.chosen, entries.top_tokens, entries.top)]
    wide = torch.randn(samples, width + 3, generator=draw)
    chosen, top, ids = wide[:, 0].contiguous(), wide[:, 1 : 1 + width], (wide[:, 1 : 1 + width] * 1000).long()
    report(entries, *(each.to(DEVICE) for each in (chosen, ids, top)))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    before[0][turn, :taken] = chosen[:taken]
    before[1][turn, :taken, :width] = ids[:taken].int()
    before[2][turn, :taken, :width] = top[:taken]
    for found, expected in zip((entries.chosen, entries.top_tokens, entries.top), before, strict=True):
        assert torch.equal(found, expected)


@settings(max_examples=10, deadline=None)
@given(count=st.integers(0, 40), rows=st.sampled_from([40, 140]), turn=turns, seed=seeds)
def test_rows_of_one_token_read_it_or_what_they_sampled_last(count, rows, turn, seed) -> None:
    host = Host([1] * count, turn, seed)
    sampled = torch.arange(IDS, dtype=torch.int32, device=DEVICE) + 50
    found = single(host.entries, begin(host.entries, FIELDS, rows), sampled)
    expected = np.where(host.inputs == PREVIOUS_SAMPLE, host.ids + 50, host.inputs)
    assert found.tolist() == [*expected, *[0] * (rows - count)]


@settings(max_examples=25, deadline=None)
@given(
    counts=st.lists(st.sampled_from([1, 1, 2, 15, 16, 17, 32, 100]), max_size=7),
    more=st.integers(0, 90),
    spare=st.integers(0, 40),
    turn=turns,
    seed=seeds,
)
def test_tokens_find_their_rows_and_tiles_are_those_that_the_host_would_cut(counts, more, spare, turn, seed) -> None:
    counts = [*counts, *[1] * more]
    host = Host(counts, turn, seed)
    many, sampled = int(host.counts.sum()), torch.arange(IDS, dtype=torch.int32, device=DEVICE) + 50
    found = spread(host.entries, begin(host.entries, FIELDS, host.n + spare + 4), max(many + spare, 16), TILE, sampled)
    owners = np.repeat(host.ids, host.counts)
    assert found.ids.tolist()[:many] == np.where(host.inputs == PREVIOUS_SAMPLE, owners + 50, host.inputs).tolist()
    assert found.owners.tolist()[:many] == owners.tolist()
    slots = adapters_of(begin(host.entries, FIELDS, host.n + spare + 4), many + spare)
    assert slots.tolist() == [*np.repeat(host.numbers[ADAPTER], host.counts), *[0] * spare]
    within = np.arange(many) - np.repeat(host.firsts, host.counts)
    assert found.positions.tolist()[:many] == (np.repeat(host.starts, host.counts) + within).tolist()
    assert set(found.positions.tolist()[many:]) <= {-1}
    assert set(found.ids.tolist()[many:] + found.owners.tolist()[many:]) <= {0}
    chosen = host.counts > 1
    tiles = tiles_of(host.starts, host.counts, host.ids, TILE)
    expected = tiles[np.isin(tiles[:, 0], host.ids[chosen])].tolist()
    assert found.tiles.tolist() == expected + [[0] * 4] * (len(found.tiles) - len(expected))
