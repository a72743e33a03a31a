"""GGUF files are read as the `gguf` package reads them, and what is damaged or unsupported is refused."""

from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.base.errors import ModelError
from tenuto.models.gguf import GgufCheckpoint, dequantize
from tenuto.models.gguf_file import GgufFile
from tenuto.models.hf import HfCheckpoint
from tests.models.tiny import LINEAR, LLAMA3, save_gguf, save_hf, tiny_llama


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf(tmp_path_factory.mktemp("tiny") / "m.gguf", tiny_llama(num_hidden_layers=1))


KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_decoding_equals_the_gguf_package_bit_for_bit(kind: Kind) -> None:
    values = np.random.default_rng(1).standard_normal((48, 96), np.float32) * np.logspace(-6, 4, 48)[:, None]
    values[3] = 0
    encoded = gguf.quants.quantize(values.astype(np.float32), kind)
    expected = gguf.quants.dequantize(encoded, kind)
    ours = dequantize(torch.from_numpy(encoded.view(np.uint8).reshape(-1)), kind, (48, 96))
    assert ours.dtype == torch.float32
    assert np.array_equal(ours.numpy().view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_any_bytes_decode_as_in_the_gguf_package(kind: Kind) -> None:
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(2).integers(0, 256, (64, 4096 // elements * size), np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, kind)
    ours = dequantize(torch.from_numpy(raw.reshape(-1)), kind, (64, 4096)).numpy()
    assert np.array_equal(ours, expected, equal_nan=True)


def test_a_type_we_cannot_decode_is_named_in_the_error() -> None:
    with pytest.raises(ModelError, match=r"Q6_K.*supported: F32, F16, BF16"):
        dequantize(torch.zeros(210, dtype=torch.uint8), Kind.Q6_K, (1, 256))


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
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    for field in ("layers", "heads", "kv_heads", "head_dim", "ffn", "vocab", "rope_theta", "tied", "attention_bias"):
        assert getattr(ours.config, field) == getattr(theirs.config, field), field
    assert ours.config.rope_divisors == pytest.approx(theirs.config.rope_divisors, rel=1e-5)
    assert ours.config.eos == (2, 5)


def test_linear_rope_scaling_is_read_from_metadata(tmp_path: Path) -> None:
    scaling = {"kind": ("llama.rope.scaling.type", "linear"), "factor": ("llama.rope.scaling.factor", 4.0)}
    path = save_gguf(tmp_path / "m.gguf", tiny_llama(rope_parameters=LINEAR), **scaling)
    assert GgufCheckpoint(path).config.rope_divisors == (4.0,) * 8


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


def test_every_kind_of_metadata_reads_as_in_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{kind}")(f"test.{kind}", 100)
    writer.add_float32("test.float32", 0.1)
    writer.add_float64("test.float64", 0.1)
    writer.add_bool("test.bool", True)
    writer.add_string("test.string", "Ġtenuto 音")
    for name, values in (("ints", [1, -2, 3]), ("floats", [0.5, 1.5]), ("flags", [True, False]), ("texts", ["a", "ß"])):
        writer.add_array(f"test.{name}", values)
    writer.add_custom_alignment(128)
    writer.add_tensor("one", np.arange(7, dtype=np.float32))
    writer.add_tensor("two", np.arange(6, dtype=np.float16).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    named = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == named
    for tensor in theirs.tensors:
        assert np.array_equal(ours.tensors[tensor.name].data, tensor.data.reshape(-1).view(np.uint8))
        assert ours.tensors[tensor.name].shape == tensor.data.shape


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    whole = save_gguf(tmp_path / "m.gguf", tiny_llama(num_hidden_layers=1)).read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, 2000, 37), len(whole) // 2, len(whole) - 33]:
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelError, match="not a readable GGUF file"):
            GgufFile(cut)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2100), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_file_is_read_or_refused_but_never_crashes(tiny_gguf: Path, damage: list[tuple[int, int]]) -> None:
    data = bytearray(tiny_gguf.read_bytes())
    for place, value in damage:
        data[place] = value
    path = tiny_gguf.with_name("damaged.gguf")
    path.write_bytes(data)
    with suppress(ModelError):
        dict(GgufCheckpoint(path).weights())


def test_a_file_of_another_format_or_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError, match="does not begin with GGUF"):
        GgufFile(path)
    path.write_bytes(b"GGUF" + (9).to_bytes(4, "little") + bytes(100))
    with pytest.raises(ModelError, match="version 9"):
        GgufFile(path)
    with pytest.raises(ModelError):
        GgufFile(tmp_path / "absent.gguf")
