"""Sampling draws from the distribution its options describe, with numbers that depend only on seed and position."""

from collections.abc import Callable
from ctypes import byref
from dataclasses import fields
from functools import cache
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tenuto.base.config import cache_dir
from tenuto.base.plan import RowSampling
from tenuto.base.sampling import LEAST_LOGPROB, Sampling
from tenuto.exec.native_forward import NativeLogits
from tenuto.exec.row_edits import HostEdits
from tenuto.exec.token_counts import NO_GUESS
from tenuto.exec.torch_forward import TorchLogits
from tenuto.kernels.native.build import VARIANTS, Machine, library
from tenuto.kernels.native.library import Library, Model, Op, loaded
from tenuto.kernels.native.sampling import sample as native_sample
from tenuto.kernels.native.sampling import score as native_score
from tenuto.kernels.sampling import Choice, Masks, penalise, uniforms
from tenuto.kernels.torch_sampling import kept_probabilities, mask, score
from tenuto.kernels.torch_sampling import sample as torch_sample
from tests.kernels.reference import Row, reference_kept, reference_logits

Sample = Callable[..., torch.Tensor]
"""Samples from logits by a choice, perhaps with masks."""
Tell = Callable[[np.ndarray, np.ndarray, int], tuple[np.ndarray, ...]]
"""Returns log-probabilities from logits: those of the tokens, and this many of the likeliest."""
HERE = Machine.this()
NOT_LOADED = cast("Library", None)  # for code that does not call it


@cache
def native(variant: str) -> Sample:
    return sampler(loaded(library(cache_dir(), HERE, variant, print)))


def sampler(kernels: Library) -> Sample:
    """Samples with two threads of these kernels, for logits of any vocabulary."""

    @cache
    def forward(vocab: int) -> int:
        model = Model(hidden=16, vocab=vocab, page_size=16)
        opened: int = kernels.open(byref(model), (Op * 0)(), 0, 2)
        return opened

    def sample(logits: torch.Tensor, choice: Choice, masks: Masks | None = None) -> torch.Tensor:
        return torch.from_numpy(native_sample(kernels, forward(logits.shape[1]), logits.numpy(), choice, masks))

    return sample


def portable(logits: torch.Tensor, choice: Choice, masks: Masks | None = None) -> torch.Tensor:
    if masks is not None:
        mask(logits, masks)
    return torch_sample(logits, choice)


def portable_logprobs(logits: np.ndarray, tokens: np.ndarray, most: int) -> tuple[np.ndarray, ...]:
    return tuple(part.numpy() for part in score(torch.from_numpy(logits), torch.from_numpy(tokens), most))


TELLING: dict[str, Tell] = {"torch": portable_logprobs, "native": native_score}


@pytest.fixture(scope="module", params=["torch", *VARIANTS])
def sample(request: pytest.FixtureRequest) -> Sample:
    if request.param == "torch":
        return portable
    if HERE.compiler is None or request.param not in HERE.variants():
        pytest.skip(f"{request.param} cannot run here")
    return native(request.param)


def choice(rows: list[tuple[float, int, float]], uniform: np.ndarray) -> Choice:
    temperature, top_k, top_p = zip(*rows, strict=True)
    return Choice(np.array(temperature, float), np.array(top_k), np.array(top_p, float), np.zeros(len(rows)), uniform)


def distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Returns the distribution that the options define, in float64 and one step at a time."""
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
def test_draws_follow_the_distribution_the_options_describe(
    sample: Sample, vocab: int, options: tuple[float, int, float]
) -> None:
    logits = np.random.default_rng(4).normal(0, 2, vocab).astype(np.float32)
    expected = distribution(logits, *options)
    # Evenly spread numbers through the inverse distribution give each token its share, to within one number.
    n = 4000
    rows = torch.from_numpy(logits).expand(n, vocab)
    tokens = sample(rows, choice([options] * n, (np.arange(n) + 0.5) / n)).numpy()
    share = np.bincount(tokens, minlength=vocab) / n
    assert np.abs(share - expected).max() <= 1.05 / n
    assert (expected[tokens] > 0).all()


def test_greedy_rows_take_the_first_of_the_highest_logits(sample: Sample) -> None:
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
def test_a_rows_token_does_not_depend_on_its_batch(
    sample: Sample, rows: list[tuple[float, int, float]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), 2000, generator=generator)
    uniform = uniforms(np.full(len(rows), seed), np.arange(len(rows)))
    together = sample(logits, choice(rows, uniform))
    alone = [sample(logits[i : i + 1], choice([rows[i]], uniform[i : i + 1])).item() for i in range(len(rows))]
    assert together.tolist() == alone


def test_top_k_of_one_and_a_tiny_temperature_and_a_tiny_top_p_are_greedy(sample: Sample) -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(1))
    tokens = sample(logits, choice([(1.0, 1, 1.0), (1e-300, 0, 1.0), (1.0, 0, 1e-9)], np.full(3, 0.999)))
    assert tokens.tolist() == logits.argmax(-1).tolist()


def test_excluded_tokens_are_never_drawn_however_extreme_the_number(sample: Sample) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    ends = np.array([0.0, 1 - 2.0**-52])
    assert sample(logits.expand(2, 5), choice([(1.0, 0, 1.0)] * 2, ends)).tolist() == [1, 3]


def test_nan_logits_give_some_token_and_leave_other_rows_alone(sample: Sample) -> None:
    good = torch.randn(1, 2000, generator=torch.Generator().manual_seed(1))
    options, uniform = [(1.0, 0, 0.9)] * 3, np.full(3, 0.5)
    logits = torch.cat((torch.full((1, 2000), torch.nan), good, torch.full((1, 2000), torch.inf)))
    tokens = sample(logits, choice(options, uniform))
    assert ((tokens >= 0) & (tokens < 2000)).all()
    assert tokens[1] == sample(good, choice(options[:1], uniform[:1]))[0]


def test_an_empty_batch_samples_nothing(sample: Sample) -> None:
    assert sample(torch.empty(0, 10), choice_of([], np.empty(0))).shape == (0,)


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


VOCAB = 60
# Numbers that float32 adds, multiplies and divides exactly, so that the float64 reference has the same logits.
tokens = st.integers(0, VOCAB - 1)
asked_rows = st.lists(
    st.builds(
        Row,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        top_k=st.sampled_from([0, 1, 5, 40]),
        top_p=st.sampled_from([0.3711, 0.8117, 1.0]),
        min_p=st.sampled_from([0.0, 0.0, 0.0713, 0.4999, 1.0]),
        repetition=st.sampled_from([1.0, 0.5, 2.0, 4.0]),
        presence=st.sampled_from([0.0, -1.5, 0.75]),
        frequency=st.sampled_from([0.0, -0.25, 0.5]),
        bias=st.dictionaries(tokens, st.sampled_from([-100.0, -2.5, 1.25, 100.0]), max_size=4),
        masked=st.lists(tokens, max_size=4, unique=True),
        prompt=st.lists(tokens, max_size=20),
        output=st.lists(tokens, max_size=20),
    ),
    min_size=1,
    max_size=5,
)


def edited_logits(logits: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    """Returns our logits of the whole batch, after edits."""
    edits, positions = HostEdits(VOCAB), np.zeros(len(rows), np.int64)
    for i, row in enumerate(rows):
        asked = Sampling(
            repetition_penalty=row.repetition,
            presence_penalty=row.presence,
            frequency_penalty=row.frequency,
            logit_bias=tuple(row.bias.items()),
        )
        prompt, output = (np.array(tokens, np.int32) for tokens in (row.prompt, row.output))
        edits.start(i, RowSampling(asked, prompt, output, masked=tuple(row.masked), masked_before=1))
    edited, array = TorchLogits(logits.clone()), logits.numpy().copy()
    edits.edit(edited, np.arange(len(rows)), positions, np.full(len(rows), NO_GUESS))
    edits.edit(NativeLogits(NOT_LOADED, 0, array), np.arange(len(rows)), positions, np.full(len(rows), NO_GUESS))
    assert np.array_equal(edited.host(), array)
    return torch.from_numpy(array)


def choice_of(rows: list[Row], uniform: np.ndarray) -> Choice:
    names = [field.name for field in fields(Choice)][:-1]
    return Choice(**{name: np.array([getattr(row, name) for row in rows]) for name in names}, uniform=uniform)


def random_logits(rows: int, seed: int) -> torch.Tensor:
    """Returns logits that are distinct in each row, and exact in 19 bits."""
    rng = np.random.default_rng(seed)
    steps = np.array([rng.choice(2**19, VOCAB, replace=False) for _ in range(rows)]) - 2**18
    return torch.from_numpy((steps / 2**15).astype(np.float32))


@settings(deadline=None)
@given(rows=asked_rows, seed=st.integers(0, 10**6))
def test_a_rows_possible_tokens_and_their_probabilities_follow_the_definitions(
    sample: Sample, rows: list[Row], seed: int
) -> None:
    logits = random_logits(len(rows), seed)
    uniform = uniforms(np.full(len(rows), seed), np.arange(len(rows)))
    edited = edited_logits(logits, rows)
    expected = np.array([reference_logits(row.numpy(), asked) for row, asked in zip(logits, rows, strict=True)])
    np.testing.assert_array_equal(edited.numpy(), expected)
    drawn = sample(edited, choice_of(rows, uniform)).tolist()
    for i, row in enumerate(rows):
        assume(len(np.unique(expected[i][np.isfinite(expected[i])])) == np.isfinite(expected[i]).sum())
        if row.temperature == 0:
            assert drawn[i] == expected[i].argmax()
            continue
        ours = kept_probabilities(edited[i : i + 1], choice_of([row], uniform[i : i + 1]))[0].numpy()
        kept, nearest = reference_kept(expected[i], row)
        exact = sample is portable  # in float64; the others are in float32
        assume(nearest > (1e-9 if exact else 1e-5))
        np.testing.assert_allclose(ours / ours.sum(), kept, rtol=1e-9, atol=1e-15)
        ends = np.cumsum(kept)
        assume(np.abs(ends - uniform[i]).min() > (1e-9 if exact else 1e-5))
        assert drawn[i] == np.searchsorted(ends, uniform[i], side="right")


@settings(deadline=None, max_examples=30)
@given(rows=asked_rows, seed=st.integers(0, 10**6))
def test_a_row_with_all_options_does_not_depend_on_its_batch(sample: Sample, rows: list[Row], seed: int) -> None:
    logits = random_logits(len(rows), seed)
    uniform = uniforms(np.full(len(rows), seed), np.arange(len(rows)))
    together = edited_logits(logits, rows)
    drawn = sample(together, choice_of(rows, uniform))
    told = TELLING["native"](logits.numpy(), drawn.numpy(), 5)
    for i, row in enumerate(rows):
        alone = edited_logits(logits[i : i + 1], [row])
        assert torch.equal(alone, together[i : i + 1])
        assert sample(alone, choice_of([row], uniform[i : i + 1])) == drawn[i]
        one = TELLING["native"](logits[i : i + 1].numpy(), drawn[i : i + 1].numpy(), 5)
        assert all(np.array_equal(part[0], whole[i]) for part, whole in zip(one, told, strict=True))


@given(
    logit=st.floats(-30, 30, width=32),
    repetition=st.floats(0.01, 100),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    count=st.integers(0, 1000),
)
def test_penalties_of_any_size_match_float64_to_single_precision(
    logit: float, repetition: float, presence: float, frequency: float, count: int
) -> None:
    row = Row(0, 0, 1, 0, repetition, presence, frequency, prompt=[0], output=[0] * count)
    ours = penalise(
        np.array([logit], np.float32),
        np.array([count]),
        *(np.array([x], np.float32) for x in (repetition, presence, frequency)),
    )
    largest = abs(logit) * max(repetition, 1 / repetition) + 2 * count
    assert abs(ours.item() - reference_logits(np.array([logit]), row)[0]) <= 1e-6 * largest + 1e-30


@pytest.mark.parametrize("tell", TELLING.values(), ids=TELLING.keys())
@settings(deadline=None)
@given(seed=st.integers(0, 1000), most=st.integers(0, 20), vocab=st.sampled_from([1, 7, 3000]))
def test_logprobs_are_the_log_softmax_in_falling_order(tell: Tell, seed: int, most: int, vocab: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 8, (11, vocab)).astype(np.float32)
    chosen = rng.integers(0, vocab, 11)
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    ours, ids, top = tell(logits, chosen, most)
    assert [str(part.dtype) for part in (ours, ids, top)] == ["float32", "int64", "float32"]
    np.testing.assert_allclose(ours, exact[np.arange(11), chosen], atol=1e-5)
    assert ids.shape == top.shape == (11, min(most, vocab))
    np.testing.assert_allclose(top, np.take_along_axis(exact, ids, 1), atol=1e-5)
    np.testing.assert_allclose(top, -np.sort(-exact)[:, :most], atol=1e-5)
    assert (ours <= 0).all()


@pytest.mark.parametrize("tell", TELLING.values(), ids=TELLING.keys())
def test_a_logprob_that_json_cannot_write_becomes_the_least_one(tell: Tell) -> None:
    logits = np.array([[0.0, -np.inf, 3.0], [np.nan, 0.0, 0.0]], np.float32)
    chosen, ids, top = tell(logits, np.array([1, 0]), 3)
    assert chosen.tolist() == [LEAST_LOGPROB] * 2
    assert ids[0].tolist() == [2, 0, 1]
    assert top[0, 2] == LEAST_LOGPROB
    assert np.isfinite(top).all()


def test_a_masked_token_is_never_drawn_however_it_is_favoured(sample: Sample) -> None:
    edited = edited_logits(torch.zeros(1, VOCAB), [Row(bias={2: 100.0}, masked=[2], presence=-1.0, output=[2])])
    assert edited[0, 2] == -torch.inf
    ends = np.array([0.0, 1 - 2.0**-52])
    assert 2 not in sample(edited.expand(2, VOCAB), choice([(5.0, 0, 1.0)] * 2, ends)).tolist()
