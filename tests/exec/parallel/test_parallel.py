"""Processes that compute a model together give the logits and turns of one process, and end together."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tenuto
from tenuto.base.config import WorkerSettings
from tenuto.base.errors import ConfigError, EngineStopped, ExecutorLost
from tenuto.exec.load import ExecutorOptions, load_executor
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.parallel.followers import Followers
from tenuto.exec.parallel.forward import ParallelForward
from tenuto.models.store import resolve
from tenuto.runtime.models import load_model
from tests.exec.driver import Driver
from tests.exec.mixed_driver import MixedDriver
from tests.models.adapters import write_adapter
from tests.models.tiny import save_hf, tiny_llama
from tests.models.tiny_dense import tiny_gemma2, tiny_granite3_moe, tiny_qwen2
from tests.models.tiny_hybrids import tiny_bamba, tiny_gpt_oss

TOKENIZER = Path(__file__).parent.parent.parent / "hybrid" / "model"
MODELS: dict[str, Callable[[], Any]] = {
    "a vocabulary that does not divide": tiny_llama,
    "a tied embedding": lambda: tiny_llama(tie_word_embeddings=True),
    "biases": tiny_qwen2,
    "norms of outputs, windows, capped scores": tiny_gemma2,
    "experts": tiny_granite3_moe,
    "biased experts, sinks": tiny_gpt_oss,
}
PROMPT = [3, 14, 15, 92, 65, 35, 8, 97, 93, 2]


def opened(directory: Path, size: int, **options: Any) -> ModelExecutor:
    files = resolve(str(directory), directory)
    return load_executor(files, ExecutorOptions(4, kernels="torch", dtype="float32", tensor_parallel=size, **options))


@contextmanager
def together(directory: Path, size: int = 2) -> Iterator[ModelExecutor]:
    executor = opened(directory, size)
    try:
        yield executor
    finally:
        executor.close()


def conversation(executor: ModelExecutor) -> list[torch.Tensor]:
    """Returns the logits of two rows: of chunks, decodes, and a decode after pages have moved to others and back."""
    driver = MixedDriver(executor, rows=2)
    found = [driver.logits({0: PROMPT, 1: PROMPT[3:]}), driver.logits({0: [5], 1: PROMPT[:4]})]
    for group in range(len(executor.spec.groups)):
        pages = np.array(list(driver.held[group][0].values()), np.int32)
        units = executor.read_units(group, pages)
        assert units.shape == (len(pages), executor.unit_bytes(group))
        executor.write_units(group, pages[::-1].copy(), list(units))  # the wrong way round, and back
        executor.write_units(group, pages, list(units))
    return [*found, driver.logits({0: [7, 8]})]


@pytest.mark.parametrize("name", MODELS)
def test_two_processes_compute_the_logits_of_one(name: str, tmp_path: Path) -> None:
    save_hf(tmp_path, MODELS[name]())
    with together(tmp_path, 1) as alone, together(tmp_path) as executor:
        assert executor.spec == alone.spec
        for one, other in zip(conversation(executor), conversation(alone), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_adapters_are_divided_like_the_weights_they_change(tmp_path: Path) -> None:
    model = tiny_llama()
    directory = save_hf(tmp_path / "model", model)
    write_adapter(model, tmp_path / "adapter", 1)
    found = []
    for size in (1, 2):
        with together(directory, size) as executor:
            executor.set_adapter(1, executor.read_adapter(str(tmp_path / "adapter")))
            driver = MixedDriver(executor, rows=2)
            found.append(driver.logits({0: PROMPT, 1: PROMPT}, adapters={0: 1}))
            executor.set_adapter(1, None)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found[0][: len(PROMPT)], found[0][len(PROMPT) :], atol=0.1)


def test_weights_are_released_and_read_again_in_all_processes(tmp_path: Path) -> None:
    with together(save_hf(tmp_path, tiny_llama())) as executor:
        before = executor.logits(Driver(executor, 8, 1).plan([(0, PROMPT, 3)]))
        executor.release(["kv_cache", "weights"])
        executor.restore(["kv_cache", "weights"], executor.load(None))
        after = executor.logits(Driver(executor, 8, 1, prepared=True).plan([(0, PROMPT, 3)]))
    np.testing.assert_array_equal(before, after)


def test_no_process_keeps_memory_that_another_lacks(tmp_path: Path) -> None:
    with together(save_hf(tmp_path, tiny_llama())) as executor:
        with pytest.raises(ConfigError, match="cannot hold"):
            executor.prepare((2**45,), 1)
        assert len(executor.logits(Driver(executor, 8, 1).plan([(0, PROMPT, 3)]))) == 3


def ended(executor: ModelExecutor) -> None:
    """Kills the second process."""
    forward = executor.forward
    assert isinstance(forward, ParallelForward)
    followers: Followers = forward._followers
    followers._children[0].kill()


def test_a_process_that_ends_is_named_and_ends_the_others(tmp_path: Path) -> None:
    with together(save_hf(tmp_path, tiny_llama())) as executor:
        driver = Driver(executor, 8, 1)
        executor.logits(driver.plan([(0, PROMPT, 3)]))
        ended(executor)
        for _ in range(2):
            with pytest.raises(ExecutorLost, match="rank 1 has ended with status -9"):
                executor.logits(driver.plan([(0, [5], 1)]))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a model with a tokenizer."""
    directory = save_hf(tmp_path_factory.mktemp("model"), tiny_llama(vocab_size=2048))
    for file in TOKENIZER.glob("tokenizer*"):
        shutil.copy(file, directory)
    return str(directory)


def turns(model: str, size: int) -> list[list[int]]:
    """Returns the tokens of a session, of its fork, and of the session after it was cut and has left the device."""
    options: dict[str, Any] = {"kernels": "torch", "dtype": "float32", "context_length": 256, "page_size": 8}
    with tenuto.Engine(model, tensor_parallel=size, host_tier=2**24, memory=2**21, strict=True, **options) as engine:
        session = engine.session("s")
        drawn: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0.8, "top_p": 0.9, "seed": 5}
        session.turn(list(range(20, 90)), **drawn).result()
        fork = session.fork(session_id="fork")
        found = [each.turn([30, 31, 32], **drawn) for each in (session, fork)]
        for turn in found:
            turn.result()
        tokens = [turn.token_ids for turn in found]
        session.rewind(turn=1)
        others = [engine.session() for _ in range(6)]
        for other in others:
            other.turn(list(range(100, 240)), max_new_tokens=4, ignore_eos=True).result()
        last = session.turn([40, 41], **drawn)
        last.result()
        engine.audit()
        return [*tokens, last.token_ids, session.history]


def test_an_engine_of_two_processes_gives_the_turns_of_one(model: str) -> None:
    assert turns(model, 2) == turns(model, 1)


def test_an_engine_whose_process_is_killed_stops_and_says_why(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Followers] = []
    start = Followers.__init__

    def noted(self: Followers, *args: Any) -> None:
        start(self, *args)
        made.append(self)

    monkeypatch.setattr(Followers, "__init__", noted)
    with tenuto.Engine(model, tensor_parallel=2, kernels="torch", context_length=128) as engine:
        session = engine.session()
        session.turn([20, 21], max_new_tokens=2, ignore_eos=True).result()
        made[0]._children[0].kill()
        with pytest.raises(EngineStopped, match="rank 1 has ended with status -9"):
            session.turn([22], max_new_tokens=2, ignore_eos=True).result()


@pytest.mark.parametrize(
    ("made", "size", "reason"),
    [
        (tiny_llama, 4, "the model has a number of heads of 6; allowed: a divisor"),
        (tiny_llama, 3, "the model has a number of KV heads of 2; allowed: a divisor"),
        (lambda: tiny_llama(intermediate_size=129), 2, "networks with a width of 129; allowed: a divisor"),
        (tiny_bamba, 2, "the model has recurrent layers; allowed for these: 1"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(made: Any, size: int, reason: str, tmp_path: Path) -> None:
    save_hf(tmp_path, made())
    with pytest.raises(ConfigError, match=f"tensor_parallel is {size}, but .*{reason}"):
        opened(tmp_path, size)


def test_native_kernels_and_the_witness_are_one_process(tmp_path: Path) -> None:
    save_hf(tmp_path, tiny_llama())
    with pytest.raises(ConfigError, match=r"kernels 'avx2' .* one process; here: cpu, None, 2"):
        load_executor(resolve(str(tmp_path), tmp_path), ExecutorOptions(4, kernels="avx2", tensor_parallel=2))
    with pytest.raises(ConfigError, match="tensor_parallel is 2; allowed for the witness: 1"):
        load_model(WorkerSettings(model="witness", tensor_parallel=2))
