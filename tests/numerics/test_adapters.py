"""An adapter on the default model computes what PEFT computes with it on transformers' copy of the same weights.

The model's file is GGUF, which stores queries and keys in another order than the adapter is trained with. Tolerance of
PyTorch in float32: as in `test_logits`, relative to the largest logit without an adapter. The native kernels round
inputs and weights: their mean error with an adapter is at most twice that without one, plus 1 percent of the logits, as
in `tests/models/test_adapters.py`.
"""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tenuto.base.config import DEFAULT_MODEL, cache_dir
from tenuto.exec.load import ExecutorOptions, load_executor
from tenuto.models.store import resolve
from tests.exec.kernels import every_variant
from tests.exec.mixed_driver import MixedDriver
from tests.exec.rounding import relative_error
from tests.models.adapters import write_adapter
from tests.numerics.test_logits import ATOL, MEAN_ATOL

TOKENS, CUTS = 240, [1, 2, 130]


@pytest.fixture(scope="module")
def expected(
    reference: LlamaForCausalLM, licence_tokens: list[int], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, torch.Tensor]:
    """The directory of an adapter, and the logits without it and with it, float32 [2, tokens, vocab]."""
    directory = tmp_path_factory.mktemp("adapter")
    tokens = torch.tensor([licence_tokens[:TOKENS]])
    with torch.inference_mode():
        plain = reference(tokens).logits[0]
    adapted = write_adapter(reference, directory, seed=1, r=8, lora_alpha=2)
    with torch.inference_mode():
        logits = adapted(tokens).logits[0]
    adapted.unload()
    with torch.inference_mode():
        assert torch.equal(reference(tokens).logits[0], plain), "the reference keeps the adapter"
    return directory, torch.stack([plain, logits])


def computed(kernels: str, directory: Path, tokens: list[int]) -> torch.Tensor:
    """Returns the logits without the adapter and with it, computed side by side in the same steps."""
    dtype = "float32" if kernels == "torch" else None
    options = ExecutorOptions(16, context=512, kernels=kernels, dtype=dtype, cache=cache_dir())
    executor = load_executor(resolve(DEFAULT_MODEL, cache_dir()), options)
    try:
        executor.set_adapter(1, executor.read_adapter(str(directory)))
        driver, found = MixedDriver(executor, rows=2), []
        for begin, end in zip([0, *CUTS], [*CUTS, TOKENS], strict=True):
            step = driver.logits(dict.fromkeys(range(2), tokens[begin:end]), {1: 1})
            found.append(step.view(2, end - begin, -1).clone())
        return torch.cat(found, dim=1)
    finally:
        executor.close()


def test_pytorch_computes_with_an_adapter_what_peft_computes(
    expected: tuple[Path, torch.Tensor], licence_tokens: list[int]
) -> None:
    directory, theirs = expected
    found = computed("torch", directory, licence_tokens[:TOKENS])
    scale = max(1.0, (theirs[1].abs().max() / theirs[0].abs().max()).item())
    for name, ours, logits in zip(("without", "with"), found, theirs, strict=True):
        differences = (ours - logits).abs()
        print(f"{name}: at most {differences.max():.1e}, {differences.mean():.1e} on average")
        assert differences.max() <= ATOL * scale
        assert differences.mean() <= MEAN_ATOL * scale
    assert (theirs[1] - theirs[0]).abs().mean() > 1000 * MEAN_ATOL, "the adapter changes too little for the comparison"


@every_variant
def test_native_kernels_compute_with_an_adapter_what_peft_computes(
    variant: str, expected: tuple[Path, torch.Tensor], licence_tokens: list[int]
) -> None:
    directory, theirs = expected
    found = computed(variant, directory, licence_tokens[:TOKENS])
    plain, adapted = (relative_error(ours, logits) for ours, logits in zip(found, theirs, strict=True))
    print(f"{variant}: {plain:.4f} without the adapter, {adapted:.4f} with it")
    assert adapted < 2 * plain + 0.01
