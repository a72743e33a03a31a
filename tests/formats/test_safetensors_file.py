"""safetensors files are read as the `safetensors` package reads them, and damaged files are refused."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tenuto.base.errors import ModelError
from tenuto.formats.safetensors_file import read_safetensors


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a file with tensors of several types, one of them empty and one a scalar."""
    path = tmp_path_factory.mktemp("safetensors") / "m.safetensors"
    tensors = {
        "float": torch.randn(3, 5),
        "half": torch.randn(7).half(),
        "brain": torch.randn(2, 3, 2).bfloat16(),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "number": torch.tensor(2.5),
        "none": torch.zeros(0, 4),
    }
    save_file(tensors, path, {"format": "pt"})
    return path


def test_tensors_read_as_in_the_safetensors_package(whole: Path) -> None:
    ours, theirs = read_safetensors(whole), load_file(whole)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].shape == tensor.shape
        assert ours[name].span.data().tobytes() == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert [ours[name].dtype for name in ("float", "half", "brain", "bytes")] == ["F32", "F16", "BF16", "U8"]


def test_a_file_cut_short_anywhere_is_refused(whole: Path) -> None:
    data, cut = whole.read_bytes(), whole.with_name("cut.safetensors")
    for size in range(len(data)):
        cut.write_bytes(data[:size])
        with pytest.raises(ModelError, match="missing or damaged"):
            read_safetensors(cut)


def described(**changes: Any) -> bytes:
    """Writes a file of one tensor of two float32 numbers, with changes to its header entry."""
    header = json.dumps({"one": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}).encode()
    return len(header).to_bytes(8, "little") + header + np.ones(2, np.float32).tobytes()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shape": [3]}, r"type F32 and shape \(3,\) has 8 bytes"),
        ({"shape": [-2]}, "the shape"),
        ({"shape": [True, 2]}, "the shape"),
        ({"shape": 2}, "missing or damaged"),
        ({"data_offsets": [8, 0]}, "ends within"),
        ({"data_offsets": [8, 16]}, "ends within tensor 'one'"),
        ({"data_offsets": [0]}, "missing or damaged"),
        ({"dtype": None}, "has the type None"),
    ],
)
def test_a_header_that_does_not_fit_its_data_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    file.write_bytes(described(**changes))
    with pytest.raises(ModelError, match=said):
        read_safetensors(file)
    file.write_bytes(described())
    assert read_safetensors(file)["one"].span.data().view(np.float32).tolist() == [1, 1]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.safetensors is missing or damaged"):
        read_safetensors(tmp_path / "none.safetensors")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_file_is_read_or_refused_but_never_crashes(whole: Path, damage: list[tuple[int, int]]) -> None:
    data = bytearray(whole.read_bytes())
    for place, value in damage:
        data[place % len(data)] = value
    damaged = whole.with_name("damaged.safetensors")
    damaged.write_bytes(data)
    with suppress(ModelError):
        for tensor in read_safetensors(damaged).values():
            tensor.span.data()
