"""Models with sliding-window and recurrent layers compute what transformers computes, no matter how their tokens are
cut into steps and what shares the steps.

All logits after every token of sequences of 150 tokens are compared: in one step, in fixed cuts, and in random mixed
batches whose memory is full of garbage except where the sequence itself has written. Tolerance of PyTorch: 2e-4, and
1e-4 of the logit, on logits with a spread of 0.5 or more. The native kernels round keys and values to bfloat16, and
give the same logits, bit for bit, however tokens are cut and batched. On average they differ from those of PyTorch
with the same rounding by at most 3e-4 of the logits, or by a tenth of the rounding's own effect. A key or value halfway
between two bfloat16 numbers may be rounded either way, and all later tokens see it.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tenuto.base.config import cache_dir
from tenuto.base.groups import GroupSpec, Kind
from tenuto.exec.load import ExecutorOptions, load_executor
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.native_forward import NativeForward
from tenuto.exec.torch_forward import TorchForward
from tenuto.models.config import Experts, ModelConfig
from tenuto.models.decoder import Decoder
from tenuto.models.hf import HfCheckpoint
from tenuto.models.native.obstacle import obstacle
from tenuto.models.store import resolve
from tests.exec.kernels import FLOAT32, every_variant, needs_variant
from tests.exec.mixed_driver import LOOKAHEAD, MixedDriver
from tests.exec.rounding import RoundedForward, relative_error
from tests.models.tiny_dense import (
    LONG_ROPE,
    tiny_gemma2,
    tiny_granite3,
    tiny_granite3_moe,
    tiny_phi3,
    tiny_qwen2,
    tiny_qwen3,
    tiny_qwen3_moe,
    tiny_smollm3,
)
from tests.models.tiny_hybrids import (
    VOCABULARY,
    WINDOW,
    tiny_bamba,
    tiny_falcon_h1,
    tiny_gemma3,
    tiny_gpt_oss,
    tiny_granite,
    tiny_mamba,
    tiny_mamba2,
    tiny_mistral,
    tiny_nemotron_h,
    tiny_qwen3_next,
)

LENGTH, PAGE = 150, 4
RTOL, ATOL = 1e-4, 2e-4


@dataclass(frozen=True)
class Variant:
    """A tiny model; `groups` are the memory groups it needs, on pages of 4 tokens in float32."""

    name: str
    make: Callable[..., PreTrainedModel]
    groups: tuple[GroupSpec, ...]
    changes: dict[str, Any] = field(default_factory=dict)


PAGE_BYTES = 2 * PAGE * 2 * 16 * 4
"""Bytes of a page in one layer: keys and values of 2 heads of 16."""
MAMBA2_BYTES = 4 * (3 * (128 + 2 * 2 * 8) + 8 * 16 * 8)
"""Bytes of one layer's state: 3 inputs of every convolution channel, and the recurrent state."""
DELTA_BYTES = 4 * (3 * (2 * 2 * 8 + 4 * 16) + 4 * 8 * 16)
MAMBA2_INPUT, DELTA_INPUT = 4 * (128 + 2 * 2 * 8 + 8), 4 * (2 * 2 * 8 + 4 * 16 + 2 * 4)
"""Bytes that one layer keeps of a guessed token: the inputs of the convolution, and one or two numbers a head."""

GEMMA3 = (GroupSpec(Kind.SLIDING, 3 * PAGE_BYTES, WINDOW), GroupSpec(Kind.FULL, PAGE_BYTES))
BAMBA = (GroupSpec(Kind.STATE, 3 * MAMBA2_BYTES, 0, 3 * MAMBA2_INPUT), GroupSpec(Kind.FULL, PAGE_BYTES))
GRANITE = (GroupSpec(Kind.STATE, 3 * (MAMBA2_BYTES - 4 * 3 * 2 * 8), 0, 3 * (MAMBA2_INPUT - 4 * 2 * 8)), BAMBA[1])
QWEN3_NEXT = (GroupSpec(Kind.STATE, 3 * DELTA_BYTES, 0, 3 * DELTA_INPUT), GroupSpec(Kind.FULL, PAGE_BYTES))

YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.2,
    "mscale_all_dim": 0.7,
}
FALCON_H1 = (
    GroupSpec(Kind.FULL, 3 * PAGE_BYTES),
    GroupSpec(Kind.STATE, 3 * 4 * (3 * (96 + 2 * 2 * 8) + 6 * 16 * 8), 0, 3 * 4 * (96 + 2 * 2 * 8 + 6)),
)
NEMOTRON_H = (
    GroupSpec(Kind.STATE, 2 * 4 * (3 * (96 + 2 * 2 * 8) + 6 * 16 * 8), 0, 2 * 4 * (96 + 2 * 2 * 8 + 6)),
    GroupSpec(Kind.FULL, PAGE_BYTES),
)
GPT_OSS = (GroupSpec(Kind.SLIDING, 2 * PAGE_BYTES, WINDOW), GroupSpec(Kind.FULL, 2 * PAGE_BYTES))
MAMBA = (GroupSpec(Kind.STATE, 3 * 4 * (3 * 128 + 128 * 8), 0, 3 * 4 * 128),)
MAMBA2 = (GroupSpec(Kind.STATE, 3 * MAMBA2_BYTES, 0, 3 * MAMBA2_INPUT),)
MISTRAL = (GroupSpec(Kind.SLIDING, 3 * PAGE_BYTES, WINDOW),)

FULL = (GroupSpec(Kind.FULL, 3 * PAGE_BYTES),)

VARIANTS = [
    Variant("qwen2", tiny_qwen2, FULL),
    Variant("qwen3", tiny_qwen3, FULL),
    Variant("qwen3-moe", tiny_qwen3_moe, FULL, {"mlp_only_layers": [1]}),
    Variant("smollm3", tiny_smollm3, (GroupSpec(Kind.FULL, 4 * PAGE_BYTES),)),
    Variant("phi3", tiny_phi3, MISTRAL),
    Variant(
        "phi3-long",
        tiny_phi3,
        FULL,
        {"sliding_window": None, "rope_parameters": {**LONG_ROPE, "original_max_position_embeddings": 100}},
    ),
    Variant("granite3", tiny_granite3, FULL),
    Variant("granite3-moe", tiny_granite3_moe, FULL),
    Variant(
        "gemma2", tiny_gemma2, (GroupSpec(Kind.SLIDING, 2 * PAGE_BYTES, WINDOW), GroupSpec(Kind.FULL, 2 * PAGE_BYTES))
    ),
    Variant("mistral", tiny_mistral, MISTRAL),
    Variant("gemma3", tiny_gemma3, GEMMA3),
    Variant(
        "gemma3-untied-capped",
        tiny_gemma3,
        GEMMA3,
        {"tie_word_embeddings": False, "final_logit_softcapping": 5.0, "attention_bias": True},
    ),
    Variant("bamba", tiny_bamba, BAMBA),
    Variant(
        "bamba-biases",
        tiny_bamba,
        BAMBA,
        {"mamba_proj_bias": True, "mamba_conv_bias": False, "attention_bias": True, "tie_word_embeddings": True},
    ),
    Variant("granite", tiny_granite, GRANITE),
    Variant("granite-dense-rope", tiny_granite, GRANITE, {"num_local_experts": 0, "position_embedding_type": "rope"}),
    Variant("falcon-h1", tiny_falcon_h1, FALCON_H1),
    Variant("falcon-h1-normed", tiny_falcon_h1, FALCON_H1, {"mamba_rms_norm": True, "tie_word_embeddings": True}),
    Variant("nemotron-h", tiny_nemotron_h, NEMOTRON_H),
    Variant("nemotron-h-biases", tiny_nemotron_h, NEMOTRON_H, {"use_bias": True, "norm_topk_prob": False}),
    Variant("mamba", tiny_mamba, MAMBA),
    Variant(
        "mamba-biases", tiny_mamba, MAMBA, {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False}
    ),
    Variant("mamba2", tiny_mamba2, MAMBA2),
    Variant(
        "mamba2-biases",
        tiny_mamba2,
        MAMBA2,
        {"use_bias": True, "use_conv_bias": False, "time_step_limit": [0.2, 0.9], "tie_word_embeddings": True},
    ),
    Variant("qwen3-next", tiny_qwen3_next, QWEN3_NEXT),
    Variant("gpt-oss", tiny_gpt_oss, GPT_OSS),
    Variant("gpt-oss-truncated", tiny_gpt_oss, GPT_OSS, {"rope_parameters": YARN, "attention_bias": False}),
    Variant("qwen3-next-unnormalised", tiny_qwen3_next, QWEN3_NEXT, {"norm_topk_prob": False, "mlp_only_layers": []}),
]


@dataclass(frozen=True)
class Stage:
    """A model in both implementations, with the logits of theirs after each token of 4 texts, float32 [4, LENGTH,
    vocab], and the outputs of its last norm, float32 [4, LENGTH, hidden]."""

    variant: Variant
    directory: Path
    checkpoint: HfCheckpoint
    config: ModelConfig
    executor: ModelExecutor
    texts: list[list[int]]
    expected: torch.Tensor
    vectors: torch.Tensor


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda variant: variant.name)
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    variant: Variant = request.param
    model = variant.make(**variant.changes)
    directory = tmp_path_factory.mktemp(variant.name)
    model.save_pretrained(directory)
    checkpoint = HfCheckpoint(directory)
    config = checkpoint.config.within(LENGTH)
    decoder = Decoder(config, checkpoint.weights(), torch.device("cpu"), torch.float32)
    texts = np.random.default_rng(1).integers(3, VOCABULARY, (4, LENGTH)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor(texts), use_cache=False).logits
        vectors = model.base_model(torch.tensor(texts), use_cache=False).last_hidden_state
    assert expected.std() > 0.5, "the logits are too small for the comparison"
    executor = ModelExecutor(TorchForward(decoder, PAGE))
    yield Stage(variant, directory, checkpoint, config, executor, texts, expected, vectors)
    executor.close()


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize(
    "cuts",
    [[], [1, 2, 3, 4, 5], [64, 65, 128], [63, 127], [10, 11, 20, 21], [*range(1, 80)]],
    ids=["whole", "kernel", "scan-blocks", "before-scan-blocks", "window", "one-by-one"],
)
def test_logits_equal_those_of_transformers_wherever_a_text_is_cut(stage: Stage, cuts: list[int]) -> None:
    """One by one, tokens pass the ends of a window and of a block of a scan; the others follow at once."""
    driver = MixedDriver(stage.executor, rows=1)
    ends = [*cuts, LENGTH]
    found = [driver.logits({0: stage.texts[0][a:b]}) for a, b in zip([0, *cuts], ends, strict=True)]
    assert_close(torch.cat(found), stage.expected[0])


def test_vectors_are_the_outputs_of_the_last_norm_alone_or_added_up(stage: Stage) -> None:
    driver = MixedDriver(stage.executor, rows=2, units=120)
    first, second = stage.texts[:2]
    assert_close(
        driver.vectors({0: first[:70], 1: second[:20]}), torch.cat([stage.vectors[0][:70], stage.vectors[1][:20]])
    )
    parts = [(0, 1), (3, 77), (79, 1), (80, 2), (85, 0)]
    found = driver.vectors({0: first[70:], 1: second[20:30]}, parts)
    both = torch.cat([stage.vectors[0][70:], stage.vectors[1][20:30]])
    torch.testing.assert_close(
        found, torch.stack([both[a : a + n].sum(0) for a, n in parts]), rtol=RTOL, atol=77 * ATOL
    )


def random_batches(
    driver: MixedDriver,
    texts: list[list[int]],
    expected: Sequence[torch.Tensor],
    same: Callable[[torch.Tensor, torch.Tensor], bool | None],
    steps: int = 90,
) -> None:
    """Computes pieces of texts of equal length in rows side by side; as texts end, others begin in their rows. Some
    pieces are guesses, of which the last ones may be wrong. `same` compares logits."""
    rng, text_of, finished, absorbed, length = np.random.default_rng(5), [0] * 6, 0, 0, len(texts[0])
    for _ in range(steps):
        rows = rng.permutation(6)[: rng.integers(1, 7)].tolist()
        starts = {row: driver.lengths[row] for row in rows}
        ends = {row: min(start + int(rng.choice([1, 1, 1, 2, 5, 17, 70])), length) for row, start in starts.items()}
        work = {row: texts[text_of[row]][starts[row] : ends[row]] for row in rows}
        guessed = [row for row in rows if 1 < len(work[row]) <= 1 + LOOKAHEAD and starts[row] and rng.random() < 0.8]
        accepted = {row: int(rng.integers(1, len(work[row]) + 1)) for row in guessed}
        ends |= {row: starts[row] + count for row, count in accepted.items()}
        for row, count in accepted.items():
            work[row] = work[row][:count] + [3] * (len(work[row]) - count)
        absorbed += sum(driver.kept[row] for row in rows)
        ours = driver.logits(work, accepted=accepted).split([len(work[row]) for row in rows])
        for row, found in zip(rows, ours, strict=True):
            assert same(found[: ends[row] - starts[row]], expected[text_of[row]][starts[row] : ends[row]]) is not False
        for row in rows:
            if driver.lengths[row] == length or rng.random() < 0.05:
                driver.release(row)
                text_of[row] = int(rng.integers(len(texts)))
                finished += 1
    assert finished > steps // 15
    assert absorbed > steps * 2 // 9


def test_mixed_batches_give_each_row_the_logits_of_its_text_alone(stage: Stage) -> None:
    random_batches(MixedDriver(stage.executor, rows=6, units=220), stage.texts, list(stage.expected), assert_close)


def test_half_precision_stays_close_and_states_stay_in_float32(stage: Stage) -> None:
    forward = stage.executor.forward
    decoder = Decoder(stage.config, stage.checkpoint.weights(), torch.device("cpu"), torch.bfloat16)
    executor = ModelExecutor(TorchForward(decoder, PAGE))
    driver = MixedDriver(executor, rows=2)
    ours = torch.cat([driver.logits({0: stage.texts[0][a:b]}) for a, b in ((0, 70), (70, 71), (71, LENGTH))])
    assert ours.dtype == torch.float32
    assert (ours - stage.expected[0]).abs().mean() < 0.15 * stage.expected[0].std()
    for half, whole in zip(executor.spec.groups, forward.spec.groups, strict=True):
        assert half.bytes_per_unit < whole.bytes_per_unit
        assert half.paged == (half.bytes_per_unit * 2 == whole.bytes_per_unit)
    executor.close()


def test_the_spec_matches_the_memory_taken_to_the_byte(stage: Stage) -> None:
    forward = stage.executor.forward
    assert isinstance(forward, TorchForward)
    assert forward.spec.groups == stage.variant.groups
    units = tuple(range(7, 7 + len(forward.spec.groups)))
    forward.prepare(units, 3, 5)
    for number, (group, n) in enumerate(zip(forward.spec.groups, units, strict=True)):
        if group.paged:
            taken = forward.memories.pages[number].units[0].nbytes
        else:
            taken = sum(part.nbytes for part in forward.memories.states[number].parts)
            assert forward.memories.inputs[number].nbytes == 3 * 5 * group.bytes_per_input
        assert taken == n * group.bytes_per_unit


def native(stage: Stage, kernels: str, **options: Any) -> ModelExecutor:
    files = resolve(str(stage.directory), stage.directory)
    if (reason := obstacle(stage.config)) is not None:
        pytest.skip(f"PyTorch computes: {reason}")
    executor = load_executor(
        files, ExecutorOptions(PAGE, context=LENGTH, kernels=kernels, cache=cache_dir(), **options)
    )
    assert isinstance(executor.forward, NativeForward), "PyTorch computes"
    return executor


@pytest.fixture(scope="module")
def rounded(stage: Stage) -> torch.Tensor:
    """Returns the logits after each token of the first text, float32 [LENGTH, vocab], with keys and values in
    bfloat16."""
    decoder = Decoder(stage.config, stage.checkpoint.weights(), torch.device("cpu"), torch.float32)
    executor = ModelExecutor(RoundedForward(decoder, PAGE))
    found = MixedDriver(executor, rows=1).logits({0: stage.texts[0]})
    executor.close()
    return found


@every_variant
def test_native_kernels_compute_what_pytorch_computes(stage: Stage, rounded: torch.Tensor, variant: str) -> None:
    """With bfloat16 instructions, queries and softmax weights are rounded too, so a token may be routed to another
    expert, which later tokens see."""
    executor = native(stage, variant)
    whole = MixedDriver(executor, rows=1).logits({0: stage.texts[0]}).clone()
    driver, ends = MixedDriver(executor, rows=1), [1, 3, 10, 11, 65, LENGTH]
    for a, b in zip([0, *ends], ends, strict=False):
        assert torch.equal(driver.logits({0: stage.texts[0][a:b]}), whole[a:b])
    if variant in FLOAT32:
        assert relative_error(whole, rounded) < max(3e-4, 0.1 * relative_error(rounded, stage.expected[0]))
    errors = [relative_error(ours, theirs) for ours, theirs in zip(whole, stage.expected[0], strict=True)]
    assert statistics.median(errors) < 0.03
    assert statistics.mean(errors) < 0.03 or any(isinstance(one.feed_forward, Experts) for one in stage.config.layers)
    executor.close()


@every_variant
def test_native_vectors_are_those_of_transformers_wherever_a_text_is_cut(stage: Stage, variant: str) -> None:
    executor = native(stage, variant)
    whole = MixedDriver(executor, rows=1).vectors({0: stage.texts[0]})
    driver = MixedDriver(executor, rows=2, units=120)
    begun = driver.vectors({0: stage.texts[0][:70], 1: stage.texts[1]}, [(0, 70), (69, 1), (70, LENGTH), (70, 1)])
    assert torch.equal(begun[1], whole[69])
    assert torch.equal(driver.vectors({0: stage.texts[0][70:]}), whole[70:])
    torch.testing.assert_close(begun[0], whole[:70].sum(0), rtol=1e-5, atol=1e-3)
    errors = [relative_error(ours, theirs) for ours, theirs in zip(whole, stage.vectors[0], strict=True)]
    assert statistics.median(errors) < 0.03
    assert relative_error(begun[2] / LENGTH, stage.vectors[1].mean(0)) < 0.1
    executor.close()


@every_variant
def test_natively_mixed_batches_give_each_row_the_logits_of_its_text_alone_bit_for_bit(
    stage: Stage, variant: str
) -> None:
    executor = native(stage, variant, dtype="bfloat16")
    alone = MixedDriver(executor, rows=4, units=220)
    expected = [alone.logits({row: text}).clone() for row, text in enumerate(stage.texts)]
    assert (expected[0] - stage.expected[0]).abs().mean() < 0.15 * stage.expected[0].std()
    random_batches(MixedDriver(executor, rows=6, units=220), stage.texts, expected, torch.equal)
    executor.close()


@needs_variant
def test_the_native_spec_matches_the_memory_taken_to_the_byte(stage: Stage) -> None:
    """Pages hold whole blocks of 16 tokens in bfloat16; states are float32."""
    executor = native(stage, "auto")
    groups = executor.spec.groups
    assert [group.kind for group in groups] == [group.kind for group in stage.variant.groups]
    for group, torch_group in zip(groups, stage.variant.groups, strict=True):
        assert group.bytes_per_unit == torch_group.bytes_per_unit * (16 // PAGE if group.paged else 2) // 2
        assert group.window == torch_group.window
    executor.prepare(tuple(range(7, 7 + len(groups))), 3)
    for number, group in enumerate(groups):
        assert isinstance(executor.forward, NativeForward)
        assert executor.forward.memory(number).shape == (7 + number, group.bytes_per_unit)
    executor.close()
