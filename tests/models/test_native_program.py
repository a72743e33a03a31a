"""Loading takes no more memory than the packed panels and one tensor."""

import weakref
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from tenuto.models.checkpoint import ModelCheckpoint
from tenuto.models.gguf import GgufCheckpoint
from tenuto.models.hf import HfCheckpoint
from tenuto.models.native.program import NativeProgram
from tenuto.models.weights import Bytes, StoredWeight
from tests.models.tiny import save_gguf, save_hf, tiny_llama


class Counted:
    """A tensor's bytes, counted while they exist."""

    alive = most = 0

    def __init__(self, stored: StoredWeight) -> None:
        self._stored = stored

    def read(self) -> Bytes:
        data = self._stored.read()
        Counted.alive += 1
        Counted.most = max(Counted.most, Counted.alive)
        weakref.finalize(data, Counted._dropped)
        return data

    @classmethod
    def _dropped(cls) -> None:
        cls.alive -= 1


@pytest.mark.parametrize("source", ["GGUF", "Hugging Face"])
@pytest.mark.parametrize("plain", [False, True])
def test_a_model_is_packed_tensor_by_tensor(source: str, plain: bool, tmp_path: Path) -> None:
    checkpoint: ModelCheckpoint
    if source == "GGUF":
        checkpoint = GgufCheckpoint(save_gguf(tmp_path / "m.gguf", tiny_llama(), Kind.Q8_0))
    else:
        checkpoint = HfCheckpoint(save_hf(tmp_path, tiny_llama()))
    Counted.most = 0
    weights = [(name, replace(stored, read=Counted(stored).read)) for name, stored in checkpoint.weights()]
    NativeProgram(checkpoint.config, weights, 16, plain=plain)
    assert (Counted.most, Counted.alive) == (1, 0)
