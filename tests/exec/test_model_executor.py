"""Executors carry out plans with PyTorch and with native kernels: the tokens are the same however steps are cut,
batched and overlapped."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tenuto.base.config import cache_dir
from tenuto.base.errors import ConfigError, InvariantError, StepFailed
from tenuto.base.plan import PREVIOUS_SAMPLE, Ints, Plan, TokenMasks, Words
from tenuto.base.sampling import GREEDY, Sampling
from tenuto.exec.load import ExecutorOptions, load_executor
from tenuto.exec.logits import Longs, Outputs
from tenuto.exec.model_executor import ModelExecutor
from tenuto.models.store import ModelFiles, resolve
from tests.exec.driver import Driver, logits_of
from tests.exec.kernels import KERNELS
from tests.models.tiny import save_gguf, save_hf, tiny_llama

WARM = Sampling(temperature=1.0, top_k=40, top_p=0.95, seed=11)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="module")
def files(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    directory = save_hf(tmp_path_factory.mktemp("tiny"), model)
    return resolve(str(directory), directory)


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> str:
    """The kernels: plain PyTorch in float32, or native kernels with bfloat16 keys and values."""
    return request.param


@pytest.fixture
def executor(files: ModelFiles, kernels: str) -> Iterator[ModelExecutor]:
    executor = load_executor(files, ExecutorOptions(page_size=4, kernels=kernels, cache=cache_dir()))
    yield executor
    executor.close()


@pytest.fixture
def driver(executor: ModelExecutor) -> Driver:
    return Driver(executor, pages=200, rows=6)


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 101, length).tolist()


def continuation(driver: Driver, row: int, prompt: list[int], n: int, sampling: Sampling = GREEDY) -> list[int]:
    """Returns the next `n` tokens of a prompt, one row alone, one token a step."""
    out = driver.step([(row, prompt, 1)], sampling=[(row, sampling)])
    while len(out) < n:
        out += driver.step([(row, out[-1:], 1)])
    return out


def test_the_memory_spec_counts_all_layers_keys_and_values(executor: ModelExecutor, kernels: str) -> None:
    (group,) = executor.spec.groups
    assert executor.spec.page_size == 4
    slots, element = (4, 4) if kernels == "torch" else (16, 2)
    assert group.bytes_per_unit == slots * 3 * 2 * 2 * 16 * element


def test_random_mixed_batches_give_the_logits_of_each_sequence_alone(
    model: LlamaForCausalLM, driver: Driver, kernels: str
) -> None:
    tolerance = 2e-4 if kernels == "torch" else 1.0  # logits reach 40; bfloat16 has 8 bits
    rng = np.random.default_rng(5)
    texts = [text(70, seed) for seed in range(5)]
    with torch.inference_mode():
        expected = model(torch.tensor(texts)).logits
    for _ in range(25):
        rows = [int(row) for row in rng.permutation(5)[: rng.integers(1, 6)] if driver.lengths[row] < 70]
        if not rows:
            continue
        places = [driver.lengths[row] for row in rows]
        ends = [min(place + int(rng.choice([1, 1, 2, 17])), 70) for place in places]
        work = [(row, texts[row][a:b], b - a) for row, a, b in zip(rows, places, ends, strict=True)]
        ours = logits_of(driver.executor, driver.plan(work))
        theirs = torch.cat([expected[row, a:b] for row, a, b in zip(rows, places, ends, strict=True)])
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=tolerance)
        assert (ours - theirs).abs().mean() < tolerance / 10


def test_a_token_may_be_the_previous_steps_sample(executor: ModelExecutor, driver: Driver) -> None:
    prompts = {0: text(9), 1: text(30, seed=1)}
    expected = {row: continuation(driver, row + 2, prompt, 5, WARM) for row, prompt in prompts.items()}
    got = [driver.step([(0, prompts[0], 1), (1, prompts[1][:20], 0)], sampling=[(0, WARM), (1, WARM)])]
    got.append(driver.step([(1, prompts[1][20:], 1), (0, [PREVIOUS_SAMPLE], 1)]))
    got += [driver.step([(0, [PREVIOUS_SAMPLE], 1), (1, [PREVIOUS_SAMPLE], 1)]) for _ in range(3)]
    assert [got[0][0], got[1][1], got[2][0], got[3][0], got[4][0]] == expected[0]
    assert [got[1][0], got[2][1], got[3][1], got[4][1]] == expected[1][:4]


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_lookahead_samples_after_each_guess_what_single_steps_would(driver: Driver, sampling: Sampling) -> None:
    prompt = text(13)
    expected = continuation(driver, 0, prompt, 6, sampling)
    first = driver.step([(1, prompt, 1)], sampling=[(1, sampling)])
    rest = driver.step([(2, text(5), 1), (1, first + expected[1:5], 5)])[1:]
    assert first + rest == expected


def test_a_draw_depends_on_seed_and_position_and_not_on_how_steps_were_cut(driver: Driver) -> None:
    prompt = text(21)
    expected = continuation(driver, 0, prompt, 8, WARM)
    # Preempted after three tokens and recomputed in other chunks, beside other rows.
    seen = prompt + expected[:3]
    driver.step([(1, seen[:10], 0), (2, text(4), 1)], sampling=[(1, WARM)])
    again = driver.step([(3, text(7), 1), (1, seen[10:], 1)])[1:]
    again += driver.step([(1, again, 1)])
    assert again == expected[3:5]
    assert continuation(driver, 4, prompt, 8, Sampling(1.0, 40, 0.95, seed=12)) != expected


def test_a_row_keeps_its_options_until_a_plan_lists_it_again(driver: Driver) -> None:
    prompt = text(12)
    greedy, warm = continuation(driver, 0, prompt, 3), continuation(driver, 1, prompt, 3, Sampling(5.0, seed=3))
    assert greedy != warm
    driver.lengths[1], driver.pages[1] = 0, []
    assert continuation(driver, 1, prompt, 3) == greedy


def test_a_fork_continues_in_a_copy_of_the_tail_page(driver: Driver) -> None:
    prompt, other = text(10), [3, 1, 4]
    expected = driver.step([(5, prompt + other, 1)])
    first = driver.step([(0, prompt, 1)])
    # Row 1 shares the two full pages and copies the two used slots of the third, while row 0 continues in place.
    shared, tail = driver.pages[0], driver.free.pop()
    driver.pages[1], driver.lengths[1] = [*shared[:2], tail], 10
    changes = [(1, index, page) for index, page in enumerate(driver.pages[1])]
    got = driver.step([(0, first, 1), (1, other, 1)], changes=changes, copies=[(shared[2], tail, 2)])
    assert got[1:] == expected
    assert got[:1] == continuation(driver, 2, prompt, 2)[1:]


def fail_once(executor: ModelExecutor, driver: Driver, patch: pytest.MonkeyPatch, error: Exception) -> None:
    """Submits a step whose forward pass raises `error`."""

    def forward(*_: object, **__: object) -> torch.Tensor:
        raise error

    with patch.context() as patched:
        patched.setattr(executor, "_compute", forward)
        executor.submit(driver.plan([(1, text(3), 1)]))
        with pytest.raises(type(error)):
            executor._in_flight[-1]()  # waits for it


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError, MemoryError])
def test_an_error_of_the_device_fails_the_step_and_the_next_one_works(
    executor: ModelExecutor, driver: Driver, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    expected = continuation(driver, 0, text(6), 2)
    fail_once(executor, driver, monkeypatch, kind("told to fail"))
    with pytest.raises(StepFailed, match="told to fail") as failure:
        executor.collect()
    assert isinstance(failure.value.__cause__, kind)
    assert continuation(driver, 2, text(6), 2) == expected


@pytest.mark.parametrize(
    "kind", [TypeError, ValueError, OverflowError, IndexError, InvariantError, NotImplementedError]
)
def test_a_bug_of_ours_in_a_step_is_raised_as_it_is(
    executor: ModelExecutor, driver: Driver, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    fail_once(executor, driver, monkeypatch, kind("a bug"))
    with pytest.raises(kind, match="a bug"):
        executor.collect()


def test_at_most_two_steps_are_in_flight_and_they_are_collected_in_order(
    executor: ModelExecutor, driver: Driver
) -> None:
    with pytest.raises(InvariantError, match="no step in flight"):
        executor.collect()
    executor.submit(driver.plan([(0, text(4), 1)]))
    executor.submit(driver.plan([(1, text(4), 1), (2, text(5), 1)]))
    with pytest.raises(InvariantError, match="two others are in flight"):
        executor.submit(driver.plan([(3, text(4), 1)]))
    assert [len(executor.collect().tokens) for _ in range(2)] == [1, 2]
    with pytest.raises(InvariantError, match="no step in flight"):
        executor.collect()


def test_without_overlap_steps_are_carried_out_by_the_thread_that_collects(
    executor: ModelExecutor, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = continuation(driver, 0, text(6), 3)
    executor.prepare((200,), 6, overlap=0)
    alone = Driver(executor, pages=200, rows=6, prepared=True)
    threads = list[int]()
    compute = executor._compute

    def noted(plan: Plan, tokens: Ints, outputs: Longs, *, best_only: bool = False) -> Outputs:
        threads.append(threading.get_ident())
        return compute(plan, tokens, outputs, best_only=best_only)

    monkeypatch.setattr(executor, "_compute", noted)
    assert continuation(alone, 0, text(6), 3) == expected
    assert set(threads) == {threading.get_ident()}
    executor.submit(alone.plan([(1, text(3), 1)]))
    monkeypatch.setattr(executor, "_compute", lambda *_, **__: np.empty(0).reshape(7))
    with pytest.raises(ValueError, match="reshape"):  # a bug of ours is raised as it is
        executor.collect()
    with pytest.raises(InvariantError, match="no step"):
        executor.collect()
    assert executor.read_units(0, np.array([1], np.int32)).shape[0] == 1


def test_a_step_submitted_behind_another_reads_the_token_that_one_samples(
    executor: ModelExecutor, driver: Driver
) -> None:
    expected = continuation(driver, 0, text(6), 3)
    executor.submit(driver.plan([(1, text(6), 1)]))
    executor.submit(driver.plan([(1, [PREVIOUS_SAMPLE], 1)]))
    said = executor.collect().tokens.tolist()
    executor.submit(driver.plan([(1, [PREVIOUS_SAMPLE], 1)]))
    said += executor.collect().tokens.tolist() + executor.collect().tokens.tolist()
    assert said == expected


def test_a_step_submitted_behind_a_failing_one_can_still_be_collected(
    executor: ModelExecutor, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(executor, driver, monkeypatch, RuntimeError("told to fail"))
    executor.submit(driver.plan([(0, text(4), 1)]))
    with pytest.raises(StepFailed, match="told to fail"):
        executor.collect()
    assert len(executor.collect().tokens) == 1


def test_results_are_int32_and_have_the_requested_number(executor: ModelExecutor, driver: Driver) -> None:
    executor.submit(driver.plan([(0, text(4), 0), (1, text(4), 2), (2, text(3), 0)]))
    tokens = executor.collect().tokens
    assert tokens.dtype == np.int32
    assert tokens.shape == (2,)
    assert driver.step([(0, text(4), 0)]) == []


def test_a_gguf_file_gives_the_tokens_of_its_source_directory(
    model: LlamaForCausalLM, driver: Driver, tmp_path: Path, kernels: str
) -> None:
    path = save_gguf(tmp_path / "tiny.gguf", model)
    other = load_executor(
        resolve(str(path), tmp_path), ExecutorOptions(page_size=16, kernels=kernels, cache=cache_dir())
    )
    assert continuation(Driver(other, 20, 1), 0, text(20), 10) == continuation(driver, 0, text(20), 10)
    other.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close_to_float32(files: ModelFiles, dtype: str) -> None:
    half, whole = (
        load_executor(files, ExecutorOptions(page_size=4, dtype=name, kernels="torch")) for name in (dtype, None)
    )
    assert half.spec.groups[0].bytes_per_unit * 2 == whole.spec.groups[0].bytes_per_unit
    ours, exact = (logits_of(e, Driver(e, 50, 1).plan([(0, text(40), 40)])) for e in (half, whole))
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().mean() < 0.05 * exact.abs().mean()
    for executor in (half, whole):
        executor.close()


def test_an_unknown_device_or_dtype_is_a_typed_error(files: ModelFiles) -> None:
    with pytest.raises(ConfigError, match="dtype is 'int4'; allowed: float32, bfloat16, float16"):
        load_executor(files, ExecutorOptions(page_size=4, dtype="int4"))
    with pytest.raises(ConfigError, match="device 'warp' cannot be used"):
        load_executor(files, ExecutorOptions(page_size=4, device="warp"))


def test_more_pages_than_the_device_can_hold_are_a_typed_error(executor: ModelExecutor) -> None:
    with pytest.raises(ConfigError, match="cannot hold"):
        executor.prepare((10**12,), 1)


def only(*tokens: int) -> Words:
    words = np.zeros(4, np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_a_row_with_masks_samples_only_allowed_tokens_and_no_other_row_changes(
    driver: Driver, sampling: Sampling
) -> None:
    free = driver.step([(0, text(9), 1), (1, text(7), 1)], sampling=[(0, sampling), (1, sampling)])
    after: Future[Words | None] = Future()
    work = [(2, text(9), 1), (3, [*text(7), 5, 6], 3), (4, text(7), 1)]
    plan = driver.plan(work, sampling=[(row, sampling) for row in (2, 3, 4)], masks=[TokenMasks(1, after)])
    driver.executor.submit(plan)
    after.set_result(np.stack([only(40), only(77), only(3, 100)]))  # while the step computes
    tokens = driver.executor.collect().tokens.tolist()
    assert (tokens[0], tokens[4]) == tuple(free)
    assert tokens[1:3] == [40, 77]
    assert tokens[3] in (3, 100)


def test_masks_that_never_arrive_do_not_keep_the_executor_from_closing(driver: Driver) -> None:
    driver.executor.submit(driver.plan([(0, text(9), 1)], sampling=[(0, GREEDY)], masks=[TokenMasks(0, Future())]))
    driver.executor.close()
    with pytest.raises(StepFailed, match="closed"):
        driver.executor.collect()
