"""A head for multi-token prediction computes what its published description says, wherever its tokens are cut into
steps, and guesses with what it has stored."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from tenuto.base.config import cache_dir
from tenuto.exec.load import ExecutorOptions, load_executor
from tenuto.exec.model_executor import ModelExecutor
from tenuto.models.hf import HfCheckpoint
from tenuto.models.store import resolve
from tests.exec.driver import ints
from tests.exec.kernels import KERNELS
from tests.exec.mixed_driver import MixedDriver
from tests.exec.rounding import relative_error
from tests.models.tiny_hybrids import VOCABULARY, tiny_qwen3_next
from tests.models.tiny_predictor import Reference

LENGTH, PAGE = 90, 16


@dataclass(frozen=True)
class Stage:
    """A model on disk, a text of `LENGTH` + 2 tokens, and the reference's outputs for it, float32 [tokens, hidden]."""

    reference: Reference
    directory: Path
    text: list[int]
    outputs: torch.Tensor


def stage_in(directory: Path) -> Stage:
    """Writes the model into `directory`."""
    reference = Reference()
    reference.save(directory)
    text = np.random.default_rng(1).integers(3, VOCABULARY, LENGTH + 2).tolist()
    return Stage(reference, directory, text, reference.outputs(text))


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return stage_in(tmp_path_factory.mktemp("predictor"))


@pytest.fixture(params=KERNELS)
def executor(request: pytest.FixtureRequest, stage: Stage) -> Iterator[ModelExecutor]:
    options = ExecutorOptions(PAGE, context=128, kernels=request.param, predictor=True, cache=cache_dir())
    made = load_executor(resolve(str(stage.directory), stage.directory), options)
    yield made
    made.close()


def agree(executor: ModelExecutor, found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    if "PyTorch" in executor.forward.description:
        torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-4, atol=2e-4)
    else:  # as other logits, these are rounded, and a token may be routed to another expert
        assert statistics.median(map(relative_error, found, expected)) < 0.03


@pytest.mark.parametrize("cuts", [[], [1, 2, 3], [15, 16, 17, 64], [*range(1, 40)]], ids=str)
def test_the_head_continues_from_what_it_has_stored_in_each_step(
    stage: Stage, executor: ModelExecutor, cuts: list[int]
) -> None:
    agree(executor, *found_and_expected(stage, executor, cuts))


def found_and_expected(
    stage: Stage, executor: ModelExecutor, cuts: list[int]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns logits of the head, of an executor and of the reference, each [vocab]. After each step, it guesses twice.
    The second guess continues from the first, whose token is given, and stores keys in a slot that the next step writes
    again."""
    driver, text = MixedDriver(executor, rows=2), stage.text
    forward, found, expected = executor.forward, list[torch.Tensor](), list[torch.Tensor]()
    for start, end in zip([0, *cuts], [*cuts, LENGTH], strict=True):
        work = {1: text[start:end]}
        plan = driver.plan(work)
        executor.logits(plan)
        forward.remember(plan, ints(text[start + 1 : end + 1]))
        once = forward.predict(ints([1]), ints([end - 1]), ints([text[end]]), ints([end - start - 1]))
        found.append(torch.from_numpy(once.logits.host()[0]))
        outputs, logits = stage.reference.predicted(stage.outputs[:end], text[1 : end + 1])
        expected.append(logits[-1])
        if end % PAGE:  # otherwise there is no slot
            again = forward.predict(ints([1]), ints([end]), ints([text[end + 1]]), ints([0]))
            found.append(torch.from_numpy(again.logits.host()[0]))
            both = torch.cat([stage.outputs[:end], outputs[-1:]])
            expected.append(stage.reference.predicted(both, text[1 : end + 2])[1][-1])
        driver.end(work)
    return found, expected


def test_models_saved_by_transformers_have_no_head(tmp_path: Path) -> None:
    tiny_qwen3_next().save_pretrained(tmp_path)
    assert HfCheckpoint(tmp_path).config.predictor == ()
