"""GGUF models are decoded exactly as by the `gguf` package, and damaged or unsupported ones are refused."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from tenuto.base.config import cache_dir
from tenuto.base.errors import ModelError
from tenuto.exec.load import ExecutorOptions, load_executor
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.native_forward import NativeForward
from tenuto.exec.torch_forward import TorchForward
from tenuto.formats.gguf_file import GgufFile
from tenuto.kernels.native.formats import FORMATS
from tenuto.models.config import Attention, ModelConfig
from tenuto.models.decoder import Decoder
from tenuto.models.families import llama
from tenuto.models.families.gguf_family import GgufSettings
from tenuto.models.gguf import SUPPORTED, GgufCheckpoint
from tenuto.models.hf import HfCheckpoint
from tenuto.models.store import resolve
from tenuto.models.weights import dequantize
from tests.exec.kernels import every_variant
from tests.exec.mixed_driver import MixedDriver
from tests.exec.rounding import RoundedForward, assert_rounded_as_said, round_products
from tests.models.quantize import quantize
from tests.models.tiny import LINEAR, LLAMA3, YARN, save_gguf, save_hf, tiny_llama
from tests.models.tiny_dense import (
    save_dense_gguf,
    tiny_gemma2,
    tiny_granite3,
    tiny_granite3_moe,
    tiny_phi3,
    tiny_qwen2,
    tiny_qwen3,
    tiny_qwen3_moe,
    tiny_smollm3,
)
from tests.models.tiny_hybrids import save_gemma3_gguf, tiny_gemma3, tiny_mistral


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf(tmp_path_factory.mktemp("tiny") / "m.gguf", tiny_llama(num_hidden_layers=1))


PLAIN = [Kind.F32, Kind.F16, Kind.BF16]
KINDS = [*PLAIN, *FORMATS]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_decoding_equals_the_gguf_package_bit_for_bit(kind: Kind) -> None:
    values = np.random.default_rng(1).standard_normal((48, 256), np.float32) * np.logspace(-6, 4, 48)[:, None]
    values[3] = 0
    encoded = quantize(values.astype(np.float32), kind)
    expected = gguf.quants.dequantize(encoded, kind)
    ours = dequantize(encoded.view(np.uint8).reshape(-1), kind, (48, 256))
    assert np.array_equal(ours.view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_any_bytes_decode_as_in_the_gguf_package(kind: Kind) -> None:
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(2).integers(0, 256, (64, 4096 // elements * size), np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, kind)
    ours = dequantize(raw.reshape(-1), kind, (64, 4096))
    assert np.array_equal(ours, expected, equal_nan=True)


def test_a_type_we_cannot_decode_is_named_in_the_error() -> None:
    with pytest.raises(ModelError, match=r"IQ2_S .*supported: F32, F16, BF16"):
        dequantize(np.zeros(82, np.uint8), Kind.IQ2_S, (1, 256))


def close(value: Any) -> Any:
    """Compares tensors that files store as float32."""
    return pytest.approx(value, rel=1e-5)


def assert_same_shape(ours: ModelConfig, theirs: ModelConfig) -> None:
    """Compares models, except for what one format leaves out and numbers stored rounded."""
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert replace(mine, mixer=other.mixer) == other
        assert isinstance(mine.mixer, Attention)
        assert isinstance(other.mixer, Attention)
        assert (mine.mixer.rope is None) == (other.mixer.rope is None)
        if mine.mixer.rope is not None and other.mixer.rope is not None:
            assert mine.mixer.rope.theta == other.mixer.rope.theta
            assert mine.mixer.rope.magnitude == close(other.mixer.rope.magnitude)
            assert mine.mixer.rope.divisors == close(other.mixer.rope.divisors)
            assert mine.mixer.rope.long_divisors == close(other.mixer.rope.long_divisors)
            assert mine.mixer.rope.original_context == other.mixer.rope.original_context
        assert (mine.mixer.scale, mine.mixer.cap) == close((other.mixer.scale, other.mixer.cap))
        rounded: dict[str, Any] = {"rope": other.mixer.rope, "scale": other.mixer.scale, "cap": other.mixer.cap}
        assert replace(mine.mixer, **rounded) == other.mixer
    for name in ("norm_eps", "embedding_scale", "residual_scale", "logit_scale", "logit_cap"):
        assert getattr(ours, name) == close(getattr(theirs, name))
        ours = replace(ours, **{name: getattr(theirs, name)})
    assert replace(ours, layers=theirs.layers, eos=theirs.eos, bos=theirs.bos) == theirs


def assert_same_model(path: Path, directory: Path) -> None:
    ours, theirs = GgufCheckpoint(path), HfCheckpoint(directory)
    assert_same_shape(ours.config, theirs.config)
    weights, expected = dict(ours.weights()), dict(theirs.weights())
    assert weights.keys() == expected.keys()
    assert all(np.array_equal(weights[name].decode(), expected[name].decode()) for name in expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": False, "rope_parameters": LLAMA3},
        {"attention_bias": True},
    ],
    ids=["tied", "untied-llama3", "biases"],
)
def test_a_gguf_file_holds_the_same_model_as_the_directory_it_was_made_from(tmp_path: Path, changes: dict) -> None:
    model = tiny_llama(**changes)
    path = save_gguf(tmp_path / "m.gguf", model)
    assert_same_model(path, save_hf(tmp_path / "hf", model))
    assert GgufCheckpoint(path).config.eos == (2, 5)


DENSE: dict[str, tuple[Callable[..., PreTrainedModel], dict[str, Any]]] = {
    "llama": (tiny_mistral, {}),
    "qwen2": (tiny_qwen2, {"tie_word_embeddings": True}),
    "qwen3": (tiny_qwen3, {}),
    "qwen3moe": (tiny_qwen3_moe, {}),
    "smollm3": (tiny_smollm3, {}),
    "phi3": (tiny_phi3, {}),
    "granite": (tiny_granite3, {}),
    "granitemoe": (tiny_granite3_moe, {}),
    "gemma2": (tiny_gemma2, {"query_pre_attn_scalar": 16}),
}
"""Models by the name of their architecture in GGUF files."""


@pytest.mark.parametrize("architecture", DENSE)
def test_files_of_every_family_hold_the_same_model_as_directories(architecture: str, tmp_path: Path) -> None:
    make, changes = DENSE[architecture]
    model = make(**changes)
    model.save_pretrained(tmp_path)
    assert_same_model(save_dense_gguf(tmp_path / "m.gguf", model, architecture), tmp_path)


@every_variant
@pytest.mark.parametrize("architecture", ["phi3", "qwen3moe"])
def test_parts_of_quantized_tensors_are_computed_natively_as_in_pytorch(
    variant: str, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused projections and stored experts are split without being decoded; routers stay float32."""
    path = save_dense_gguf(tmp_path / "m.gguf", DENSE[architecture][0](), architecture, Kind.Q8_0)
    texts = dict(enumerate(np.random.default_rng(1).integers(3, 101, (8, 5)).tolist()))

    def logits(executor: ModelExecutor) -> torch.Tensor:
        found = MixedDriver(executor, rows=8).logits(texts).clone()
        executor.close()
        return found

    executor = load_executor(resolve(str(path), tmp_path), ExecutorOptions(16, kernels=variant, cache=cache_dir()))
    assert isinstance(executor.forward, NativeForward)
    assert executor.forward.weight_bytes < 1.5 * path.stat().st_size
    checkpoint = GgufCheckpoint(path)
    config = checkpoint.config.within(checkpoint.config.max_context)
    decoder = Decoder(config, checkpoint.weights(), torch.device("cpu"), torch.float32)
    exact = logits(ModelExecutor(TorchForward(decoder, 16)))
    round_products(monkeypatch, variant, Kind.Q8_0)
    rounded = logits(ModelExecutor(RoundedForward(decoder, 16)))
    assert_rounded_as_said(logits(executor), rounded, exact, variant, Kind.Q8_0)


def test_a_split_model_is_opened_by_its_first_file(tmp_path: Path) -> None:
    model = tiny_qwen3()
    model.save_pretrained(tmp_path / "hf")
    save_dense_gguf(tmp_path / "m.gguf", model, "qwen3", split=7)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    assert resolve(str(parts[0]), tmp_path).name == "m"
    assert_same_model(parts[0], tmp_path / "hf")


def test_a_gemma3_file_holds_the_same_model_as_the_directory_it_was_made_from(tmp_path: Path) -> None:
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
    kinds = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    model = tiny_gemma3(num_hidden_layers=7, layer_types=kinds, rope_parameters=ropes, query_pre_attn_scalar=16)
    model.save_pretrained(tmp_path / "hf")
    assert_same_model(save_gemma3_gguf(tmp_path / "m.gguf", model), tmp_path / "hf")


def test_a_gemma3_file_may_give_its_layer_pattern_and_the_rope_of_local_layers(tmp_path: Path) -> None:
    said = {
        "pattern": ("gemma3.attention.sliding_window_pattern", 2),
        "theta": ("gemma3.rope.freq_base_swa", 500.0),
        "cap": ("gemma3.final_logit_softcapping", 30.0),
    }
    config = GgufCheckpoint(save_gemma3_gguf(tmp_path / "m.gguf", tiny_gemma3(), **said)).config
    mixers = [layer.mixer for layer in config.layers if isinstance(layer.mixer, Attention)]
    assert [mixer.window for mixer in mixers] == [10, 0, 10, 0]
    assert [mixer.rope.theta for mixer in mixers if mixer.rope] == [500.0, 10000.0, 500.0, 10000.0]
    assert config.logit_cap == 30


@pytest.mark.parametrize("rope", [LINEAR, YARN], ids=["linear", "yarn"])
def test_rope_scaling_is_read_from_metadata(tmp_path: Path, rope: dict[str, Any]) -> None:
    scaling: dict[str, Any] = {
        "kind": ("llama.rope.scaling.type", rope["rope_type"]),
        "factor": ("llama.rope.scaling.factor", 4.0),
        "original": ("llama.rope.scaling.original_context_length", 64),
    }
    model = tiny_llama(rope_parameters=rope, max_position_embeddings=128)
    path, directory = save_gguf(tmp_path / "m.gguf", model, **scaling), save_hf(tmp_path / "hf", model)
    assert GgufCheckpoint(path).config.layers == HfCheckpoint(directory).config.layers
    assert GgufCheckpoint(path).config.max_context == HfCheckpoint(directory).config.max_context


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"rope.scaling.type": "ntk"}, "rope scaling 'ntk'; supported: none, linear, yarn, longrope"),
        ({"rope.scaling.type": "longrope"}, "no tensor 'rope_factors_short.weight'"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.yarn_log_multiplier": 0.1},
            "yarn_log_multiplier 0.1; supported: 0.0",
        ),
        ({"expert_count": 8}, "mixture of experts; supported: Llama"),
        ({"rope.dimension_count": 8}, "rope.dimension_count 8; supported: the head size, 16"),
        ({"attention.head_count_kv": [2, 2, 2]}, r"head_count_kv = \[2, 2, 2\]; expected: one whole number"),
        ({"feed_forward_length": 128.0}, "feed_forward_length = 128.0; expected: one whole number"),
        ({"block_count": 10**6}, "block_count 1000000, but"),
        ({"attention.key_length": 2**31}, "heads of 2147483648; allowed: 1 to 65536"),
    ],
)
def test_unsupported_arithmetic_is_refused(tiny_gguf: Path, said: dict[str, Any], message: str) -> None:
    file = GgufFile(tiny_gguf)
    file.metadata |= {f"llama.{key}": value for key, value in said.items()}
    with pytest.raises(ModelError, match=message):
        llama.GGUF_FAMILY.read(GgufSettings(file, "llama"))


def test_a_scaling_factor_without_a_type_is_linear_and_multiplies_the_divisors(tmp_path: Path) -> None:
    file = GgufFile(save_gguf(tmp_path / "m.gguf", tiny_llama(rope_parameters=LLAMA3)))
    plain = llama.GGUF_FAMILY.read(GgufSettings(file, "llama")).layers[0]
    file.metadata["llama.rope.scaling.factor"] = 2.0
    found = llama.GGUF_FAMILY.read(GgufSettings(file, "llama")).layers[0]
    assert isinstance(plain.mixer, Attention)
    assert isinstance(found.mixer, Attention)
    assert plain.mixer.rope is not None
    assert found.mixer.rope is not None
    assert found.mixer.rope.divisors == tuple(2 * divisor for divisor in plain.mixer.rope.divisors)
    file.metadata["llama.rope.scaling.type"] = "yarn"
    with pytest.raises(ModelError, match=r"rope scaling 'yarn' and rope_freqs\.weight; supported"):
        llama.GGUF_FAMILY.read(GgufSettings(file, "llama"))


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=f"'mamba'; supported: {SUPPORTED}"):
        GgufCheckpoint(tmp_path / "m.gguf")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2100), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_model_is_read_or_refused_but_never_crashes(tiny_gguf: Path, damage: list[tuple[int, int]]) -> None:
    data = bytearray(tiny_gguf.read_bytes())
    for place, value in damage:
        data[place] = value
    path = tiny_gguf.with_name("damaged.gguf")
    path.write_bytes(data)
    with suppress(ModelError):
        dict(GgufCheckpoint(path).weights())
