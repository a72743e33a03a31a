"""Sampling in an emulated process draws the tokens that it draws on x86."""

import numpy as np
import pytest
import torch

from tenuto.kernels.sampling import Choice, Masks
from tests.kernels.arm.emulator import NEON, needs_emulator
from tests.kernels.arm.twins import emulated, needs_twins, twin
from tests.kernels.test_sampling import sampler

ROWS, VOCAB = 240, 509


@needs_emulator
@needs_twins
@pytest.mark.parametrize("variant", NEON)
def test_draws_with_any_options_and_masks_are_those_of_x86(variant: str) -> None:
    """Some logits are not finite."""
    rng = np.random.default_rng(6)
    logits = rng.normal(0, 3, (ROWS, VOCAB)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.01] = -np.inf
    logits[::40, 100], logits[1::40, 200] = np.nan, np.inf
    options = Choice(
        temperature=rng.choice([0.0, 0.3, 1.0, 5.0], ROWS),
        top_k=rng.choice([0, 1, 7, 300], ROWS),
        top_p=rng.choice([0.3, 0.9, 1.0], ROWS),
        min_p=rng.choice([0.0, 0.0, 0.02], ROWS),
        uniform=rng.random(ROWS),
    )
    masked = np.arange(0, ROWS, 2)
    masks = Masks(masked, rng.integers(0, 2**32, (len(masked), -(-VOCAB // 32)), dtype=np.uint32))
    ours, theirs = torch.from_numpy(logits.copy()), torch.from_numpy(logits.copy())
    drawn = sampler(emulated(variant))(ours, options, masks)  # type: ignore[arg-type]
    assert drawn.tolist() == sampler(twin("avx2"))(theirs, options, masks).tolist()
    np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    assert len(set(drawn.tolist())) > 60
