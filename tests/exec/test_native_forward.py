"""The native kernels compute what transformers computes, for every shape of a model and every format of its weights;
and the result for a sequence does not depend, in a single bit, on how steps are cut and batched."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedModel

from tenuto.base.config import cache_dir
from tenuto.base.errors import ConfigError, ModelError
from tenuto.base.plan import InputVectors
from tenuto.exec.device import machine_bytes, usable_cores
from tenuto.exec.load import ExecutorOptions, load_executor
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.native_forward import NativeForward
from tenuto.exec.samples import samples_of
from tenuto.exec.torch_forward import TorchForward
from tenuto.kernels.native.build import VARIANTS, Machine
from tenuto.kernels.native.formats import FORMATS, PanelFormat
from tenuto.kernels.native.library import OpKind
from tenuto.models.decoder import Decoder
from tenuto.models.gguf import GgufCheckpoint
from tenuto.models.store import resolve
from tests.exec.driver import Driver, logits_of
from tests.exec.kernels import HERE, KERNELS, cores_of_threads, every_variant, needs_variant
from tests.exec.mixed_driver import MixedDriver
from tests.exec.rounding import RoundedForward, assert_rounded_as_said, relative_error, round_products
from tests.models.quantized_files import OF_DIRECTORIES, quantize_directory
from tests.models.tiny import save_gguf, save_hf, tiny_llama
from tests.models.tiny_dense import tiny_gemma2, tiny_qwen3, tiny_qwen3_moe
from tests.models.tiny_hybrids import tiny_bamba, tiny_mistral

MODEL = tiny_llama(head_dim=32, max_position_embeddings=1024)
SIZES: dict[str, Any] = {  # for blocks of 256 weights, and weights that are less wild
    "max_position_embeddings": 1024,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "initializer_range": 0.05,
    "head_dim": 32,
}
WIDE = tiny_llama(**SIZES)
LENGTH = 70

SHAPES: dict[str, dict[str, Any]] = {
    "heads of 16": {},
    "heads of 32": {"head_dim": 32},
    "heads of 64, each with its own keys": {"head_dim": 64, "num_key_value_heads": 6},
    "heads of 80": {"head_dim": 80},
    "heads of 128, one key head for 8": {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 1},
    "sizes that are odd multiples of 16": {"hidden_size": 48, "intermediate_size": 80, "vocab_size": 33},
    "biases, own head": {"attention_bias": True, "tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True},
}


def text(length: int, seed: int = 0, vocab: int = 101) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


def native(path: Path, variant: str = "auto", page_size: int = 16, **options: Any) -> ModelExecutor:
    return load_executor(
        resolve(str(path), path), ExecutorOptions(page_size, kernels=variant, cache=cache_dir(), **options)
    )


@every_variant
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_bfloat16_models_of_any_shape_match_transformers(variant: str, shape: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_llama(**shape).bfloat16()
    path = save_hf(tmp_path, model)
    tokens = text(LENGTH, vocab=model.config.vocab_size)
    with torch.inference_mode():
        exact = model.float()(torch.tensor([tokens])).logits[0]
    errors = []
    for executor in (native(path, variant), native(path, "torch", dtype="bfloat16")):
        ours = logits_of(executor, Driver(executor, 40, 2).plan([(0, tokens, LENGTH)]))
        errors.append(relative_error(ours, exact))
        executor.close()
    assert errors[0] < errors[1], "further from float32 than PyTorch in bfloat16"


QUANTIZED = list(FORMATS)


EVERY_FORMAT: list[Kind | PanelFormat] = [
    *{conversion.format: kind for kind, conversion in reversed(FORMATS.items())}.values(),
    *OF_DIRECTORIES,
    *(Kind.F16, Kind.BF16, Kind.F32),
]
"""A type of GGUF files for each panel format, or the format itself if only safetensors files have it."""


def save_in(directory: Path, stored: Kind | PanelFormat) -> Path:
    """Saves a model with weights of a type of `EVERY_FORMAT`."""
    if isinstance(stored, Kind):
        return save_gguf(directory / "m.gguf", WIDE, stored)
    save_hf(directory, tiny_llama(**SIZES, vocab_size=128))
    quantize_directory(directory, OF_DIRECTORIES[stored])
    return directory


def logits_of_short_texts(executor: ModelExecutor) -> torch.Tensor:
    """Returns logits after each token of 14 texts of 5 tokens, side by side: float32 [70, vocab]."""
    found = logits_of(executor, Driver(executor, 40, 14).plan([(row, text(5, row), 5) for row in range(14)])).clone()
    executor.close()
    return found


def rounded_and_exact(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns PyTorch's logits in float32 from a file, with keys and values in bfloat16 and in float32."""
    checkpoint = GgufCheckpoint(path)
    decoder = Decoder(checkpoint.config, checkpoint.weights(), torch.device("cpu"), torch.float32)
    return logits_of_short_texts(ModelExecutor(RoundedForward(decoder, 16))), logits_of_short_texts(
        native(path, "torch")
    )


@every_variant
@pytest.mark.parametrize("kind", [*QUANTIZED, Kind.F16, Kind.BF16, Kind.F32], ids=lambda k: k.name)
def test_weights_of_each_kind_match_the_reference_from_the_same_file(
    variant: str, kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_gguf(tmp_path / "m.gguf", WIDE, kind)
    _, exact = rounded_and_exact(path)
    round_products(monkeypatch, variant, kind)
    rounded, _ = rounded_and_exact(path)
    assert_rounded_as_said(logits_of_short_texts(native(path, variant)), rounded, exact, variant, kind)


@every_variant
@pytest.mark.parametrize("shape", ["sizes that are odd multiples of 16", "biases, own head"])
def test_float32_models_stay_float32_unless_configured_otherwise(variant: str, shape: str, tmp_path: Path) -> None:
    model = tiny_llama(**SHAPES[shape], initializer_range=0.05)
    path, tokens = save_hf(tmp_path, model), text(LENGTH, vocab=model.config.vocab_size)
    with torch.inference_mode():
        exact = model(torch.tensor([tokens])).logits[0]
    errors, sizes = [], []
    for dtype in (None, "bfloat16"):
        executor = native(path, variant, dtype=dtype)
        errors.append(relative_error(logits_of(executor, Driver(executor, 40, 2).plan([(0, tokens, LENGTH)])), exact))
        assert isinstance(executor.forward, NativeForward)
        sizes.append(executor.forward.weight_bytes)
        executor.close()
    assert errors[0] < 0.004
    assert errors[0] < errors[1]
    assert sizes[0] > 1.8 * sizes[1]


@every_variant
def test_a_file_may_mix_kinds_even_within_a_layer(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {
        "attn_v": Kind.Q6_K,
        "ffn_down": Kind.Q6_K,
        "attn_k": Kind.Q8_0,
        "ffn_up": Kind.Q5_0,
        "attn_output": Kind.F16,
    }
    path = save_gguf(tmp_path / "m.gguf", WIDE, Kind.Q4_K, others)
    _, exact = rounded_and_exact(path)
    round_products(monkeypatch, variant, Kind.Q4_K)
    rounded, _ = rounded_and_exact(path)
    assert_rounded_as_said(logits_of_short_texts(native(path, variant)), rounded, exact, variant, Kind.Q4_K)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save_gguf(tmp_path / "m.gguf", MODEL, Kind.Q4_1)


@every_variant
@pytest.mark.parametrize(
    ("page_size", "kind", "kept_as"),
    [
        (5, Kind.Q4_1, "auto"),
        (5, Kind.BF16, "auto"),
        (32, Kind.Q6_K, "auto"),
        (32, Kind.Q2_K, "auto"),
        (32, Kind.IQ4_XS, "auto"),
        (16, Kind.F32, "auto"),
        (5, Kind.F32, "int8"),
        (32, Kind.BF16, "int8"),
    ],
    ids=str,
)
def test_logits_do_not_depend_on_chunks_batches_or_pages_in_a_single_bit(
    variant: str, page_size: int, kind: Kind, kept_as: str, tmp_path: Path
) -> None:
    """So a session that was preempted, forked or cut differently generates the same output, and so does a replay. The
    only exceptions use another kernel: with tiles, quantized weights and no more than four rows at once; and attention
    of a few tokens to keys and values in 8 bits."""
    model = WIDE if kind in (Kind.Q2_K, Kind.Q6_K, Kind.IQ4_XS) else MODEL
    path = save_gguf(tmp_path / "m.gguf", model, kind)
    executor = native(path, variant, page_size, kv_cache_dtype=kept_as)
    assert_cuts_change_no_bit(executor, (700, 90, 330, 20), few_differ(variant, kind), kept_as)


@every_variant
@pytest.mark.parametrize("stored", EVERY_FORMAT, ids=lambda stored: stored.name)
def test_logits_of_every_weight_format_depend_neither_on_cuts_nor_on_the_rest_of_a_step(
    variant: str, stored: Kind | PanelFormat, tmp_path: Path
) -> None:
    path = save_in(tmp_path, stored)
    for page_size, kept_as in ((32, "auto"), (16, "int8")):
        executor = native(path, variant, page_size, kv_cache_dtype=kept_as)
        assert_cuts_change_no_bit(executor, (150, 40, 75, 20), few_differ(variant, stored), kept_as)


def few_differ(variant: str, stored: Kind | PanelFormat) -> bool:
    """Returns whether few tokens are multiplied by another kernel than many."""
    return variant == "amx" and stored not in (Kind.BF16, Kind.F32, PanelFormat.FP8)


def assert_cuts_change_no_bit(
    executor: ModelExecutor, lengths: tuple[int, ...], few_differ: bool, kept_as: str
) -> None:
    """Computes texts of these lengths as wholes, and in pieces that share steps with those of others. With
    `few_differ`, steps have at least five tokens."""
    driver, several = Driver(executor, 600, 2 * len(lengths)), len(lengths)
    texts = [text(length, seed) for seed, length in enumerate(lengths)]
    whole = [logits_of(executor, driver.plan([(row, tokens, len(tokens))])).clone() for row, tokens in enumerate(texts)]
    assert isinstance(executor.forward, NativeForward)
    by_tiles = kept_as == "int8" and "amx" in executor.forward.description
    rng = np.random.default_rng(3)
    while left := [row for row in range(several) if driver.lengths[several + row] < len(texts[row])]:
        rows = rng.permutation(left)[: rng.integers(1, 5)].tolist()
        places = [driver.lengths[several + row] for row in rows]
        counts = rng.choice([1, 2, 5, 16, 40, 200], len(rows)).tolist()
        if few_differ:
            counts[0] = max(5, counts[0])
            if len(texts[rows[0]]) - places[0] < 5:
                break
        ends = [min(a + count, len(texts[row])) for row, a, count in zip(rows, places, counts, strict=True)]
        if by_tiles:
            ends = [
                len(texts[row]) if len(texts[row]) - a < 80 else a + 40 for row, a in zip(rows, places, strict=True)
            ]
        work = [(several + row, texts[row][a:b], b - a) for row, a, b in zip(rows, places, ends, strict=True)]
        theirs = torch.cat([whole[row][a:b] for row, a, b in zip(rows, places, ends, strict=True)])
        assert torch.equal(logits_of(executor, driver.plan(work)), theirs)
    assert driver.steps > 2 * several
    executor.close()


@every_variant
@pytest.mark.parametrize(("page_size", "kept_as"), [(32, "auto"), (48, "auto"), (32, "int8")])
def test_with_a_window_neither_cuts_nor_garbage_change_a_bit(
    variant: str, page_size: int, kept_as: str, tmp_path: Path
) -> None:
    """Tiles take values of two blocks at once where pages have them; the first of the two may have left the window, and
    the second may not have been written yet."""
    model = tiny_mistral(head_dim=32, sliding_window=40, vocab_size=101, num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    executor = native(tmp_path, variant, page_size, kv_cache_dtype=kept_as)
    tokens = text(270)
    whole = MixedDriver(executor, rows=1).logits({0: tokens}).clone()
    driver, ends = MixedDriver(executor, rows=1, seed=1), [17, 50, 83, 99, 160, 230, 251, len(tokens)]
    for a, b in zip([0, *ends], ends, strict=False):
        assert torch.equal(driver.logits({0: tokens[a:b]}), whole[a:b])
    with torch.inference_mode():
        exact = model(torch.tensor([tokens])).logits[0]
    assert relative_error(whole, exact) < 0.03
    executor.close()


@every_variant
def test_few_tokens_are_computed_as_exactly_as_many(variant: str, tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "m.gguf", MODEL, Kind.Q4_1)
    executor, reference = native(path, variant), native(path, "torch")
    driver, tokens = Driver(executor, 60, 4), text(LENGTH)
    exact = logits_of(reference, Driver(reference, 60, 1).plan([(0, tokens, LENGTH)]))
    many = logits_of(executor, driver.plan([(0, tokens, LENGTH)])).clone()
    single = torch.cat([logits_of(executor, driver.plan([(1, [token], 1)])).clone() for token in tokens])
    assert relative_error(single, exact) < 1.1 * relative_error(many, exact)
    for each in (executor, reference):
        each.close()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("page_size", "kept_as"), [(5, "auto"), (16, "auto"), (5, "int8")])
def test_pages_copied_out_and_back_in_elsewhere_are_unchanged(
    path: Path, kernels: str, page_size: int, kept_as: str
) -> None:
    if (kernels, kept_as) == ("torch", "int8"):
        pytest.skip("PyTorch keeps no bytes")
    one, other = (native(path, kernels, page_size, kv_cache_dtype=kept_as) for _ in range(2))
    drivers = Driver(one, 40, 2), Driver(other, 40, 2)
    history, more = text(70), text(3, 5)
    drivers[0].step([(0, history, 1)])
    drivers[1].step([(0, text(70, 9), 1)])  # in the same pages
    units = np.arange(40, dtype=np.int32)
    data = one.read_units(0, units)
    assert data.shape == (40, one.unit_bytes(0))
    other.write_units(0, units[::-1].copy(), list(data[::-1]))
    logits = [
        logits_of(executor, driver.plan([(0, more, 1)])) for executor, driver in zip((one, other), drivers, strict=True)
    ]
    assert torch.equal(*logits)
    one.close()
    other.close()


@every_variant
def test_one_thread_computes_the_same_as_two(variant: str, path: Path) -> None:
    executor = native(path, variant)
    forward = executor.forward
    assert isinstance(forward, NativeForward)
    alone = ModelExecutor(NativeForward(forward._library, forward._model, threads=1))
    results = [logits_of(e, Driver(e, 60, 2).plan([(0, text(500), 500)])) for e in (executor, alone)]
    assert torch.equal(*results)
    for each in (executor, alone):
        each.close()


@needs_variant
@pytest.mark.skipif(sys.platform != "linux", reason="threads have CPUs only on Linux")
def test_threads_that_leave_a_shared_cpu_may_use_every_cpu_afterwards(path: Path) -> None:
    """Beside processes that keep all CPUs busy, so that threads of a step meet on one."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    executor = native(path)
    try:
        driver = Driver(executor, 60, 2)
        logits_of(executor, driver.plan([(0, text(20), 20)]))
        for token in text(200):
            logits_of(executor, driver.plan([(0, [token], 1)]))
            assert all(cores == sorted(os.sched_getaffinity(0)) for cores in cores_of_threads())
    finally:
        for each in busy:
            each.kill()
            each.wait()
        executor.close()


def test_the_number_of_threads_stays_within_the_cpu_quota(tmp_path: Path) -> None:
    cores, quota = usable_cores(tmp_path / "missing"), tmp_path / "cpu.max"
    for written, expected in (
        ("max 100000", cores),
        ("150000 100000", 1),
        ("50000 100000", 1),
        ("9900000 100000", cores),
    ):
        quota.write_text(written)
        assert usable_cores(quota) == expected


def test_the_memory_that_is_shared_stays_within_the_limit_of_the_control_group(tmp_path: Path) -> None:
    physical, limit = machine_bytes(tmp_path / "missing"), tmp_path / "memory.max"
    for written, expected in (("max\n", physical), ("1073741824\n", 2**30), (f"{2 * physical}\n", physical)):
        limit.write_text(written)
        assert machine_bytes(limit) == expected


@every_variant
def test_the_likeliest_tokens_alone_are_those_of_the_logits(variant: str, path: Path) -> None:
    with closing(native(path, variant)) as executor:
        plan = Driver(executor, 20, 2).plan([(0, text(20), 7), (1, text(9, seed=1), 1)])
        outputs, forward = samples_of(plan).outputs.astype(np.int32), executor.forward
        forward.apply(plan)
        likeliest = forward.run(plan, plan.tokens, outputs).logits.host().argmax(axis=1)
        alone = forward.run(plan, plan.tokens, outputs, best_only=True)
    assert alone.best is not None
    assert (alone.best.tolist(), len(alone.logits)) == (likeliest.tolist(), 0)


@every_variant
@pytest.mark.parametrize("make", [tiny_qwen3, tiny_qwen3_moe, tiny_gemma2, tiny_bamba])
def test_what_the_last_layer_leaves_out_changes_no_logits(
    variant: str, make: Callable[[], PreTrainedModel], tmp_path: Path
) -> None:
    """It computes only the tokens whose logits are wanted; where vectors are wanted too, it computes all."""
    make().save_pretrained(tmp_path)
    with closing(native(tmp_path, variant)) as executor:
        forward = executor.forward
        assert isinstance(forward, NativeForward)
        assert OpKind.NARROW in {op.kind for op in forward._model.ops}
        found = []
        for parts in None, InputVectors(np.zeros(1, np.int32), np.ones(1, np.int32)):
            plan = MixedDriver(executor, rows=3).plan({0: text(20), 1: text(1, seed=1), 2: text(9, seed=2)})
            forward.apply(plan)
            outputs = np.array([4, 19, 20, 29], np.int32)
            found.append(forward.run(replace(plan, vectors=parts), plan.tokens, outputs).logits.host())
    np.testing.assert_array_equal(found[0], found[1])


@needs_variant
def test_a_step_that_ran_out_of_memory_is_followed_by_one_that_works(path: Path) -> None:
    """Known fault: room that could not be allocated counted as present, and the next step crashed."""
    script = f"""
import resource, sys
import torch
from tenuto.base.errors import StepFailed
from tests.exec.test_native_forward import native, text
from tests.exec.driver import Driver, logits_of
from pathlib import Path
executor = native(Path({str(path)!r}), "auto")
driver = Driver(executor, 3000, 3)
expected = driver.step([(0, text(20), 1)])
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
_, hard = resource.getrlimit(resource.RLIMIT_AS)
plan = driver.plan([(1, text(40_000), 1)])
resource.setrlimit(resource.RLIMIT_AS, (now + 2**22, hard))
executor.submit(plan)
try:
    executor.collect()
    sys.exit("it had memory")
except StepFailed as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
sys.exit(driver.step([(2, text(20), 1)]) != expected)
"""
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # PyTorch's threads need memory, too
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False, env=alone
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "no memory for a step of 40000 tokens" in done.stdout


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kept_as", ["auto", "int8"])
def test_non_finite_numbers_stay_with_the_turn_that_made_them(kernels: str, kept_as: str, tmp_path: Path) -> None:
    """A token whose state overflows gives some token, and later owners of its pages are unaffected."""
    if (kernels, kept_as) == ("torch", "int8"):
        pytest.skip("PyTorch keeps no bytes")
    model = tiny_llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.inf
    check_overflowing_token(native(save_hf(tmp_path, model.bfloat16()), kernels, kv_cache_dtype=kept_as))


def check_overflowing_token(executor: ModelExecutor) -> None:
    """Computes texts of a model in which the state of token 7 overflows, and closes the executor."""
    driver = Driver(executor, 3, 3)
    expected = logits_of(executor, driver.plan([(0, text(20, vocab=7), 20)])).clone()
    driver.free, driver.pages = [2, 1, 0], [[], [], []]
    assert len(driver.step([(1, [7] * 48, 1)])) == 1
    driver.free = [2, 1, 0]
    assert torch.equal(logits_of(executor, driver.plan([(2, text(20, vocab=7), 20)])), expected)
    executor.close()


def test_without_a_compiler_or_on_other_devices_plain_pytorch_runs_with_a_message(path: Path, tmp_path: Path) -> None:
    said: list[str] = []
    bare = Machine(HERE.features, None)
    executor = load_executor(
        resolve(str(path), path), ExecutorOptions(16, cache=tmp_path, machine=bare, say=said.append)
    )
    assert isinstance(executor.forward, TorchForward)
    assert "no C++ compiler" in said[-1]
    executor.close()
    bare = Machine(frozenset(_flags("avx2")), None)
    with pytest.raises(ConfigError, match="kernels 'avx2' cannot be used: there is no C"):
        load_executor(resolve(str(path), path), ExecutorOptions(16, kernels="avx2", cache=tmp_path, machine=bare))
    with pytest.raises(ConfigError, match="are for the CPU"):
        load_executor(resolve(str(path), path), ExecutorOptions(16, dtype="float32", kernels="avx2", cache=cache_dir()))
    with pytest.raises(ConfigError, match="kernels are 'cuda'; allowed: auto, amx"):
        load_executor(resolve(str(path), path), ExecutorOptions(16, kernels="cuda"))


def _flags(variant: str) -> list[str]:
    return [flag.replace("-", "_") for flag in VARIANTS[variant]]


def test_without_a_readable_cache_plain_pytorch_runs_with_a_message(path: Path, tmp_path: Path) -> None:
    said: list[str] = []
    files, machine = resolve(str(path), path), Machine(frozenset(_flags("avx2")), None)
    options = ExecutorOptions(16, cache=tmp_path / ("x" * 300), machine=machine, say=said.append)
    executor = load_executor(files, options)
    assert isinstance(executor.forward, TorchForward)
    assert "cannot be read" in said[-1]
    executor.close()
    with pytest.raises(ConfigError, match=r"kernels 'avx2' cannot be used: .* cannot be read"):
        load_executor(files, replace(options, kernels="avx2"))


def test_a_model_the_kernels_cannot_run_is_run_by_pytorch(tmp_path: Path) -> None:
    said: list[str] = []
    path = save_hf(tmp_path, tiny_llama(hidden_size=40, num_attention_heads=4, head_dim=10))
    executor = load_executor(resolve(str(path), path), ExecutorOptions(16, cache=cache_dir(), say=said.append))
    assert isinstance(executor.forward, TorchForward)
    assert "head_dim 10, hidden 40 is not a multiple of 16" in said[-1]
    executor.close()


@needs_variant
def test_a_file_with_a_missing_or_superfluous_tensor_is_refused(tmp_path: Path) -> None:
    model = tiny_llama(tie_word_embeddings=False)
    path = save_hf(tmp_path, model)
    config = (path / "config.json").read_text()
    (path / "config.json").write_text(config.replace('"num_hidden_layers": 3', '"num_hidden_layers": 4'))
    with pytest.raises(ModelError, match=r"lack the tensor 'model.layers.3"):
        native(path)
    (path / "config.json").write_text(config.replace('"num_hidden_layers": 3', '"num_hidden_layers": 2'))
    with pytest.raises(ModelError, match=r"'model.layers.2.*no place for"):
        native(path)
    (path / "config.json").write_text(config.replace('"intermediate_size": 128', '"intermediate_size": 64'))
    with pytest.raises(ModelError, match=r"is of shape \[96, 128\]; expected: \[96, 64\]"):
        native(path)


@every_variant
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("size", [3e3, 1e9, 1e18])
def test_attention_scores_of_any_size_give_what_pytorch_gives(
    tmp_path: Path, variant: str, kv_cache_dtype: str, size: float
) -> None:
    """Finally beyond float32."""
    model = with_scores(size)
    model.save_pretrained(tmp_path)
    check_scores(native(tmp_path, variant, kv_cache_dtype=kv_cache_dtype), model)


def with_scores(size: float) -> PreTrainedModel:
    """Returns a float32 model whose attention scores are size ** 2 times as large as usual."""
    model = tiny_llama(num_hidden_layers=1)
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            parameter.data *= size
    return model.float()


def check_scores(executor: ModelExecutor, model: PreTrainedModel) -> None:
    """Compares logits with those of the model, and closes the executor."""
    tokens = np.random.default_rng(1).integers(3, 100, 60).tolist()
    whole = MixedDriver(executor, 1).logits({0: tokens}).clone()
    driver = MixedDriver(executor, 1)
    cut = torch.cat([driver.logits({0: tokens[a:b]}).clone() for a, b in ((0, 1), (1, 18), (18, 60))])
    assert whole.isfinite().all()
    assert torch.equal(cut, whole) or "amx" in executor.forward.description
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    if expected.isfinite().all():
        assert (whole.argmax(-1) == expected.argmax(-1)).float().mean() > 0.8
    executor.close()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not describe a process's memory")
@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no large pages")
def test_the_pool_asks_for_large_pages_of_memory(tmp_path: Path) -> None:
    def asked() -> int:
        """Returns the kilobytes of memory for which large pages were asked."""
        kilobytes = found = 0
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if line.startswith("Size:"):
                kilobytes = int(line.split()[1])
            elif line.startswith("VmFlags:") and "hg" in line.split():
                found += kilobytes
        return found

    executor = native(save_hf(tmp_path, MODEL))
    before = asked()  # NumPy asks for its large arrays, too
    executor.prepare(((4 << 20) // executor.spec.groups[0].bytes_per_unit + 1,), 1)
    assert asked() - before >= 4 << 10, "a pool of 4 MiB"
    executor.close()
