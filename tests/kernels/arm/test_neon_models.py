"""Models of every kind, with every operation, in an emulated process: the kernels for Arm compute what those for x86
compute, however texts are cut into steps and whatever shares the steps."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tenuto.exec.model_executor import ModelExecutor
from tenuto.kernels.elements import KVCacheDtype
from tenuto.kernels.native.library import OpKind
from tenuto.models.adapter import Adapter, LowRank, projections
from tenuto.models.hf import HfCheckpoint
from tenuto.models.native.low_rank import PackedAdapter
from tenuto.models.native.program import NativeProgram
from tests.exec.driver import Driver, ints, logits_of
from tests.exec.mixed_driver import MixedDriver
from tests.exec.rounding import FLIPPED, relative_error
from tests.exec.test_native_forward import check_overflowing_token, check_scores, with_scores
from tests.kernels.arm.emulator import NEON, needs_emulator
from tests.kernels.arm.twins import emulated, executor, needs_twins, twin, twin_of
from tests.models.test_families import PAGE, random_batches
from tests.models.test_predictor import Stage as HeadStage
from tests.models.test_predictor import agree, found_and_expected, stage_in
from tests.models.test_quantized_files import save_gpt_oss_in_four_bits
from tests.models.test_quantized_hybrids import quantized
from tests.models.tiny import tiny_llama
from tests.models.tiny_dense import tiny_gemma2
from tests.models.tiny_hybrids import (
    VOCABULARY,
    tiny_falcon_h1,
    tiny_granite,
    tiny_mamba2,
    tiny_nemotron_h,
    tiny_qwen3_next,
)

pytestmark = [needs_emulator, needs_twins]
every_neon = pytest.mark.parametrize("variant", NEON)


@dataclass(frozen=True)
class Written:
    """A model of some kind: `write` writes it to a directory. `weights`: float32, as they are stored, or bfloat16, or
    quantized. `length`: the number of tokens of its texts, enough for a window, or for several chunks of attention."""

    write: Callable[[Path], object]
    weights: str = "float32"
    kept_as: KVCacheDtype = KVCacheDtype.AUTO
    length: int = 24


def saved(make: Callable[..., PreTrainedModel], **changes: Any) -> Callable[[Path], object]:
    return lambda directory: make(**changes).save_pretrained(directory)


SMALL: dict[str, Any] = {"hidden_size": 64, "initializer_range": 0.1}
MODELS = {
    "dense": Written(saved(tiny_llama, num_hidden_layers=1), "quantized", length=140),
    "windows, caps, norms behind layers": Written(saved(tiny_gemma2), "bfloat16"),
    "dense, 8-bit keys": Written(
        saved(tiny_llama, num_hidden_layers=1), "quantized", kept_as=KVCacheDtype.INT8, length=140
    ),
    "windows, 8-bit keys": Written(saved(tiny_gemma2), kept_as=KVCacheDtype.INT8),
    "windows, sinks, experts in four bits": Written(lambda directory: save_gpt_oss_in_four_bits(directory, 64)),
    "Mamba-2, experts": Written(saved(tiny_granite, **SMALL), "quantized"),
    "Mamba-2 with limits of steps": Written(saved(tiny_mamba2, time_step_limit=[0.2, 0.9]), "bfloat16"),
    "Mamba-2 beside attention": Written(saved(tiny_falcon_h1, mamba_rms_norm=True)),
    "Mamba-2, experts without gates": Written(saved(tiny_nemotron_h), "bfloat16"),
    "gated delta nets, experts": Written(saved(tiny_qwen3_next, **SMALL), "quantized"),
}


@dataclass(frozen=True)
class Stage:
    """A model in memory, and texts in its language. `found`: logits of twins."""

    program: NativeProgram
    texts: list[list[int]]
    found: dict[str, torch.Tensor] = field(default_factory=dict)

    def expected(self, variant: str) -> torch.Tensor:
        name = twin_of(variant)
        if name not in self.found:
            self.found[name] = logits_of_beginnings(executor(twin(name), self.program))
        return self.found[name]


@cache
def stage_of(name: str) -> Stage:
    model = MODELS[name]
    with TemporaryDirectory() as directory:
        model.write(Path(directory))
        checkpoint = HfCheckpoint(Path(directory))
        weights = [
            (name, quantized(name, stored) if model.weights == "quantized" else stored)
            for name, stored in checkpoint.weights()
        ]
        plain = model.weights == "bfloat16"
        program = NativeProgram(checkpoint.config, weights, PAGE, plain=plain, kv_cache_dtype=model.kept_as)
    return Stage(program, np.random.default_rng(1).integers(3, VOCABULARY, (2, model.length)).tolist())


@pytest.fixture(params=MODELS)
def stage(request: pytest.FixtureRequest) -> Stage:
    return stage_of(request.param)


def logits_of_beginnings(made: ModelExecutor, adapters: Mapping[int, int] | None = None) -> torch.Tensor:
    """Returns the logits after each token of 14 texts of 5 tokens, side by side: float32 [70, vocab]. `adapters`: the
    slots of texts with an adapter."""
    texts = np.random.default_rng(2).integers(3, VOCABULARY, (14, 5)).tolist()
    found = MixedDriver(made, rows=14).logits(dict(enumerate(texts)), adapters).clone()
    made.close()
    return found


def assert_same_rounding(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    differ = [relative_error(mine, other) for mine, other in zip(ours, theirs, strict=True)]
    assert statistics.median(differ) < FLIPPED, differ


@every_neon
def test_models_of_every_kind_give_the_logits_of_x86(stage: Stage, variant: str) -> None:
    assert_same_rounding(logits_of_beginnings(executor(emulated(variant), stage.program)), stage.expected(variant))


@every_neon
def test_logits_do_not_depend_on_cuts_guesses_or_what_shares_a_step_in_a_single_bit(stage: Stage, variant: str) -> None:
    """Units that no sequence has written are full of garbage."""
    made, alone = (executor(emulated(variant), stage.program, threads) for threads in (2, 1))
    whole = MixedDriver(alone, rows=2, units=80)
    expected = [whole.logits({row: text}).clone() for row, text in enumerate(stage.texts)]
    random_batches(MixedDriver(made, rows=6, units=220), stage.texts, expected, torch.equal, steps=12)
    for each in (made, alone):
        each.close()


@every_neon
def test_vectors_are_those_of_x86(variant: str) -> None:
    stage, found = stage_of("dense"), []
    for kernels in (emulated(variant), twin(twin_of(variant))):
        made = executor(kernels, stage.program)
        found.append(MixedDriver(made, rows=2).vectors({0: stage.texts[0][:5], 1: [9]}, [(0, 1), (5, 1), (1, 4)]))
        made.close()
    assert_same_rounding(*found)


@every_neon
def test_adapters_give_the_logits_of_x86_beside_rows_without_one(variant: str) -> None:
    stage, rng, adapters = stage_of("dense"), np.random.default_rng(4), list[PackedAdapter]()
    for rank, bits in ((4, 0xFFFF0000), (19, 0xFFFFFFFF)):  # in bfloat16, and in float32
        changes = {
            name: LowRank(factor(rng, (rank, inputs), bits), factor(rng, (outputs, rank), bits), 2.0)
            for name, (outputs, inputs) in projections(stage.program.config).items()
        }
        adapters.append(PackedAdapter(Adapter(changes, "")))
    slots, found = {row: row % 3 for row in range(14)}, []
    for kernels in (emulated(variant), twin(twin_of(variant))):
        made = executor(kernels, stage.program)
        for slot, adapter in enumerate(adapters, 1):
            made.forward.set_adapter(slot, adapter)
        found.append(logits_of_beginnings(made, slots))
    assert_same_rounding(*found)
    without = logits_of_beginnings(executor(emulated(variant), stage.program))
    same = (found[0] == without).view(14, -1).all(dim=1)
    assert same.tolist() == [slot == 0 for slot in slots.values()]


def factor(rng: np.random.Generator, shape: tuple[int, int], bits: int) -> np.ndarray:
    """Returns random numbers, float32, that have only some of the `bits`."""
    return (rng.normal(0, 0.1, shape).astype(np.float32).view(np.uint32) & np.uint32(bits)).view(np.float32)


@every_neon
@pytest.mark.parametrize("name", ["dense", "dense, 8-bit keys"])
def test_copied_pages_hold_what_was_computed(name: str, variant: str) -> None:
    """Whether a step copies them, or they are copied out of memory and back in."""
    stage = stage_of(name)
    made = executor(emulated(variant), stage.program)
    driver, more = Driver(made, 40, 3), [3, 1, 4]
    driver.step([(0, stage.texts[0][:10], 1)])
    entries = [[(row, i, driver.free.pop()) for i in range(len(driver.pages[0]))] for row in (1, 2)]
    for row, changes in enumerate(entries, 1):
        driver.pages[row], driver.lengths[row] = [page for *_, page in changes], 10
    copies = [(source, target, PAGE) for source, target in zip(driver.pages[0], driver.pages[1], strict=True)]
    made.write_units(0, ints(driver.pages[2]), list(made.read_units(0, ints(driver.pages[0]))))
    work = [(row, more, 3) for row in range(3)]
    found = logits_of(made, driver.plan(work, changes=[*entries[0], *entries[1]], copies=copies)).view(3, 3, -1)
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])
    made.close()


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> tuple[HeadStage, NativeProgram]:
    stage = stage_in(tmp_path_factory.mktemp("head"))
    checkpoint = HfCheckpoint(stage.directory)
    return stage, NativeProgram(checkpoint.config, checkpoint.weights(), 16)


@every_neon
def test_the_head_for_several_tokens_computes_what_its_reference_does(
    head: tuple[HeadStage, NativeProgram], variant: str
) -> None:
    stage, program = head
    made = executor(emulated(variant), program)
    agree(made, *found_and_expected(stage, made, [1, 2, 17]))
    made.close()


@every_neon
@pytest.mark.parametrize("kept_as", KVCacheDtype)
def test_overflowing_states_and_scores_do_what_they_do_on_x86(
    kept_as: KVCacheDtype, variant: str, tmp_path: Path
) -> None:
    with torch.no_grad():
        model = tiny_llama()
        model.model.embed_tokens.weight[7] = torch.inf
    check_overflowing_token(executor(emulated(variant), program_of(model, tmp_path / "infinite", kept_as)))
    for size in 3e3, 1e18:
        model = with_scores(size)
        made = executor(emulated(variant), program_of(model, tmp_path / str(size), kept_as))
        check_scores(made, model)


def program_of(model: PreTrainedModel, directory: Path, kept_as: KVCacheDtype) -> NativeProgram:
    model.save_pretrained(directory)
    checkpoint = HfCheckpoint(directory)
    return NativeProgram(checkpoint.config, checkpoint.weights(), 16, kv_cache_dtype=kept_as)


def test_these_models_have_every_operation() -> None:
    kinds = {op.kind for name in MODELS for op in stage_of(name).program.ops}
    assert kinds | {OpKind.KEEP, OpKind.JOIN} == set(OpKind), "the head has these two"
