"""The sampling kernel for GPUs chooses what the reference chooses."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.kernels.gpu.sampling import sample
from tenuto.kernels.sampling import Choice
from tenuto.kernels.torch_sampling import kept_probabilities
from tenuto.kernels.torch_sampling import sample as reference
from tests.kernels.gpu.conftest import DEVICE

TOLERANCE = 1e-5
"""A random number this close to the limit between two tokens may choose either."""
LAST = 1 - 2.0**-52


def options(rows: int, **given: object) -> Choice:
    """Returns the given options, each for all rows or one per row, and random numbers."""
    default: dict[str, object] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    default["uniform"] = np.random.default_rng(5).random(rows)
    assert given.keys() <= default.keys()

    def column(name: str) -> np.ndarray:
        return np.broadcast_to(np.asarray(given.get(name, default[name]), float), rows).copy()

    temperature, top_k, top_p, min_p, uniform = (column(name) for name in default)
    return Choice(temperature, top_k.astype(np.int64), top_p, min_p, uniform)


def sampled(logits: torch.Tensor, choice: Choice) -> torch.Tensor:
    given = choice.temperature, choice.top_k, choice.top_p, choice.min_p, choice.uniform
    return sample(logits.to(DEVICE), *(torch.from_numpy(each).to(DEVICE) for each in given)).cpu()


def check(logits: torch.Tensor, choice: Choice) -> None:
    found, expected = sampled(logits, choice), reference(logits.float(), choice)
    for row in (found != expected).nonzero().flatten().tolist():
        one = choice.rows(np.array([row]))
        assert choice.temperature[row] > 0, "greedy rows have no choice"
        below = kept_probabilities(logits[row : row + 1].float(), one).cumsum(dim=1)[0]
        below /= below[-1].clone()
        first, second = sorted((int(found[row]), int(expected[row])))
        assert abs(below[first] - one.uniform[0]) < TOLERANCE
        assert abs(below[second - 1] - one.uniform[0]) < TOLERANCE


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.0},
        {},
        {"temperature": [0.0, 1.0, 0.5, 1e-3, 2.0, 5.0, 1.0, 0.0]},
        {"top_k": [0, 1, 2, 5, 50, 100, 101, 1000]},
        {"top_p": [0.01, 0.1, 0.3, 0.5, 0.9, 0.99, 0.999, 1.0]},
        {"top_p": [1e-300, 1e-9, 1 - 1e-9, 1 - 2.0**-53] * 2, "top_k": [0, 0, 0, 0, 3, 3, 90, 99]},
        {"min_p": [0.0, 0.01, 0.1, 0.3, 0.5, 0.9, 0.99, 1.0]},
        {"top_k": 7, "top_p": 0.6, "min_p": 0.05, "temperature": 1.7},
        {"uniform": [0.0, LAST] * 4},
        {"uniform": [0.0, LAST] * 4, "top_k": 3, "top_p": 0.7},
    ],
)
@pytest.mark.parametrize("vocab", [101, 4096, 5000])
def test_the_same_tokens_are_sampled(given: dict[str, object], vocab: int) -> None:
    logits = 3 * torch.randn(8, vocab, generator=torch.Generator().manual_seed(vocab))
    check(logits, options(8, **given))


@pytest.mark.parametrize("vocab", [49_152, 151_936])
def test_large_vocabularies(vocab: int) -> None:
    logits = 4 * torch.randn(3, vocab, generator=torch.Generator().manual_seed(1))
    check(logits, options(3, temperature=[0.0, 1.0, 0.7], top_k=[0, 50, 0], top_p=[1.0, 0.9, 0.8]))
    check(logits, options(3, top_k=vocab - 1))


def test_rows_may_be_strided_and_in_half_precision_with_options_in_single_precision() -> None:
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(4)).half()[:, :600]
    given = {"temperature": torch.full((3,), 0.5), "top_p": torch.ones(3), "min_p": torch.zeros(3)}
    found = sample(
        logits.to(DEVICE),
        given["temperature"].to(DEVICE),
        torch.tensor([0, 5, 1], dtype=torch.int32, device=DEVICE),
        given["top_p"].to(DEVICE),
        given["min_p"].to(DEVICE),
        torch.tensor([0.25, 0.5, 0.75], device=DEVICE),
    )
    expected = reference(logits.float(), options(3, temperature=0.5, top_k=[0, 5, 1], uniform=[0.25, 0.5, 0.75]))
    assert found.cpu().tolist() == expected.tolist()


def shares(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Returns the probabilities of one row that the options describe, in float64. Of ties the first are kept."""
    p = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-p, kind="stable")[: top_k or None]
    before = np.cumsum(p[order]) - p[order]
    order = order[before < top_p * p[order].sum()]
    order = order[p[order] >= min_p * p.max()]
    kept = np.zeros_like(p)
    kept[order] = p[order]
    return kept / kept.sum()


@settings(max_examples=12, deadline=None)
@given(
    vocab=st.sampled_from([1, 2, 50, 4097]),
    levels=st.integers(1, 5),
    temperature=st.sampled_from([0.31, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 3, 20, 49]),
    top_p=st.sampled_from([1.0, 0.9137, 0.5371, 0.0713]),
    min_p=st.sampled_from([0.0, 0.0123, 0.4321, 1.0]),
    seed=st.integers(0, 1000),
)
def test_among_tied_tokens_exactly_the_first_are_kept(vocab, levels, temperature, top_k, top_p, min_p, seed) -> None:
    generator = np.random.default_rng(seed)
    logits = generator.integers(-levels, 2, vocab).astype(np.float32)
    logits[generator.random(vocab) < 0.3] = -np.inf
    logits[-1] = generator.integers(0, 2)
    logits[logits == 0] *= generator.choice([1.0, -1.0], (logits == 0).sum())  # zeros of both signs are tied
    numbers = (np.arange(8) + 0.5) / 8
    given = options(8, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, uniform=numbers)
    found = sampled(torch.from_numpy(logits).expand(8, vocab), given).numpy()
    expected = shares(logits.astype(np.float64), temperature, top_k, top_p, min_p)
    assert (expected[found] > 0).all()
    until = np.cumsum(expected)[found]
    assert (until > numbers - TOLERANCE).all()
    assert (until - expected[found] < numbers + TOLERANCE).all()


def test_greedy_rows_take_the_first_of_the_highest_logits() -> None:
    logits = torch.zeros(2, 9000)
    logits[0, [4095, 4096, 8999]] = 3
    logits[1, [8999, 8192]] = 1
    assert sampled(logits, options(2, temperature=0)).tolist() == [4095, 8192]


@pytest.mark.filterwarnings("ignore:overflow")  # where NumPy warns, a GPU goes on with infinity
@pytest.mark.parametrize("low", [1e-300, 1e-30, 1e-6])
def test_a_temperature_close_to_zero_takes_the_likeliest_token(low: float) -> None:
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(2))
    logits[1, 7] = -3e38
    given = options(3, temperature=low, top_k=[0, 9, 0], top_p=[1.0, 0.9, 0.9], uniform=LAST)
    assert torch.equal(sampled(logits, given), logits.argmax(dim=1))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_anything_leads_to_a_token_and_leaves_others_alone(bad: float, temperature: float) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(3))
    given = options(3, temperature=temperature, top_k=5, top_p=0.9)
    clean = sampled(logits, given)
    for places in (slice(None), slice(10, 20), slice(0, 47)):
        spoilt = logits.clone()
        spoilt[1, places] = bad
        found = sampled(spoilt, given)
        assert ((found >= 0) & (found < 50)).all()
        assert torch.equal(found[[0, 2]], clean[[0, 2]])


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.7, 3.0]), st.sampled_from([0, 5, 900])), min_size=2, max_size=5))
def test_a_rows_token_does_not_depend_on_its_batch(rows: list[tuple[float, int]]) -> None:
    logits = torch.randn(len(rows), 4500, generator=torch.Generator().manual_seed(6))
    temperature, top_k = zip(*rows, strict=True)
    given = options(len(rows), temperature=temperature, top_k=top_k, top_p=0.95)
    alone = [sampled(logits[i : i + 1], given.rows(np.array([i]))).item() for i in range(len(rows))]
    assert sampled(logits, given).tolist() == alone
