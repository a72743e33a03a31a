"""Configurations of the families: older and newer files mean the same, unsupported arithmetic is refused, and errors
name the tensor that is wrong."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tenuto.base.config import cache_dir
from tenuto.base.errors import ConfigError, ModelError
from tenuto.exec.load import ExecutorOptions, load_executor
from tenuto.models.config import Attention, Mamba2, Mlp, ModelConfig
from tenuto.models.decoder import Decoder
from tenuto.models.hf import SUPPORTED, HfCheckpoint
from tenuto.models.native.obstacle import obstacle
from tenuto.models.store import resolve
from tests.models.tiny_dense import (
    LONG_ROPE,
    tiny_gemma2,
    tiny_granite3,
    tiny_phi3,
    tiny_qwen2,
    tiny_qwen3_moe,
    tiny_smollm3,
)
from tests.models.tiny_hybrids import (
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

MODELS = {
    "qwen2": tiny_qwen2,
    "qwen3-moe": tiny_qwen3_moe,
    "smollm3": tiny_smollm3,
    "phi3": tiny_phi3,
    "granite3": tiny_granite3,
    "gemma2": tiny_gemma2,
    "gemma3": tiny_gemma3,
    "bamba": tiny_bamba,
    "granite": tiny_granite,
    "qwen3-next": tiny_qwen3_next,
    "gpt-oss": tiny_gpt_oss,
    "falcon-h1": tiny_falcon_h1,
    "nemotron-h": tiny_nemotron_h,
    "mamba": tiny_mamba,
    "mamba2": tiny_mamba2,
}
Save = Callable[[str], Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Returns a function that saves a tiny model of a family and returns its directory."""

    def write(name: str) -> Path:
        MODELS[name]().save_pretrained(tmp_path / name)
        return tmp_path / name

    return write


def edit(directory: Path, *without: str, **changes: Any) -> ModelConfig:
    path = directory / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if key not in without}))
    return HfCheckpoint(directory).config


def load(directory: Path) -> Decoder:
    checkpoint = HfCheckpoint(directory)
    return Decoder(checkpoint.config, checkpoint.weights(), torch.device("cpu"), torch.float32)


def test_qwen2_files_without_layer_types_mean_the_same(save: Save) -> None:
    directory = save("qwen2")
    new = HfCheckpoint(directory).config
    assert edit(directory, "layer_types", sliding_window=8, max_window_layers=1) == new
    windowed = edit(directory, use_sliding_window=True)
    assert [layer.mixer.window for layer in windowed.layers if isinstance(layer.mixer, Attention)] == [0, 8, 8]
    assert edit(directory, use_sliding_window=True, sliding_window=512) == new  # as long as any context


def test_qwen3_moe_files_of_older_transformers_mean_the_same(save: Save) -> None:
    directory = save("qwen3-moe")
    new = HfCheckpoint(directory).config
    assert edit(directory, "num_local_experts", num_experts=6) == new


def test_qwen3_next_files_without_experts_need_no_settings_of_experts(save: Save) -> None:
    of_experts = ("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    config = edit(save("qwen3-next"), *of_experts, num_experts=0, intermediate_size=96)
    assert {layer.feed_forward for layer in config.layers} == {Mlp(96)}


def test_smollm3_omits_rope_in_every_fourth_layer_by_default(save: Save) -> None:
    directory = save("smollm3")
    new = HfCheckpoint(directory).config
    assert edit(directory, "no_rope_layers", "layer_types") == new
    assert [layer.mixer.rope is None for layer in new.layers if isinstance(layer.mixer, Attention)] == [0, 0, 0, 1]


def test_phi3_files_of_older_transformers_mean_the_same(save: Save) -> None:
    directory = save("phi3")
    new = HfCheckpoint(directory).config
    scaling = {"type": "su", "short_factor": LONG_ROPE["short_factor"], "long_factor": LONG_ROPE["long_factor"]}
    older = {"rope_theta": 10000.0, "partial_rotary_factor": 0.75, "rope_scaling": scaling}
    assert edit(directory, "rope_parameters", original_max_position_embeddings=200, **older) == new


@pytest.mark.parametrize(("context", "key"), [(200, "short_factor"), (201, "long_factor"), (None, "long_factor")])
def test_the_rope_depends_on_the_longest_context_a_session_may_have(save: Save, context: int | None, key: str) -> None:
    directory = save("phi3")
    executor = load_executor(resolve(str(directory), directory), ExecutorOptions(4, context=context, kernels="torch"))
    mixer = executor.forward.config.layers[0].mixer
    assert isinstance(mixer, Attention)
    assert mixer.rope is not None
    assert list(mixer.rope.divisors) == LONG_ROPE[key]
    assert not mixer.rope.long_divisors
    executor.close()


def test_gemma3_files_of_older_transformers_mean_the_same(save: Save) -> None:
    directory = save("gemma3")
    new = edit(directory, "layer_types", sliding_window_pattern=3)
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = edit(directory, "rope_parameters", rope_theta=10000, rope_local_base_freq=100, rope_scaling=scaling)
    assert old == new
    assert [layer.mixer.window for layer in old.layers if isinstance(layer.mixer, Attention)] == [10, 10, 0, 10]


def test_bamba_files_of_older_transformers_mean_the_same(save: Save) -> None:
    directory = save("bamba")
    new = HfCheckpoint(directory).config
    without = ("rope_parameters", "time_step_limit", "mamba_d_head")
    assert edit(directory, *without, rope_theta=10000.0, mamba_d_head="auto") == new


def test_granite_names_its_layers_in_two_ways(save: Save) -> None:
    directory = save("granite")
    new = HfCheckpoint(directory).config
    kinds = ["mamba", "mamba", "attention", "mamba"]
    assert edit(directory, layer_types=kinds, position_embedding_type="nope") == new


def test_qwen3_next_files_may_give_the_interval_of_attention_layers(save: Save) -> None:
    config = edit(save("qwen3-next"), "layer_types", full_attention_interval=2)
    assert [isinstance(layer.mixer, Attention) for layer in config.layers] == [False, True, False, True]


def test_a_time_step_is_limited_as_configured(save: Save) -> None:
    config = edit(save("bamba"), time_step_limit=[0.01, 0.5])
    assert isinstance(config.layers[0].mixer, Mamba2)
    assert (config.layers[0].mixer.least_step, config.layers[0].mixer.most_step) == (0.01, 0.5)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act = 'gelu'; supported: 'silu'"),
        ("qwen2", {"layer_types": ["full_attention"]}, "expected: 3 names from sliding_attention, full_attention"),
        ("qwen3-moe", {"num_experts_per_tok": 7}, "7 of 6 experts cannot be chosen"),
        ("smollm3", {"no_rope_layers": [1, 0]}, r"no_rope_layers = \[1, 0\]; expected: 4 numbers, each 0 or 1"),
        ("smollm3", {"mlp_bias": True}, "mlp_bias = True; supported: False"),
        ("phi3", {"rope_parameters": LONG_ROPE | {"long_factor": [1.0]}}, "long_factor = .*; expected: 6 numbers"),
        ("phi3", {"attention_bias": True}, "attention_bias = True; supported: False"),
        ("granite3", {"embedding_multiplier": "12"}, "embedding_multiplier = '12'; expected: float"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "cap is -1.0; allowed: at least 0"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True; supported: False"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0; supported: None"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True; supported: False"),
        ("gemma3", {"hidden_activation": "relu"}, "hidden_activation = 'relu'; supported: 'gelu_pytorch_tanh'"),
        ("gemma3", {"layer_types": ["full_attention"]}, "expected: 4 names from sliding_attention, full_attention"),
        ("gemma3", {"sliding_window": None}, "sliding_window = None; expected: int"),
        ("bamba", {"mlp_bias": True}, "mlp_bias = True; supported: False"),
        ("mamba2", {"head_dim": 15}, "8 Mamba-2 heads of 15; expected: 128 channels"),
        ("mamba2", {"hidden_act": "gelu"}, "hidden_act = 'gelu'; supported: 'silu'"),
        ("mamba", {"conv_kernel": 1}, "a kernel of 1; allowed: at least 2"),
        ("bamba", {"mamba_d_head": 15}, "8 Mamba-2 heads of 15; expected: 128 channels"),
        ("bamba", {"mamba_n_groups": 3}, "8 Mamba-2 heads cannot form 3 groups"),
        ("bamba", {"mamba_d_conv": 1}, "a kernel of 1; allowed: at least 2"),
        ("bamba", {"attn_layer_indices": 2}, "attn_layer_indices = 2; expected: a list of int"),
        ("bamba", {"time_step_limit": [1]}, r"time_step_limit = \[1\]; expected: two numbers"),
        ("granite", {"position_embedding_type": "alibi"}, "'alibi'; supported: None"),
        ("granite", {"num_experts_per_tok": 9}, "9 of 5 experts cannot be chosen"),
        ("granite", {"hidden_size": 1}, "head_dim is 0; allowed: more than 0"),
        ("nemotron-h", {"head_dim": None, "hidden_size": 1}, "head_dim is 0; allowed: more than 0"),
        (
            "granite",
            {"layer_types": ["mamba"] * 3 + ["rnn"]},
            "expected: 4 names from mamba, linear_attention, attention",
        ),
        ("gpt-oss", {"swiglu_limit": 9.0}, "swiglu_limit = 9.0; supported: 7.0"),
        (
            "gpt-oss",
            {"quantization_config": {"quant_method": "hqq"}},
            "method 'hqq', .* supported: none, gptq, .*mxfp4",
        ),
        ("qwen3-next", {"hidden_act": "gelu"}, "hidden_act = 'gelu'; supported: 'silu'"),
        ("qwen3-next", {"linear_num_value_heads": 3}, "3 value heads cannot share 2 key heads"),
        ("qwen3-next", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.2}}, "3 elements of a head"),
        ("qwen3-next", {"num_experts": "6"}, "num_experts = '6'; expected: int"),
        ("falcon-h1", {"projectors_bias": True}, "projectors_bias = True; supported: False"),
        ("falcon-h1", {"ssm_multipliers": [1.0, 2.0]}, r"ssm_multipliers = \[1.0, 2.0\]; expected: 5 numbers"),
        ("falcon-h1", {"mamba_d_ssm": 80}, "6 Mamba-2 heads of 16; expected: 80 channels"),
        ("nemotron-h", {"moe_latent_size": 32}, "moe_latent_size = 32; supported: None"),
        ("nemotron-h", {"hybrid_override_pattern": "M-X"}, "'X'.*; supported: linear_attention, full_attention"),
        ("nemotron-h", {"layers_block_type": ["mlp"]}, "no layer with attention or recurrence"),
    ],
)
def test_unsupported_arithmetic_is_refused(save: Save, name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        edit(save(name), **changes)


def test_the_error_for_an_unknown_architecture_lists_those_supported(save: Save) -> None:
    assert "Gemma 3 text, Bamba" in SUPPORTED
    with pytest.raises(ModelError, match=f"JambaForCausalLM.*supported: {SUPPORTED}"):
        edit(save("bamba"), architectures=["JambaForCausalLM"])


def test_other_files_of_nemotron_h_mean_the_same(save: Save) -> None:
    directory = save("nemotron-h")
    file, before = directory / "model.safetensors", HfCheckpoint(directory)
    expected = {name: weight.decode() for name, weight in before.weights()}
    renamed = {name.replace("backbone.", "model.", 1): tensor for name, tensor in load_file(file).items()}
    save_file(renamed | {"mtp.layers.0.norm.weight": torch.ones(1)}, file)
    assert edit(directory, "layers_block_type", hybrid_override_pattern="M-*EM") == before.config
    assert edit(directory, layers_block_type=["mamba", "mlp", "attention", "moe", "mamba"]) == before.config
    weights = dict(HfCheckpoint(directory).weights())
    assert weights.keys() == expected.keys()
    assert all(np.array_equal(weights[name].decode(), expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("name", "tensor", "ours"),
    [
        ("phi3", "model.layers.1.self_attn.qkv_proj.weight", "model.layers.1.self_attn."),
        ("qwen3-moe", "model.layers.2.mlp.gate.weight", "model.layers.2.mlp.gate.weight"),
        ("falcon-h1", "model.layers.1.mamba.D", "model.layers.1.mamba.D"),
        ("nemotron-h", "backbone.layers.3.mixer.gate.e_score_correction_bias", "model.layers.3.mlp.gate.correction"),
        ("gemma3", "model.layers.3.self_attn.q_norm.weight", "model.layers.3.self_attn.q_norm.weight"),
        ("bamba", "model.layers.0.mamba.A_log", "model.layers.0.mamba.A_log"),
        ("granite", "model.layers.1.block_sparse_moe.output_linear.weight", r"model.layers.1.mlp.experts.0.down_proj"),
        ("gpt-oss", "model.layers.2.self_attn.sinks", "model.layers.2.self_attn.sinks"),
        ("qwen3-next", "model.layers.3.mlp.experts.5.up_proj.weight", "model.layers.3.mlp.experts.5.up_proj.weight"),
    ],
)
def test_missing_unknown_and_misshapen_tensors_are_named(save: Save, name: str, tensor: str, ours: str) -> None:
    directory = save(name)
    file = directory / "model.safetensors"
    whole = load_file(file)
    save_file({key: value for key, value in whole.items() if key != tensor}, file)
    with pytest.raises(ModelError, match=f"lack .* among them '{ours}"):
        load(directory)
    save_file(whole | {"model.layers.0.extra": torch.zeros(1)}, file)
    with pytest.raises(ModelError, match=r"'model\.layers\.0\.extra'"):
        load(directory)
    save_file(whole | {tensor: whole[tensor][..., 1:].contiguous()}, file)
    with pytest.raises(ModelError, match=f"'{ours}.* is of shape"):
        load(directory)


def packed(tensor: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns random MXFP4 blocks and scales for a tensor of [experts, outputs, inputs]."""
    shape = (*tensor.shape[:-1], tensor.shape[-1] // 32)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(120, 128, shape, generator=generator, dtype=torch.uint8)


def test_mxfp4_weights_of_gpt_oss_decode_as_in_transformers(tmp_path: Path) -> None:
    model = tiny_gpt_oss(hidden_size=64, num_hidden_layers=2)
    model.save_pretrained(tmp_path)
    file, generator = tmp_path / "model.safetensors", torch.Generator().manual_seed(4)
    plain, stored = load_file(file), {}
    for name, tensor in load_file(file).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            stored[f"{name}_blocks"], stored[f"{name}_scales"] = packed(tensor.mT, generator)
            unpacked = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
            plain[name] = unpacked.float().contiguous()
        else:
            stored[name] = tensor
    save_file(plain, file)
    expected = {name: weight.decode() for name, weight in HfCheckpoint(tmp_path).weights()}
    save_file(stored, file)
    edit(tmp_path, quantization_config={"quant_method": "mxfp4"})
    weights = dict(HfCheckpoint(tmp_path).weights())
    assert weights.keys() == expected.keys()
    assert all(np.array_equal(weights[name].decode(), expected[name]) for name in expected)
    assert {weights[name].kind for name in expected if "proj.weight" in name and "experts" in name} == {Kind.MXFP4}
    save_file(
        {name: tensor for name, tensor in stored.items() if not name.endswith("1.mlp.experts.down_proj_scales")}, file
    )
    with pytest.raises(ModelError, match=r"only scales of 'model\.layers\.1\.mlp\.experts\.down_proj'"):
        load(tmp_path)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    save_file(stored | {name: stored[name][:, 1:].contiguous()}, file)
    with pytest.raises(ModelError, match=r"blocks of 'model\.layers\.0\.mlp\.experts\.down_proj' are of shape"):
        load(tmp_path)


def test_heads_for_multi_token_prediction_are_left_out_unless_they_are_asked_for(save: Save) -> None:
    file = save("qwen3-next") / "model.safetensors"
    save_file(load_file(file) | {"mtp.layers.0.mlp.gate.weight": torch.zeros(6, 48)}, file)
    files = resolve(str(file.parent), cache_dir())
    load_executor(files, ExecutorOptions(page_size=4, kernels="torch")).close()
    with pytest.raises(ModelError, match="lack 34 tensors, among them 'mtp"):
        load_executor(files, ExecutorOptions(page_size=4, kernels="torch", predictor=True))


@pytest.mark.parametrize(
    ("make", "changes", "what"),
    [
        (tiny_gemma3, {"head_dim": 12}, "head_dim 12"),
        (tiny_bamba, {"mamba_n_heads": 16, "mamba_d_head": 8}, "Mamba-2 head 8"),
        (tiny_granite, {"mamba_d_state": 4, "intermediate_size": 40}, "convolution 136, expert 40"),
        (tiny_qwen3_next, {"linear_value_head_dim": 12, "shared_expert_intermediate_size": 20}, "shared expert 20"),
        (tiny_mistral, {"intermediate_size": 56, "hidden_size": 40}, "ffn 56, hidden 40"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_models_the_native_kernels_cannot_compute_run_on_pytorch_with_a_message(
    tmp_path: Path, make: Callable[..., PreTrainedModel], changes: dict[str, Any], what: str
) -> None:
    make(**changes).save_pretrained(tmp_path)
    files = resolve(str(tmp_path), tmp_path)
    said: list[str] = []
    executor = load_executor(files, ExecutorOptions(4, cache=cache_dir(), say=said.append))
    assert executor.forward.description == "PyTorch in float32 on cpu"
    assert len(said) == 1
    assert said[0].startswith("Plain PyTorch computes: the native kernels cannot run this model: its ")
    assert said[0].endswith(f"{what} is not a multiple of 16")
    executor.close()
    with pytest.raises(ConfigError, match=f"'avx2' cannot be used: .*{what}"):
        load_executor(files, ExecutorOptions(4, kernels="avx2", cache=cache_dir()))


def test_layers_of_mamba_run_on_pytorch_with_a_message(tmp_path: Path) -> None:
    tiny_mamba().save_pretrained(tmp_path)
    said: list[str] = []
    executor = load_executor(resolve(str(tmp_path), tmp_path), ExecutorOptions(4, cache=cache_dir(), say=said.append))
    assert executor.forward.description == "PyTorch in float32 on cpu"
    assert [text.partition("this model: ")[2] for text in said] == [
        "it has layers of Mamba, which they do not compute, only those of Mamba-2"
    ]
    executor.close()


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_a_model_with_only_recurrent_layers_allows_any_context(save: Save, name: str) -> None:
    config = HfCheckpoint(save(name)).config
    assert (config.max_context, config.tied) == (2**20, name == "mamba")


def test_mamba_files_of_older_transformers_mean_the_same(save: Save) -> None:
    directory = save("mamba2")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    save_file(tensors, file)
    load(directory)


def test_long_heads_and_half_precision_states_rule_out_native_kernels(tmp_path: Path) -> None:
    tiny_bamba().save_pretrained(tmp_path)
    config = HfCheckpoint(tmp_path).config
    assert obstacle(config) is None
    assert obstacle(replace(config, state_dtype="bfloat16")) == "its recurrent states are in bfloat16"
    long = replace(config.layers[2], mixer=Attention(4, 2, 2048, None, 1.0))
    assert obstacle(replace(config, layers=(long,))) == "its head_dim 2048 is more than 1024"
