"""Hugging Face directories: every layout gives the same weights, and unsupported models are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tenuto.base.errors import ModelError
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.torch_forward import TorchForward
from tenuto.models.checkpoint import open_checkpoint
from tenuto.models.config import Attention
from tenuto.models.decoder import Decoder
from tenuto.models.hf import HfCheckpoint
from tenuto.models.native.obstacle import obstacle
from tenuto.models.rope import Rope
from tenuto.models.store import FileFormat, ModelFiles
from tests.exec.mixed_driver import MixedDriver
from tests.models.tiny import LLAMA3, save_hf, tiny_llama
from tests.models.tiny_dense import tiny_phi3

LONG = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [2.0] * 8, "short_factor": [1.0] * 8}


def edit(directory: Path, changes: dict[str, Any], file: str = "config.json") -> None:
    path = directory / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def load(directory: Path) -> Decoder:
    checkpoint = HfCheckpoint(directory)
    return Decoder(checkpoint.config, checkpoint.weights(), torch.device("cpu"), torch.float32)


def rope(directory: Path) -> Rope:
    """Returns the rope of the first layer."""
    mixer = HfCheckpoint(directory).config.layers[0].mixer
    assert isinstance(mixer, Attention)
    assert mixer.rope is not None
    return mixer.rope


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_hf(tmp_path / "model", tiny_llama(tie_word_embeddings=True))


def test_a_sharded_directory_holds_the_same_weights_as_a_single_file(tmp_path: Path) -> None:
    model = tiny_llama()
    single = save_hf(tmp_path / "single", model)
    sharded = save_hf(tmp_path / "sharded", model, shard_bytes=50_000)
    assert len(list(sharded.glob("*.safetensors"))) > 2
    expected, weights = dict(HfCheckpoint(single).weights()), dict(HfCheckpoint(sharded).weights())
    assert weights.keys() == expected.keys()
    assert all(np.array_equal(weights[name].decode(), expected[name].decode()) for name in expected)


def test_a_missing_or_misplaced_shard_is_named(tmp_path: Path) -> None:
    directory = save_hf(tmp_path, tiny_llama(), shard_bytes=50_000)
    second = sorted(directory.glob("*.safetensors"))[1]
    second.unlink()
    with pytest.raises(ModelError, match=f"{second.name} is missing or damaged"):
        load(directory)
    edit(directory, {"weight_map": {"lm_head.weight": "../model.safetensors"}}, "model.safetensors.index.json")
    with pytest.raises(ModelError, match=r"weights in '\.\./model\.safetensors'; expected: the name of a file"):
        load(directory)


def test_rope_settings_of_older_transformers_mean_the_same(tmp_path: Path) -> None:
    directory = save_hf(tmp_path / "model", tiny_llama(rope_parameters=LLAMA3))
    new = HfCheckpoint(directory).config
    old = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    edit(directory, {"rope_parameters": None, "rope_theta": 10000, "rope_scaling": old})
    assert HfCheckpoint(directory).config == new
    edit(directory, {"rope_scaling": None})
    assert set(rope(directory).divisors) == {1.0}


def test_yarn_extends_a_context_given_before_scaling(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    directory = save_hf(tmp_path / "model", tiny_llama())
    assert HfCheckpoint(directory).config.max_context == 256
    edit(directory, {"rope_parameters": None, "rope_theta": 10000, "rope_scaling": scaling})
    assert HfCheckpoint(directory).config.max_context == 1024
    edit(directory, {"max_position_embeddings": 2048})
    assert HfCheckpoint(directory).config.max_context == 2048


def test_ropes_differ_between_short_and_long_contexts(tmp_path: Path) -> None:
    tiny_phi3().save_pretrained(tmp_path)
    config = HfCheckpoint(tmp_path).config
    assert config.within(100).ropes() == config.within(200).ropes() != config.within(201).ropes()


def test_end_tokens_come_from_both_configurations(directory: Path) -> None:
    edit(directory, {"eos_token_id": 2})
    edit(directory, {"eos_token_id": [7, 2]}, "generation_config.json")
    assert HfCheckpoint(directory).config.eos == (2, 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*supported: Llama"),
        ({"architectures": None}, "supported: Llama"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'; supported: 'silu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"sliding_window": 4096}, "sliding_window = 4096; supported: None"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}}, "'mrope'; supported: default, .* longrope"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "short_factor = None; expected: list"),
        ({"rope_parameters": LONG | {"short_factor": [1.0]}}, r"short_factor = \[1.0\]; expected: 8 numbers"),
        ({"rope_parameters": [1.0]}, r"rope_parameters = \[1.0\]; expected: an object"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor = None; expected: float"),
        ({"hidden_size": "64"}, "hidden_size = '64'; expected: int"),
        ({"num_hidden_layers": 0}, "has no layers"),
        ({"num_key_value_heads": 4}, "6 query heads cannot share 4"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}}, "cannot be computed: .*division by zero"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}}, "rope theta is nan"),
        ({"head_dim": 15}, "rotates 15 elements of a head; allowed: an even number"),
    ],
)
def test_unsupported_arithmetic_is_refused(directory: Path, changes: dict[str, Any], message: str) -> None:
    edit(directory, changes)
    with pytest.raises(ModelError, match=message):
        open_checkpoint(ModelFiles("m", FileFormat.HUGGING_FACE, directory))


def test_a_mistral_model_without_a_window_is_a_llama(directory: Path) -> None:
    config = HfCheckpoint(directory).config
    edit(directory, {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None})
    assert HfCheckpoint(directory).config == config
    assert obstacle(config) is None
    load(directory)


def test_a_damaged_configuration_is_refused(directory: Path) -> None:
    for text in ("{", "[]"):
        (directory / "config.json").write_text(text)
        with pytest.raises(ModelError, match=r"config\.json"):
            HfCheckpoint(directory)


def test_damaged_and_missing_weight_files_are_refused(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="missing or damaged"):
        load(directory)
    file.unlink()
    with pytest.raises(ModelError, match="missing or damaged"):
        load(directory)


def test_missing_unknown_and_misshapen_tensors_are_named(directory: Path) -> None:
    file = directory / "model.safetensors"
    whole = load_file(file)
    save_file({k: v for k, v in whole.items() if k != "model.norm.weight"}, file)
    with pytest.raises(ModelError, match=r"lack 1 tensors, among them 'model\.norm\.weight'"):
        load(directory)
    save_file(whole | {"model.layers.0.extra": torch.zeros(1)}, file)
    with pytest.raises(ModelError, match=r"'model\.layers\.0\.extra'"):
        load(directory)
    save_file(whole | {"model.norm.weight": torch.zeros(63)}, file)
    with pytest.raises(ModelError, match=r"of shape \[63\]; expected: \[96\]"):
        load(directory)


def test_tensors_of_other_types_are_refused(directory: Path) -> None:
    file = directory / "model.safetensors"
    save_file(load_file(file) | {"model.norm.weight": torch.zeros(96, dtype=torch.float64)}, file)
    with pytest.raises(ModelError, match=r"'model\.norm\.weight'.*is of type F64; supported: F32, F16, BF16"):
        load(directory)


def test_tensors_that_repeat_the_configuration_are_skipped(directory: Path) -> None:
    file = directory / "model.safetensors"
    repeated = {
        "lm_head.weight": torch.zeros(101, 96),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
    }
    save_file(load_file(file) | repeated, file)
    load(directory)


def test_a_separate_output_head_is_used_although_the_configuration_ties_it(directory: Path) -> None:
    file = directory / "model.safetensors"
    whole = load_file(file)
    embedding = whole["model.embed_tokens.weight"]
    save_file(whole | {"lm_head.weight": embedding.clone()}, file)
    assert HfCheckpoint(directory).config.tied  # some files store the same matrix twice
    head = torch.randn(embedding.shape)
    save_file(whole | {"lm_head.weight": head}, file, metadata={"format": "pt"})
    text = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.inference_mode():
        expected = LlamaForCausalLM.from_pretrained(directory)(text).logits[0]
        driver = MixedDriver(ModelExecutor(TorchForward(load(directory), 16)), 1, 20)
        torch.testing.assert_close(driver.logits({0: text[0].tolist()}), expected, rtol=1e-4, atol=1e-4)
