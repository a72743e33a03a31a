"""Executors release memory to the system, and take other weights."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tenuto.base.config import cache_dir
from tenuto.base.errors import ConfigError, InvalidRequest, InvariantError, ModelError
from tenuto.base.heap import give_back
from tenuto.base.plan import PARTS
from tenuto.exec.load import ExecutorOptions, load_executor
from tenuto.exec.model_executor import ModelExecutor
from tenuto.models.store import resolve
from tests.exec.driver import Driver
from tests.exec.kernels import KERNELS
from tests.models.tiny import save_hf, tiny_llama

PROMPT = [3, 14, 15, 92, 65, 35]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of models: two of one shape, one of another, and one whose file is cut short."""
    found: dict[str, Path] = {}
    for name in ("first", "second", "wider", "damaged"):
        model = tiny_llama(intermediate_size=160 if name == "wider" else 128)
        if name == "second":
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(0.5).add_(0.01 * torch.randn_like(weight))
        found[name] = save_hf(tmp_path_factory.mktemp(name), model)
    file = found["damaged"] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return found


@pytest.fixture(params=KERNELS)
def executor(request: pytest.FixtureRequest, models: dict[str, Path]) -> Iterator[ModelExecutor]:
    executor = opened(models["first"], request.param)
    yield executor
    executor.close()


def opened(directory: Path, kernels: str) -> ModelExecutor:
    return load_executor(
        resolve(str(directory), directory), ExecutorOptions(page_size=4, kernels=kernels, cache=cache_dir())
    )


def logits(executor: ModelExecutor, *, prepared: bool = False) -> np.ndarray:
    """Returns logits after each token of the prompt, computed from its first token."""
    driver = Driver(executor, pages=8, rows=1, prepared=prepared)
    return executor.logits(driver.plan([(0, PROMPT, len(PROMPT))]))


@pytest.mark.parametrize("order", [["kv_cache", "weights"], ["weights", "kv_cache"]], ids=" then ".join)
def test_after_a_release_of_either_part_the_results_are_the_same(executor: ModelExecutor, order: list) -> None:
    before = logits(executor)
    for part in order:
        executor.release([part])
    with pytest.raises(InvariantError, match="released"):
        _ = executor.forward
    for part in order:
        executor.restore([part], executor.load(None) if part == "weights" else None)
    assert np.array_equal(logits(executor, prepared=True), before)
    executor.release(["weights"])
    executor.restore(["weights"], executor.load(None))  # with the memory of units, which was not released
    assert np.array_equal(logits(executor, prepared=True), before)


def test_other_weights_compute_the_same_as_in_their_own_executor_even_after_a_release(
    executor: ModelExecutor, models: dict[str, Path], request: pytest.FixtureRequest
) -> None:
    own = opened(models["second"], request.node.callspec.params["executor"])
    expected = logits(own)
    own.close()
    before = logits(executor)
    assert not np.allclose(before, expected, atol=0.1)
    executor.restore((), executor.load(str(models["second"])))
    assert np.array_equal(logits(executor, prepared=True), expected)
    executor.release(PARTS)
    executor.restore(PARTS, executor.load(None))
    assert np.array_equal(logits(executor, prepared=True), expected)
    executor.release(["kv_cache"])  # as training loops do
    executor.restore((), executor.load(str(models["first"])))
    executor.restore(["kv_cache"], None)
    assert np.array_equal(logits(executor, prepared=True), before)


def test_another_shape_or_a_damaged_file_is_refused_and_nothing_changes(
    executor: ModelExecutor, models: dict[str, Path]
) -> None:
    before = logits(executor)
    with pytest.raises(InvalidRequest, match="another shape"):
        executor.load(str(models["wider"]))
    for path in (models["damaged"], models["first"] / "none"):
        with pytest.raises(ModelError):
            executor.load(str(path))
    assert np.array_equal(logits(executor, prepared=True), before)


def test_if_units_cannot_be_allocated_nothing_changes(executor: ModelExecutor, models: dict[str, Path]) -> None:
    before = logits(executor)
    weights = executor.load(str(models["second"]))

    def full(units: tuple[int, ...], rows: int, most_kept: int = 0) -> None:
        raise ConfigError("there is no memory")

    weights.forward.prepare = full  # type: ignore[method-assign]
    with pytest.raises(ConfigError):
        executor.restore((), weights)
    assert np.array_equal(logits(executor, prepared=True), before)


def resident() -> int:
    """Returns the resident bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_the_memory_of_units_and_of_weights_returns_to_the_system(smollm2_path: Path) -> None:
    files = resolve(str(smollm2_path), smollm2_path.parent)
    executor = load_executor(files, ExecutorOptions(page_size=16, cache=cache_dir()))
    pages = 2**26 // executor.spec.groups[0].bytes_per_unit
    executor.prepare((pages,), 1)
    every = np.arange(pages, dtype=np.int32)
    executor.write_units(0, every, list(executor.read_units(0, every)))  # so that all of it is resident
    before = settled()
    executor.release(["kv_cache"])
    without_units = settled()
    assert before - without_units > 0.9 * 2**26
    executor.release(["weights"])
    without_weights = settled()
    assert without_units - without_weights > 80 * 2**20
    executor.restore(PARTS, executor.load(None))
    assert settled() - without_weights > 80 * 2**20
    executor.close()


def settled() -> int:
    gc.collect()
    give_back()
    return resident()
