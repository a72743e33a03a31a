"""The two ends of a captured step pass numbers and tokens through host memory."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.base.plan import NO_SLOT, PREVIOUS_SAMPLE
from tenuto.kernels.gpu.steps import CHANGED, OWN, Entries, begin, change, finish
from tenuto.kernels.sampling import OPTIONS, uniforms
from tests.kernels.gpu.conftest import DEVICE

IDS, MOST, FIELDS, TABLES = 40, 150, OWN + 2, 2


def pinned(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    found = torch.zeros(shape, dtype=dtype)
    return found.pin_memory() if torch.cuda.is_available() else found


@settings(max_examples=20, deadline=None)
@given(count=st.integers(0, IDS), rows=st.sampled_from([IDS, 140]), turn=st.integers(0, 2), seed=st.integers(0, 9))
def test_a_step_reads_what_the_host_wrote_and_writes_what_it_samples(count, rows, turn, seed) -> None:
    generator = np.random.default_rng(seed)
    ints = {"counts": (3, 1 + TABLES), "numbers": (3, FIELDS + CHANGED * TABLES, MOST), "tokens": (3, MOST)}
    shared = {name: pinned(torch.int32, *shape) for name, shape in ints.items()}
    for each in shared.values():
        each.random_(0, 7)  # what earlier steps left
    records = pinned(torch.float64, 3, MOST, len(OPTIONS.names or ()))
    turns = [torch.tensor([each], dtype=torch.int32, device=DEVICE) for each in (turn, 9)]
    entries = Entries(**shared, options=records, turn=turns[0], place=turns[1])
    numbers, options = entries.numbers[turn].numpy(), records[turn].numpy().view(OPTIONS)[:, 0]
    changes = [0, int(generator.integers(1, IDS))]
    entries.counts[turn] = torch.tensor([count, *changes])
    ids = generator.permutation(IDS)[:count].astype(np.int32)
    numbers[0, :count] = generator.integers(PREVIOUS_SAMPLE, 3, count)
    numbers[1, :count], numbers[2, :count] = ids, generator.integers(0, 5000, count)
    numbers[3, :count], numbers[4, :count] = NO_SLOT, 1
    for name in OPTIONS.names or ():
        options[name][:count] = generator.integers(0, 2**62 if name == "seed" else 99, count)
    table, sampled = (torch.arange(n, dtype=torch.int32, device=DEVICE) for n in (IDS * 30, IDS))
    table = table.view(IDS, 30)
    expected_table, known = table.cpu().numpy().copy(), sampled.cpu().numpy().copy()
    moved = numbers[FIELDS + CHANGED : FIELDS + 2 * CHANGED, : changes[1]]
    moved[:] = np.arange(changes[1]), generator.integers(0, 30, changes[1]), generator.integers(0, 9999, changes[1])
    expected_table[moved[0], moved[1]] = moved[2]

    begun = begin(entries, FIELDS, rows, sampled)
    for number in range(TABLES):
        change(entries, number, FIELDS, table)
    found = begun.numbers.cpu().numpy()
    tokens = np.where(numbers[0, :count] == PREVIOUS_SAMPLE, known[ids], numbers[0, :count])
    assert (found[0, :count] == tokens).all()
    assert (found[1:, :count] == numbers[1:FIELDS, :count]).all()
    assert (found[:, count:] == np.array([0, 0, -1, -1, -1])[:, None]).all()
    assert (table.cpu().numpy() == expected_table).all()
    temperature, top_k, top_p, min_p, uniform = (each.cpu().numpy() for each in begun.choice)
    for name, values in {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}.items():
        assert (values[:count] == options[name][:count]).all()
        assert not values[count:].any()
    assert (uniform[:count] == uniforms(options["seed"][:count], numbers[2, :count].astype(np.int64) + 1)).all()

    before = entries.tokens.clone()
    samples = torch.arange(rows, device=DEVICE) + 100
    finish(entries, begun, samples, sampled)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    known[ids] = np.arange(count) + 100
    before[turn, :count] = torch.arange(count, dtype=torch.int32) + 100
    assert (sampled.cpu().numpy() == known).all()
    assert torch.equal(entries.tokens, before)
    assert int(turns[0]) == (turn + 1) % 3
