"""Models with sliding-window and recurrent layers compute what transformers computes, however their tokens are cut into
steps and whatever shares the steps.

Compared are all logits after every token of sequences of 150 tokens: in one step, in fixed cuts, and in random mixed
batches whose memory is full of garbage wherever a sequence did not write itself. Tolerance: 2e-4, and 1e-4 of the
logit, on logits that spread by 0.5 or more.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tenuto.base.groups import GroupSpec, Kind
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.torch_forward import TorchForward
from tenuto.models.decoder import Decoder
from tenuto.models.hf import HfCheckpoint
from tests.exec.mixed_driver import MixedDriver
from tests.models.tiny_hybrids import (
    VOCABULARY,
    WINDOW,
    tiny_bamba,
    tiny_gemma3,
    tiny_gpt_oss,
    tiny_granite,
    tiny_mistral,
    tiny_qwen3_next,
)

LENGTH, PAGE = 150, 4
RTOL, ATOL = 1e-4, 2e-4


@dataclass(frozen=True)
class Variant:
    """A tiny model; `groups` are those it needs, on pages of 4 tokens in float32."""

    name: str
    make: Callable[..., PreTrainedModel]
    groups: tuple[GroupSpec, ...]
    changes: dict[str, Any] = field(default_factory=dict)


PAGE_BYTES = 2 * PAGE * 2 * 16 * 4
"""Of one layer of Gemma 3 or Qwen3-Next: keys and values of 2 heads of 16."""
MAMBA2_BYTES = 4 * (3 * (96 + 2 * 2 * 8) + 6 * 16 * 8)
"""Of one layer: 3 inputs of every channel of the convolution, and the recurrent state."""
DELTA_BYTES = 4 * (3 * (2 * 2 * 8 + 4 * 12) + 4 * 8 * 12)

GEMMA3 = (GroupSpec(Kind.SLIDING, 3 * PAGE_BYTES, WINDOW), GroupSpec(Kind.FULL, PAGE_BYTES))
BAMBA = (GroupSpec(Kind.STATE, 3 * MAMBA2_BYTES), GroupSpec(Kind.FULL, 2 * PAGE * 2 * 12 * 4))
GRANITE = (GroupSpec(Kind.STATE, 3 * (MAMBA2_BYTES - 4 * 3 * 2 * 8)), BAMBA[1])
QWEN3_NEXT = (GroupSpec(Kind.STATE, 3 * DELTA_BYTES), GroupSpec(Kind.FULL, PAGE_BYTES))

YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.2,
    "mscale_all_dim": 0.7,
}
GPT_OSS = (GroupSpec(Kind.SLIDING, 2 * PAGE_BYTES, WINDOW), GroupSpec(Kind.FULL, 2 * PAGE_BYTES))
MISTRAL = (GroupSpec(Kind.SLIDING, 3 * PAGE_BYTES, WINDOW),)

VARIANTS = [
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
    Variant("qwen3-next", tiny_qwen3_next, QWEN3_NEXT),
    Variant("gpt-oss", tiny_gpt_oss, GPT_OSS),
    Variant("gpt-oss-truncated", tiny_gpt_oss, GPT_OSS, {"rope_parameters": YARN, "attention_bias": False}),
    Variant("qwen3-next-unnormalised", tiny_qwen3_next, QWEN3_NEXT, {"norm_topk_prob": False, "mlp_only_layers": []}),
]


@dataclass(frozen=True)
class Stage:
    """A model twice: theirs by its logits, float32 [4, LENGTH, vocab], after each of 4 texts."""

    variant: Variant
    checkpoint: HfCheckpoint
    executor: ModelExecutor
    texts: list[list[int]]
    expected: torch.Tensor


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda variant: variant.name)
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    variant: Variant = request.param
    model = variant.make(**variant.changes)
    directory = tmp_path_factory.mktemp(variant.name)
    model.save_pretrained(directory)
    checkpoint = HfCheckpoint(directory)
    decoder = Decoder(checkpoint.config, checkpoint.weights(), torch.device("cpu"), torch.float32)
    texts = np.random.default_rng(1).integers(3, VOCABULARY, (4, LENGTH)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor(texts), use_cache=False).logits
    assert expected.std() > 0.5, "logits this small show little"
    executor = ModelExecutor(TorchForward(decoder, PAGE))
    yield Stage(variant, checkpoint, executor, texts, expected)
    executor.close()


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize(
    "cuts",
    [[], [1, 2, 3, 4, 5], [64, 65, 128], [63, 127], [10, 11, 20, 21], [*range(1, LENGTH)]],
    ids=["whole", "kernel", "scan-blocks", "before-scan-blocks", "window", "one-by-one"],
)
def test_logits_equal_those_of_transformers_wherever_a_text_is_cut(stage: Stage, cuts: list[int]) -> None:
    driver = MixedDriver(stage.executor, rows=1)
    ends = [*cuts, LENGTH]
    found = [driver.logits({0: stage.texts[0][a:b]}) for a, b in zip([0, *cuts], ends, strict=True)]
    assert_close(torch.cat(found), stage.expected[0])


def test_mixed_batches_give_each_row_the_logits_of_its_text_alone(stage: Stage) -> None:
    rng = np.random.default_rng(5)
    driver, text_of = MixedDriver(stage.executor, rows=6, units=220), [0] * 6
    finished = 0
    for _ in range(60):
        rows = rng.permutation(6)[: rng.integers(1, 7)].tolist()
        starts = {row: driver.lengths[row] for row in rows}
        ends = {row: min(start + int(rng.choice([1, 1, 1, 2, 5, 17, 70])), LENGTH) for row, start in starts.items()}
        ours = driver.logits({row: stage.texts[text_of[row]][starts[row] : ends[row]] for row in rows})
        assert_close(ours, torch.cat([stage.expected[text_of[row], starts[row] : ends[row]] for row in rows]))
        for row in rows:
            if driver.lengths[row] == LENGTH or rng.random() < 0.05:
                driver.release(row)
                text_of[row] = int(rng.integers(4))
                finished += 1
    assert finished > 6


def test_half_precision_stays_close_and_states_stay_in_float32(stage: Stage) -> None:
    checkpoint, forward = stage.checkpoint, stage.executor.forward
    decoder = Decoder(checkpoint.config, checkpoint.weights(), torch.device("cpu"), torch.bfloat16)
    executor = ModelExecutor(TorchForward(decoder, PAGE))
    driver = MixedDriver(executor, rows=2)
    ours = torch.cat([driver.logits({0: stage.texts[0][a:b]}) for a, b in ((0, 70), (70, 71), (71, LENGTH))])
    assert ours.dtype == torch.float32
    assert (ours - stage.expected[0]).abs().mean() < 0.15 * stage.expected[0].std()
    for half, whole in zip(executor.spec.groups, forward.spec.groups, strict=True):
        assert half.bytes_per_unit < whole.bytes_per_unit
        assert half.paged == (half.bytes_per_unit * 2 == whole.bytes_per_unit)
    executor.close()


def test_the_spec_is_what_the_memory_takes_to_the_byte(stage: Stage) -> None:
    forward = stage.executor.forward
    assert isinstance(forward, TorchForward)
    assert forward.spec.groups == stage.variant.groups
    units = tuple(range(7, 7 + len(forward.spec.groups)))
    forward.prepare(units, 3)
    for number, (group, n) in enumerate(zip(forward.spec.groups, units, strict=True)):
        if group.paged:
            taken = forward.memories.pages[number].kv.data.nbytes
        else:
            taken = sum(part.nbytes for part in forward.memories.states[number].slots.parts)
        assert taken == n * group.bytes_per_unit
