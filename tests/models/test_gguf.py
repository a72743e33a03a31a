"""Models in GGUF files are decoded as the `gguf` package does, and what is damaged or unsupported is refused."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.base.errors import ModelError
from tenuto.models.config import Attention, ModelConfig
from tenuto.models.gguf import GgufCheckpoint
from tenuto.models.hf import HfCheckpoint
from tenuto.models.weights import dequantize
from tests.models.quantize import quantize
from tests.models.tiny import LINEAR, LLAMA3, save_gguf, save_hf, tiny_llama
from tests.models.tiny_hybrids import save_gemma3_gguf, tiny_gemma3


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf(tmp_path_factory.mktemp("tiny") / "m.gguf", tiny_llama(num_hidden_layers=1))


PLAIN = [Kind.F32, Kind.F16, Kind.BF16]
KINDS = [*PLAIN, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]


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
    with pytest.raises(ModelError, match=r"Q3_K.*supported: F32, F16, BF16"):
        dequantize(np.zeros(110, np.uint8), Kind.Q3_K, (1, 256))


def assert_same_shape(ours: ModelConfig, theirs: ModelConfig) -> None:
    """Equal, but for what files of one format do not say, and divisors that are stored rounded."""
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert isinstance(mine.mixer, Attention)
        assert isinstance(other.mixer, Attention)
        assert mine.mixer.rope is not None
        assert other.mixer.rope is not None
        assert mine.mixer.rope.theta == other.mixer.rope.theta
        assert mine.mixer.rope.divisors == pytest.approx(other.mixer.rope.divisors, rel=1e-5)
        assert replace(mine, mixer=replace(mine.mixer, rope=other.mixer.rope)) == other
    same = replace(ours, layers=theirs.layers, eos=theirs.eos, bos=theirs.bos, norm_eps=theirs.norm_eps)
    assert same == theirs
    assert ours.norm_eps == pytest.approx(theirs.norm_eps)


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
    ours = GgufCheckpoint(save_gguf(tmp_path / "m.gguf", model))
    theirs = HfCheckpoint(save_hf(tmp_path / "hf", model))
    weights = dict(ours.weights())
    expected = dict(theirs.weights())
    assert weights.keys() == expected.keys()
    assert all(np.array_equal(weights[name].decode(), expected[name].decode()) for name in expected)
    assert_same_shape(ours.config, theirs.config)
    assert ours.config.eos == (2, 5)


def test_a_gemma3_file_holds_the_same_model_as_the_directory_it_was_made_from(tmp_path: Path) -> None:
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
    kinds = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    model = tiny_gemma3(num_hidden_layers=7, layer_types=kinds, rope_parameters=ropes, query_pre_attn_scalar=16)
    model.save_pretrained(tmp_path / "hf")
    ours, theirs = GgufCheckpoint(save_gemma3_gguf(tmp_path / "m.gguf", model)), HfCheckpoint(tmp_path / "hf")
    assert_same_shape(ours.config, theirs.config)
    weights, expected = dict(ours.weights()), dict(theirs.weights())
    assert weights.keys() == expected.keys()
    assert all(np.array_equal(weights[name].decode(), expected[name].decode()) for name in expected)


def test_a_gemma3_file_may_say_where_global_layers_are_and_how_local_ones_rotate(tmp_path: Path) -> None:
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


def test_linear_rope_scaling_is_read_from_metadata(tmp_path: Path) -> None:
    scaling: dict[str, Any] = {
        "kind": ("llama.rope.scaling.type", "linear"),
        "factor": ("llama.rope.scaling.factor", 4.0),
    }
    model = tiny_llama(rope_parameters=LINEAR)
    path, directory = save_gguf(tmp_path / "m.gguf", model, **scaling), save_hf(tmp_path / "hf", model)
    assert GgufCheckpoint(path).config.layers == HfCheckpoint(directory).config.layers


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.rope.scaling.type", "yarn", "rope scaling 'yarn'; supported: none, linear, llama3"),
        ("llama.expert_count", 8, "mixture of experts; supported: Llama"),
        ("llama.rope.dimension_count", 8, "rope.dimension_count 8; supported: the head size, 16"),
    ],
)
def test_what_needs_other_arithmetic_is_refused(tmp_path: Path, key: str, value: object, message: str) -> None:
    path = save_gguf(tmp_path / "m.gguf", tiny_llama(), extra=(key, value))
    with pytest.raises(ModelError, match=message):
        GgufCheckpoint(path)


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="'mamba'; supported: Llama"):
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
