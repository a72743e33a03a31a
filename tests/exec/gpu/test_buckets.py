"""The sizes of captured steps are few, and little larger than the steps."""

import pytest

from tenuto.exec.device import ON_CUDA
from tenuto.exec.gpu.buckets import MOST_SAMPLES, MOST_TOKENS, bucket_of, mixed_bucket_of, samples_bucket_of


def test_a_step_fits_into_the_captured_one() -> None:
    for tokens in range(1, MOST_TOKENS + 1):
        found = mixed_bucket_of(tokens, 1, 256)
        assert found is not None
        assert tokens <= found[0] <= max(16, 1.5 * tokens)
        assert found[0] <= 1.25 * tokens or tokens <= 512
    assert mixed_bucket_of(MOST_TOKENS + 1, 1, 256) is None


@pytest.mark.parametrize("most", [5, 16, 100, 256])
def test_rows_fit_and_are_no_more_than_there_can_be(most: int) -> None:
    for rows in range(1, most + 1):
        found = mixed_bucket_of(300, rows, bucket_of(most))
        assert found is not None
        assert rows <= found[1] <= min(max(4, 4 * rows), bucket_of(most))


@pytest.mark.parametrize("rows", [1, 4, 16, 48, 256])
def test_samples_fit_and_are_few_times_more_than_taken(rows: int) -> None:
    for samples in range(MOST_SAMPLES + 1):
        found = samples_bucket_of(samples, MOST_TOKENS, rows)
        assert found is not None
        assert samples <= found <= max(rows, 4 * samples)
    assert samples_bucket_of(30, 32, rows) in {32, rows}, "no more than tokens, unless rows are"
    assert samples_bucket_of(MOST_SAMPLES + 1, MOST_TOKENS, rows) is None


def test_there_are_few_sizes() -> None:
    sizes = {mixed_bucket_of(tokens, rows, 256) for tokens in range(1, MOST_TOKENS + 1) for rows in range(1, 257)}
    assert len({size[0] for size in sizes if size}) <= 22
    assert len({size[1] for size in sizes if size}) == 4


def test_mixed_steps_of_a_gpu_s_defaults_are_captured() -> None:
    assert mixed_bucket_of(ON_CUDA["mixed_budget"] + ON_CUDA["max_running"], ON_CUDA["max_running"], 256) is not None
