"""The forward pass computes what transformers computes, for every variant of the architecture."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tenuto.models.block import Rotation
from tenuto.models.decoder import Decoder
from tenuto.models.hf import HfCheckpoint
from tests.models.tiny import DYNAMIC, LINEAR, LLAMA3, YARN, save_hf, tiny_llama


class Nothing:
    """The memory of one sequence with nothing cached, for models with full attention."""

    pieces = ()

    def append(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        norms: object = None,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        assert norms is None
        assert rotation is not None
        self._kv = rotation(k), v
        return rotation(q)

    def attend(self, layer: int, q: torch.Tensor, scale: float, sinks: object = None, cap: float = 0.0) -> torch.Tensor:
        assert sinks is None
        assert not cap
        k, v = self._kv
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        scores += torch.full(scores.shape[1:], -torch.inf).triu(1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)

    def slots(self, layer: int) -> None:
        raise NotImplementedError

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def absorbed(self, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        raise NotImplementedError

    @property
    def keeping(self) -> torch.Tensor:
        raise NotImplementedError

    def keep(self, layer: int, inputs: torch.Tensor) -> None:
        raise NotImplementedError

    def write(self, layer: int, convolution: torch.Tensor, recurrent: torch.Tensor) -> None:
        raise NotImplementedError


def both_logits(model: LlamaForCausalLM, directory: Path, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    checkpoint = HfCheckpoint(save_hf(directory, model))
    ours = Decoder(checkpoint.config, checkpoint.weights(), torch.device("cpu"), torch.float32)
    places = torch.arange(len(tokens))
    with torch.inference_mode():
        return ours.forward(tokens, places, places, Nothing()), model(tokens[None]).logits[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": False},
        {"rope_parameters": LLAMA3},
        {"rope_parameters": LINEAR},
        {"rope_parameters": YARN},
        {"rope_parameters": DYNAMIC},
        {"attention_bias": True},
        {"num_key_value_heads": 6},
        {"num_key_value_heads": 1, "head_dim": 32},
    ],
    ids=["tied", "untied", "llama3", "linear", "yarn", "dynamic", "biases", "one-query-a-key", "one-key-head"],
)
def test_logits_match_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    tokens = torch.randint(0, 101, (150,), generator=torch.Generator().manual_seed(3))
    ours, theirs = both_logits(tiny_llama(**changes), tmp_path, tokens)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-4)


def test_logits_are_computed_only_where_requested(tmp_path: Path) -> None:
    checkpoint = HfCheckpoint(save_hf(tmp_path, tiny_llama()))
    model = Decoder(checkpoint.config, checkpoint.weights(), torch.device("cpu"), torch.float32)
    tokens, places = torch.arange(20), torch.arange(20)
    with torch.inference_mode():
        every = model.forward(tokens, places, places, Nothing())
        some = model.forward(tokens, places, torch.tensor([19, 4]), Nothing())
        none = model.forward(tokens, places, torch.empty(0, dtype=torch.int64), Nothing())
    torch.testing.assert_close(some, every[[19, 4]], rtol=1e-5, atol=1e-5)
    assert none.shape == (0, 101)
