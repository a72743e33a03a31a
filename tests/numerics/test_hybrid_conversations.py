"""Random conversations on models with sliding-window and recurrent layers: every token a session samples is the one
sampled from scratch.

As `test_conversations`, on small random models in float32 with every mix of memory groups, in pools too small for all
sessions that begin full of garbage; steps also fail at random, half computed. Another token is allowed if its logit is
less than 1e-3 below the highest: logits of one sequence, cut differently, differ by up to 2e-4 (`test_families`).
"""

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tenuto.base.config import EngineConfig
from tenuto.base.groups import Kind
from tenuto.exec.torch_forward import TorchForward
from tenuto.models.decoder import Decoder
from tenuto.models.hf import HfCheckpoint
from tests.models.tiny_hybrids import (
    VOCABULARY,
    tiny_bamba,
    tiny_gemma3,
    tiny_gpt_oss,
    tiny_granite,
    tiny_mistral,
    tiny_qwen3_next,
)
from tests.numerics.real import real_engine
from tests.numerics.test_conversations import (
    CONTEXT,
    PAGE,
    SESSIONS,
    Conversations,
    assert_covered,
    compare,
    longest,
)

CLOSE = 1e-3
STEPS = 250
UNITS = {Kind.FULL: 90, Kind.SLIDING: 70, Kind.STATE: 34}


class Spoiled(TorchForward):
    """Its memory begins with what no sequence wrote: large numbers in pages, NaN in state slots."""

    def prepare(self, units: tuple[int, ...], rows: int) -> None:
        super().prepare(units, rows)
        for pages in self.memories.pages.values():
            pages.kv.data.fill_(1e4)
        for states in self.memories.states.values():
            for part in states.slots.parts:
                part.fill_(torch.nan)


class Flaky:
    """A layer that fails now and then, when those before it have written their states."""

    def __init__(self, layer: Callable[..., torch.Tensor], seed: int) -> None:
        self._layer = layer
        self._rng = Random(seed)
        self.failures = 0

    def __call__(self, *args: Any) -> torch.Tensor:
        if self._rng.random() < 0.03:
            self.failures += 1
            raise RuntimeError("told to fail")
        return self._layer(*args)


@pytest.mark.parametrize("overlap", [0, 1], ids=["in turn", "overlapped"])
@pytest.mark.parametrize("make", [tiny_mistral, tiny_gemma3, tiny_bamba, tiny_granite, tiny_qwen3_next, tiny_gpt_oss])
def test_every_turn_of_random_conversations_samples_what_is_sampled_from_scratch(
    tmp_path_factory: pytest.TempPathFactory, make: Callable[[], PreTrainedModel], overlap: int
) -> None:
    reference = make()
    directory = tmp_path_factory.mktemp("model")
    reference.save_pretrained(directory)
    checkpoint = HfCheckpoint(directory)
    decoder = Decoder(checkpoint.config, checkpoint.weights(), torch.device("cpu"), torch.float32)
    flaky = decoder._layers[-1] = Flaky(decoder._layers[-1], seed=overlap)  # type: ignore[call-overload]
    forward = Spoiled(decoder, PAGE)
    config = EngineConfig(
        context_length=CONTEXT, max_running=8, max_sessions=SESSIONS, token_budget=48, overlap=overlap, audit_every=1
    )
    text = np.random.default_rng(2).integers(3, VOCABULARY, 600).tolist()
    with real_engine(forward, config, units=tuple(UNITS[group.kind] for group in forward.spec.groups)) as engine:
        conversations = Conversations(engine, text, seed=overlap)
        conversations.run(STEPS)
    comparison = compare(reference, longest(conversations.sampled))  # type: ignore[arg-type]
    print(comparison, dict(conversations.engine.transitions), sep="\n")
    assert comparison.compared > 500
    assert all(behind < CLOSE for behind in comparison.behind), str(comparison)
    assert flaky.failures > 4
    assert_covered(conversations)
