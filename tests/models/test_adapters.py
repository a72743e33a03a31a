"""Adapters compute what PEFT computes with them, in rows beside others, and change nothing in rows without one.

Tolerance of PyTorch: as in `test_families`. The native kernels round keys and values to bfloat16, and some more; their
mean error with an adapter is at most twice that without one, plus 1 percent of the logits. A row's bits do not depend
on what shares its step.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tenuto.base.config import cache_dir
from tenuto.base.errors import ModelError
from tenuto.base.plan import InputVectors
from tenuto.exec.load import ExecutorOptions, load_executor
from tenuto.exec.model_executor import ModelExecutor
from tenuto.models.native.obstacle import obstacle
from tenuto.models.store import resolve
from tests.exec.kernels import KERNELS, every_variant
from tests.exec.mixed_driver import MixedDriver
from tests.exec.rounding import relative_error
from tests.models.adapters import ALL, FUSED, write_adapter
from tests.models.quantized_files import gptq, quantize_directory
from tests.models.tiny import save_gguf, tiny_llama
from tests.models.tiny_dense import tiny_gemma2, tiny_granite3, tiny_phi3, tiny_qwen2, tiny_qwen3, tiny_smollm3
from tests.models.tiny_hybrids import tiny_bamba, tiny_falcon_h1, tiny_gemma3, tiny_mistral, tiny_nemotron_h

LENGTH, PAGE = 70, 4
RTOL, ATOL = 1e-4, 5e-4
MAKERS: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": tiny_llama,
    "qwen2": tiny_qwen2,
    "qwen3": tiny_qwen3,
    "smollm3": tiny_smollm3,
    "phi3": tiny_phi3,
    "granite3": tiny_granite3,
    "gemma2": tiny_gemma2,
    "gemma3": tiny_gemma3,
    "mistral": tiny_mistral,
    "bamba": tiny_bamba,
    "falcon-h1": tiny_falcon_h1,
    "nemotron-h": tiny_nemotron_h,
}
TARGETS = {"phi3": FUSED, "nemotron-h": ["q_proj", "k_proj", "v_proj", "o_proj"], "falcon-h1": ALL[:4]}
OPTIONS: tuple[dict[str, Any], ...] = ({"r": 4}, {"r": 19, "use_rslora": True, "lora_alpha": 3})
"""Of each model's two adapters."""


@dataclass(frozen=True)
class Stage:
    """A model, its adapters in `directory`, and the logits of transformers and PEFT for one text each: without an
    adapter, with the first, and with the second, float32 [3, LENGTH, vocab]."""

    name: str
    directory: Path
    texts: list[list[int]]
    expected: torch.Tensor


@pytest.fixture(scope="module", params=MAKERS)
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    model, directory = MAKERS[request.param](), tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory)
    texts = np.random.default_rng(1).integers(3, 101, (3, LENGTH)).tolist()
    expected = [logits_of(model, texts[0])]
    for number, options in enumerate(OPTIONS, 1):
        targets = TARGETS.get(request.param, ALL)
        adapted = write_adapter(model, directory / f"a{number}", number, target_modules=targets, **options)
        expected.append(logits_of(adapted, texts[number]))
        model = adapted.unload()
    return Stage(request.param, directory, texts, torch.stack(expected))


def logits_of(model: PreTrainedModel, text: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([text]), use_cache=False).logits[0].float()


def executor_of(path: Path, kernels: str, adapters: Path, **options: Any) -> ModelExecutor:
    """Returns an executor that has the two adapters in slots 1 and 2."""
    given = ExecutorOptions(PAGE, context=LENGTH, kernels=kernels, cache=cache_dir(), **options)
    executor = load_executor(resolve(str(path), path.parent), given)
    for slot in (1, 2):
        executor.set_adapter(slot, executor.read_adapter(str(adapters / f"a{slot}")))
    return executor


def native(stage: Stage, variant: str, **options: Any) -> ModelExecutor:
    executor = executor_of(stage.directory, "torch", stage.directory)
    reason = obstacle(executor.forward.config)
    executor.close()
    if reason is not None:
        pytest.skip(f"PyTorch computes: {reason}")
    return executor_of(stage.directory, variant, stage.directory, **options)


def side_by_side(executor: ModelExecutor, texts: list[list[int]], cuts: list[int]) -> torch.Tensor:
    """Returns the logits of rows without an adapter, with the first, and with the second, computed in the same steps:
    float32 [3, LENGTH, vocab]."""
    driver, found = MixedDriver(executor, rows=3), []
    for begin, end in zip([0, *cuts], [*cuts, LENGTH], strict=True):
        step = driver.logits({row: text[begin:end] for row, text in enumerate(texts)}, {1: 1, 2: 2})
        found.append(step.view(3, end - begin, -1).clone())
    return torch.cat(found, dim=1)


def test_pytorch_computes_what_peft_computes(stage: Stage) -> None:
    executor = executor_of(stage.directory, "torch", stage.directory)
    found = side_by_side(executor, stage.texts, [1, 2, 40])
    torch.testing.assert_close(found, stage.expected, rtol=RTOL, atol=ATOL)
    executor.close()
    without = MixedDriver(executor_of(stage.directory, "torch", stage.directory), rows=1).logits({0: stage.texts[1]})
    assert (without - stage.expected[1]).abs().max() > 100 * ATOL, "the adapter changes too little for the comparison"


@every_variant
def test_native_kernels_compute_what_peft_computes(stage: Stage, variant: str) -> None:
    executor = native(stage, variant)
    found = side_by_side(executor, stage.texts, [1, 2, 40])
    plain, *adapted = (relative_error(ours, theirs) for ours, theirs in zip(found, stage.expected, strict=True))
    assert max(adapted) < 2 * plain + 0.01
    executor.close()


@every_variant
def test_a_rows_bits_do_not_depend_on_the_adapters_beside_it(stage: Stage, variant: str) -> None:
    """Pieces of texts, with and without adapters, are computed in random company; as texts end, others begin."""
    executor = native(stage, variant, dtype="bfloat16")
    alone = MixedDriver(executor, rows=3)
    expected = [alone.logits({row: stage.texts[row]}, {row: row}).clone() for row in range(3)]
    bare = MixedDriver(executor, rows=1).logits({0: stage.texts[0]})
    assert torch.equal(bare, expected[0])
    rng, driver, kinds = np.random.default_rng(3), MixedDriver(executor, rows=9, units=220), [*range(3)] * 3
    for _ in range(40):
        rows = rng.permutation(9)[: rng.integers(1, 10)].tolist()
        starts = {row: driver.lengths[row] for row in rows}
        ends = {row: min(start + int(rng.choice([1, 1, 1, 2, 3, 11, 40])), LENGTH) for row, start in starts.items()}
        given = {row: stage.texts[kinds[row]][starts[row] : ends[row]] for row in rows}
        ours = driver.logits(given, {row: kinds[row] for row in rows})
        assert torch.equal(ours, torch.cat([expected[kinds[row]][starts[row] : ends[row]] for row in rows]))
        for row in rows:
            if driver.lengths[row] == LENGTH:
                driver.release(row)
                kinds[row] = int(rng.integers(3))
    executor.close()


@every_variant
def test_tokens_that_the_last_layer_leaves_out_leave_the_others_their_adapters(stage: Stage, variant: str) -> None:
    """Where vectors are wanted, it leaves out none."""
    executor, found = native(stage, variant), []
    for asked in None, InputVectors(np.zeros(1, np.int32), np.ones(1, np.int32)):
        given = {row: text[: 5 + row] for row, text in enumerate(stage.texts)}
        plan = replace(MixedDriver(executor, rows=3).plan(given, {1: 1, 2: 2}), vectors=asked)
        executor.forward.apply(plan)
        found.append(executor.forward.run(plan, plan.tokens, np.array([4, 10, 17], np.int32)).logits.host())
    np.testing.assert_array_equal(found[0], found[1])
    executor.close()


@pytest.mark.parametrize("kernels", KERNELS)
def test_adapters_fit_models_in_gguf_files(kernels: str, tmp_path: Path) -> None:
    """Rows of queries and keys are in another order there."""
    model = tiny_llama()
    save_gguf(tmp_path / "model.gguf", model)
    check_adapters(tmp_path / "model.gguf", kernels, tmp_path, model, 0.02)


@pytest.mark.parametrize("kernels", KERNELS)
def test_adapters_fit_matrices_that_are_packed_in_another_order(kernels: str, tmp_path: Path) -> None:
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    shape = {"hidden_size": 96, "intermediate_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}
    model = tiny_llama(vocab_size=128, head_dim=16, **shape)
    model.save_pretrained(tmp_path)
    weights = quantize_directory(tmp_path, gptq(8, 32, symmetric=True, order=order))
    model.load_state_dict(weights, strict=False)
    check_adapters(tmp_path, kernels, tmp_path, model, 0.1)


def check_adapters(path: Path, kernels: str, directory: Path, model: PreTrainedModel, most: float) -> None:
    """Compares two adapters that are made in `directory` with PEFT's for this model, whose files are at `path`. `most`:
    the highest relative error with native kernels."""
    texts = np.random.default_rng(1).integers(3, 101, (3, LENGTH)).tolist()
    expected = [logits_of(model, texts[0])]
    for number in (1, 2):
        adapted = write_adapter(model, directory / f"a{number}", number)
        expected.append(logits_of(adapted, texts[number]))
        model = adapted.unload()
    executor = executor_of(path, kernels, directory)
    found = side_by_side(executor, texts, [30])
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) < (1e-4 if kernels == "torch" else most)
    executor.close()


def test_adapters_stay_when_weights_are_replaced_and_their_slots_take_others(tmp_path: Path) -> None:
    model, other = tiny_llama(), tiny_llama()
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    text = np.random.default_rng(1).integers(3, 101, LENGTH).tolist()
    for each, name in ((model, "model"), (other, "other")):
        each.save_pretrained(tmp_path / name)
    write_adapter(model, tmp_path / "a1", 1).unload()
    write_adapter(model, tmp_path / "a2", 2).unload()
    executor = executor_of(tmp_path / "model", "torch", tmp_path)
    MixedDriver(executor, rows=1)
    executor.restore((), executor.load(str(tmp_path / "other")))
    expected = logits_of(write_adapter(other, tmp_path / "b1", 1), text)
    torch.testing.assert_close(MixedDriver(executor, rows=1).logits({0: text}, {0: 1}), expected, rtol=RTOL, atol=ATOL)
    second = executor.read_adapter(str(tmp_path / "a2"))
    executor.set_adapter(1, None)
    executor.set_adapter(1, second)
    twice = [MixedDriver(executor, rows=1).logits({0: text}, {0: slot}).clone() for slot in (1, 2)]
    assert torch.equal(*twice)
    executor.close()


def test_equal_adapters_have_equal_digests_and_others_do_not(tmp_path: Path) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path / "model")
    for name, seed, options in (("a1", 1, {}), ("a2", 2, {}), ("again", 1, {}), ("scaled", 1, {"lora_alpha": 9})):
        model = write_adapter(model, tmp_path / name, seed, **options).unload()
    executor = executor_of(tmp_path / "model", "torch", tmp_path)
    first, second, again, scaled = (
        executor.read_adapter(str(tmp_path / name)).digest for name in ("a1", "a2", "again", "scaled")
    )
    assert first == again
    assert len({first, second, scaled}) == 3
    executor.close()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, and an adapter for it in `a1`, also as `a2`."""
    directory, model = tmp_path_factory.mktemp("sound"), tiny_llama()
    model.save_pretrained(directory)
    write_adapter(model, directory / "a1", 1)
    shutil.copytree(directory / "a1", directory / "a2")
    return directory


Q = "base_model.model.model.layers.0.self_attn.q_proj"
WRONG_CONFIGS = [
    ({"use_dora": True}, "use_dora"),
    ({"bias": "all"}, "bias"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"peft_type": "IA3"}, "peft_type"),
    ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    ({"target_modules": ["q_proj", "lm_head"]}, "'lm_head' in target_modules; allowed: q_proj"),
    ({"r": 0}, "r = 0; allowed: 1 to 512"),
    ({"r": 10**9}, "allowed: 1 to 512"),
    ({"r": 5}, r"expected: \[5, inputs\]"),
    ({"lora_alpha": "much"}, "lora_alpha"),
    ({"lora_alpha": 10**400}, "lora_alpha = 1000"),
    ({"lora_alpha": 1e300}, r"lora_alpha = 1e\+300; allowed: finite numbers"),
    ({"lora_alpha": float("inf")}, "lora_alpha = inf"),
    ({"lora_alpha": float("nan")}, "lora_alpha = nan"),
]
WRONG_TENSORS: list[tuple[Callable[[dict[str, torch.Tensor]], object], str]] = [
    (lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(4, 95)}), r"shape \[4, 95\]; expected: \[4, 96\]"),
    (lambda t: t.update({f"{Q}.lora_B.weight": torch.zeros(112, 4)}), r"shape \[112, 4\]; expected: \[96, 4\]"),
    (lambda t: t.pop(f"{Q}.lora_A.weight"), "only one of lora_A and lora_B"),
    (lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(4, 96, dtype=torch.int8)}), "type I8"),
    (lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(4)}), "shapes"),
    (lambda t: t.update({"base_model.model.lm_head.weight": torch.zeros(2)}), "has a tensor"),
    (
        lambda t: t.update({f"{Q.replace('.0.', '.7.')}.lora_{x}.weight": t[f"{Q}.lora_{x}.weight"] + 1 for x in "AB"}),
        "layers.7.self_attn.q_proj'; allowed: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj",
    ),
    (lambda t: t[f"{Q}.lora_B.weight"].fill_(float("nan")), "lora_B.weight' with infinite values or NaN"),
    (lambda t: t[f"{Q}.lora_A.weight"][0].fill_(float("inf")), "lora_A.weight' with infinite values or NaN"),
    (lambda t: t.clear(), "changes nothing"),
]


def refused(directory: Path, match: str) -> None:
    executor = executor_of(directory, "torch", directory)
    with pytest.raises(ModelError, match=match):
        executor.read_adapter(str(directory / "changed"))
    executor.close()


@pytest.fixture
def changed(sound: Path) -> Iterator[Path]:
    """Yields a copy of the adapter, to be changed."""
    shutil.copytree(sound / "a1", sound / "changed")
    yield sound / "changed"
    shutil.rmtree(sound / "changed")


@pytest.mark.parametrize(("change", "match"), WRONG_CONFIGS, ids=[match for _, match in WRONG_CONFIGS])
def test_configurations_that_are_not_supported_are_refused(
    sound: Path, changed: Path, change: dict[str, Any], match: str
) -> None:
    file = changed / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    refused(sound, match)


@pytest.mark.parametrize(("change", "match"), WRONG_TENSORS, ids=[match for _, match in WRONG_TENSORS])
def test_weights_that_do_not_fit_are_refused(
    sound: Path, changed: Path, change: Callable[[dict[str, torch.Tensor]], object], match: str
) -> None:
    tensors = load_file(changed / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, changed / "adapter_model.safetensors")
    refused(sound, match)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_missing_and_truncated_files_are_refused(sound: Path, changed: Path, name: str) -> None:
    (changed / name).write_bytes((changed / name).read_bytes()[:-9])
    refused(sound, "damaged")
    (changed / name).unlink()
    refused(sound, "missing")


def test_a_configuration_that_is_nested_too_deep_is_refused(sound: Path, changed: Path) -> None:
    (changed / "adapter_config.json").write_text('{"r": ' + "[" * 200_000 + "]" * 200_000 + "}")
    refused(sound, "damaged")
