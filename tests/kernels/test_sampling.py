"""Sampling draws from the distribution its options describe, by numbers that depend on seed and position alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.kernels.sampling import Choice, sample, uniforms


def choice(rows: list[tuple[float, int, float]], uniform: np.ndarray) -> Choice:
    temperature, top_k, top_p = zip(*rows, strict=True)
    return Choice(np.array(temperature, float), np.array(top_k), np.array(top_p, float), uniform)


def distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """What the options mean, in float64 and one step at a time."""
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    order = np.argsort(-p, kind="stable")
    order = order[: top_k or None]
    cumulative = np.cumsum(p[order]) / p[order].sum()
    order = order[: int(np.searchsorted(cumulative, top_p)) + 1]
    kept = np.zeros_like(p)
    kept[order] = p[order]
    return kept / kept.sum()


@pytest.mark.parametrize("vocab", [50, 3000])
@pytest.mark.parametrize(
    "options",
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (1.0, 7, 1.0), (1.0, 0, 0.8), (1.5, 20, 0.6), (1.0, 0, 0.999), (2.0, 2000, 0.99)],
    ids=str,
)
def test_draws_follow_the_distribution_the_options_describe(vocab: int, options: tuple[float, int, float]) -> None:
    logits = np.random.default_rng(4).normal(0, 2, vocab).astype(np.float32)
    expected = distribution(logits, *options)
    # Evenly spread numbers through the inverse distribution give each token its share, to within one number.
    n = 4000
    rows = torch.from_numpy(logits).expand(n, vocab)
    tokens = sample(rows, choice([options] * n, (np.arange(n) + 0.5) / n)).numpy()
    share = np.bincount(tokens, minlength=vocab) / n
    assert np.abs(share - expected).max() <= 1.01 / n
    assert (expected[tokens] > 0).all()


def test_greedy_rows_take_the_first_of_the_highest_logits() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 2.0]])
    assert sample(logits, choice([(0, 0, 1.0)] * 2, np.array([0.9, 0.9]))).tolist() == [1, 0]


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.01, 0.7, 3.0]), st.sampled_from([0, 1, 5, 1500]), st.sampled_from([0.1, 0.9, 1])
        ),
        min_size=1,
        max_size=6,
    ),
    seed=st.integers(0, 1000),
)
def test_a_rows_token_does_not_depend_on_its_batch(rows: list[tuple[float, int, float]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), 2000, generator=generator)
    uniform = uniforms(np.full(len(rows), seed), np.arange(len(rows)))
    together = sample(logits, choice(rows, uniform))
    alone = [sample(logits[i : i + 1], choice([rows[i]], uniform[i : i + 1])).item() for i in range(len(rows))]
    assert together.tolist() == alone


def test_top_k_of_one_and_a_tiny_temperature_and_a_tiny_top_p_are_greedy() -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(1))
    tokens = sample(logits, choice([(1.0, 1, 1.0), (1e-300, 0, 1.0), (1.0, 0, 1e-9)], np.full(3, 0.999)))
    assert tokens.tolist() == logits.argmax(-1).tolist()


def test_excluded_tokens_are_never_drawn_however_extreme_the_number() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    ends = np.array([0.0, 1 - 2.0**-52])
    assert sample(logits.expand(2, 5), choice([(1.0, 0, 1.0)] * 2, ends)).tolist() == [1, 3]


def test_logits_that_are_not_numbers_give_some_token_and_leave_other_rows_alone() -> None:
    good = torch.randn(1, 2000, generator=torch.Generator().manual_seed(1))
    options, uniform = [(1.0, 0, 0.9)] * 3, np.full(3, 0.5)
    logits = torch.cat((torch.full((1, 2000), torch.nan), good, torch.full((1, 2000), torch.inf)))
    tokens = sample(logits, choice(options, uniform))
    assert ((tokens >= 0) & (tokens < 2000)).all()
    assert tokens[1] == sample(good, choice(options[:1], uniform[:1]))[0]


def test_an_empty_batch_samples_nothing() -> None:
    assert sample(torch.empty(0, 10), Choice(*(np.empty(0) for _ in range(4)))).shape == (0,)


def test_random_numbers_are_uniform_and_unrelated_between_seeds_and_positions() -> None:
    grid = np.meshgrid(np.arange(200), np.arange(500), indexing="ij")
    numbers = uniforms(*grid)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 160  # chi-square with 99 degrees: exceeded by 1 seed in 10,000
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.015
    assert abs(np.corrcoef(numbers[:, :-1].ravel(), numbers[:, 1:].ravel())[0, 1]) < 0.015
    assert np.unique(numbers).size == numbers.size


def test_random_numbers_are_the_same_on_every_machine_and_in_every_release() -> None:
    numbers = uniforms(np.array([0, 0, 1, 2**63 - 1]), np.array([0, 1, 0, 2**31]))
    assert numbers.tolist() == [0.6524484863740321, 0.7012121095215251, 0.36818951565166946, 0.6895452185994593]
