"""GGUF files are read as the `gguf` package reads them, and damaged files are refused."""

from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.base.errors import ModelError
from tenuto.formats.gguf_file import GgufFile


def write(path: Path) -> Path:
    """Writes a file with metadata of every kind and two tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{kind}")(f"test.{kind}", 100)
    writer.add_float32("test.float32", 0.1)
    writer.add_float64("test.float64", 0.1)
    writer.add_bool("test.bool", True)
    writer.add_string("test.string", "Ġtenuto 音")
    lists = (("ints", [1, -2, 3]), ("floats", [0.5, 1.5]), ("flags", [True, False]), ("texts", ["a", "ß", ""]))
    for name, values in lists:
        writer.add_array(f"test.{name}", values)
    writer.add_custom_alignment(128)
    writer.add_tensor("one", np.arange(7, dtype=np.float32))
    writer.add_tensor("two", np.arange(6, dtype=np.float16).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "m.gguf")


def test_metadata_and_tensors_read_as_in_the_gguf_package(whole: Path) -> None:
    ours, theirs = GgufFile(whole), gguf.GGUFReader(whole)
    named = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == named
    for tensor in theirs.tensors:
        assert np.array_equal(ours.tensors[tensor.name].span.data(), tensor.data.reshape(-1).view(np.uint8))
        assert ours.tensors[tensor.name].shape == tensor.data.shape


def test_a_file_without_tensors_is_read_too(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    file = GgufFile(tmp_path / "m.gguf")
    assert (file.metadata, file.tensors) == ({"general.architecture": "llama"}, {})


def test_a_file_cut_short_anywhere_is_refused(whole: Path) -> None:
    data = whole.read_bytes()
    cut = whole.with_name("cut.gguf")
    end = len(data) - 128 + 12  # the last tensor is padded
    for size in range(end):
        cut.write_bytes(data[:size])
        with pytest.raises(ModelError, match="not a readable GGUF file"):
            GgufFile(cut)


def test_a_text_longer_than_any_file_is_refused(whole: Path) -> None:
    data, damaged = bytearray(whole.read_bytes()), whole.with_name("long.gguf")
    at = data.index(b"test.texts") + len("test.texts") + 4 + 4 + 8  # kind, kind of items, count
    data[at : at + 8] = b"\xff" * 8
    damaged.write_bytes(data)
    with pytest.raises(ModelError, match="not a readable GGUF file"):
        GgufFile(damaged)


def test_a_tensor_without_elements_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("none", np.zeros((0, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"tensor 'none' of type F32 has shape \(0, 32\)"):
        GgufFile(tmp_path / "m.gguf")


def test_a_tensor_of_a_file_cut_after_opening_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    tensor = GgufFile(path).tensor("two")
    path.write_bytes(path.read_bytes()[: tensor.span.start])
    with pytest.raises(ModelError, match="can no longer be read"):
        tensor.span.data()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_file_is_read_or_refused_but_never_crashes(whole: Path, damage: list[tuple[int, int]]) -> None:
    data = bytearray(whole.read_bytes())
    for place, value in damage:
        data[place] = value
    path = whole.with_name("damaged.gguf")
    path.write_bytes(data)
    with suppress(ModelError):
        GgufFile(path)


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


def write_split(directory: Path) -> list[Path]:
    """Writes a model of three tensors in as many files."""
    writer = gguf.GGUFWriter(directory / "m.gguf", "llama", split_max_tensors=1)
    for name in ("one", "two", "three"):
        writer.add_tensor(name, np.full((2, 3), len(name), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(directory.iterdir())


def test_the_first_file_of_a_split_model_opens_all_of_them(tmp_path: Path) -> None:
    files = write_split(tmp_path)
    assert [path.name for path in files] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    model = GgufFile(files[0])
    assert model.metadata["general.architecture"] == "llama"
    assert [(name, tensor.span.path) for name, tensor in model.tensors.items()] == [
        ("one", files[0]),
        ("two", files[1]),
        ("three", files[2]),
    ]
    assert np.array_equal(model.tensor("three").span.data().view(np.float32), np.full(6, 5, np.float32))


def test_a_split_model_without_all_its_files_is_refused(tmp_path: Path) -> None:
    first, second, third = write_split(tmp_path)
    with pytest.raises(ModelError, match=r"is file 1 \+ 1 of 3 of a model; open the first"):
        GgufFile(second)
    whole = third.read_bytes()
    third.write_bytes(second.read_bytes())
    with pytest.raises(ModelError, match=r"00003-of-00003\.gguf is not file 3 of 3"):
        GgufFile(first)
    third.write_bytes(whole[:-40])
    with pytest.raises(ModelError, match=r"00003-of-00003\.gguf is not a readable GGUF file"):
        GgufFile(first)
    second.unlink()
    third.unlink()
    with pytest.raises(ModelError, match=r"missing beside it: m-00002-of-00003\.gguf, m-00003-of-00003\.gguf"):
        GgufFile(first)
    with pytest.raises(ModelError, match=r"expected: a name such as model-00001-of-00003\.gguf"):
        GgufFile(first.rename(tmp_path / "m.gguf"))
