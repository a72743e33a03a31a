"""Models that are damaged or claim false sizes are refused before they take memory, always with the same type of
error."""

import json
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import PreTrainedModel

from tenuto.base.errors import ModelError
from tenuto.formats.gguf_file import GgufFile
from tenuto.models.checkpoint import ModelCheckpoint, open_checkpoint
from tenuto.models.decoder import Decoder
from tenuto.models.native.obstacle import obstacle
from tenuto.models.native.program import NativeProgram
from tenuto.models.store import FileFormat, ModelFiles
from tests.models.tiny import save_hf, tiny_llama
from tests.models.tiny_dense import save_dense_gguf, tiny_qwen3_moe
from tests.models.tiny_hybrids import tiny_bamba, tiny_granite, tiny_qwen3_next

LOADERS: dict[str, Callable[[ModelCheckpoint], object]] = {
    "native": lambda c: NativeProgram(c.config, c.weights(), 16),
    "torch": lambda c: Decoder(c.config, c.weights(), torch.device("cpu"), torch.float32),
}
loaders = pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
MOST_MEMORY = 8 * 2**20


def opened(path: Path) -> ModelCheckpoint:
    return open_checkpoint(ModelFiles("m", FileFormat.HUGGING_FACE if path.is_dir() else FileFormat.GGUF, path))


def refused_without_memory(loader: Callable[[ModelCheckpoint], object], path: Path) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ModelError):
            loader(opened(path))
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moe") / "m.gguf"
    return save_dense_gguf(path, tiny_qwen3_moe(num_hidden_layers=1), "qwen3moe")


@loaders
@pytest.mark.parametrize("count", [300_000, 2**31 - 1])
def test_more_experts_than_the_file_holds_are_refused_before_they_take_memory(
    moe: Path, tmp_path: Path, loader: Callable[[ModelCheckpoint], object], count: int
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(moe.read_bytes())
    reader = gguf.GGUFReader(path, "r+")
    field = reader.fields["qwen3moe.expert_count"]
    field.parts[field.data[0]][0] = count
    reader.data.flush()
    refused_without_memory(loader, path)


@loaders
@pytest.mark.parametrize(
    ("make", "key"),
    [
        (tiny_llama, "num_hidden_layers"),
        (tiny_llama, "head_dim"),
        (tiny_llama, "intermediate_size"),
        (tiny_llama, "vocab_size"),
        (tiny_granite, "num_local_experts"),
        (tiny_bamba, "mamba_d_state"),
        (tiny_qwen3_next, "linear_num_value_heads"),
    ],
)
@pytest.mark.parametrize("size", [2**24, 2**40])
def test_sizes_larger_than_the_file_are_refused_before_they_take_memory(
    tmp_path: Path,
    make: Callable[[], PreTrainedModel],
    key: str,
    size: int,
    loader: Callable[[ModelCheckpoint], object],
) -> None:
    save_hf(tmp_path, make())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: size}))
    refused_without_memory(loader, tmp_path)


@pytest.mark.parametrize("ids", [2**40, [3, -1]])
def test_end_tokens_outside_the_vocabulary_are_refused_when_loaded(tmp_path: Path, ids: object) -> None:
    save_hf(tmp_path, tiny_llama())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(ModelError, match="allowed: ids from 0 to"):
        opened(tmp_path)


def test_tensors_without_elements_are_refused(tmp_path: Path) -> None:
    save_hf(tmp_path, tiny_granite())
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header: dict[str, Any] = json.loads(content[8 : 8 + length])
    name = next(name for name in header if "input_linear" in name)
    header[name] |= {"shape": [2**31, 0, 8], "data_offsets": [0, 0]}
    changed = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(changed)) + changed + content[8 + length :])
    with pytest.raises(ModelError, match="allowed: sizes of at least 1"):
        opened(tmp_path)


def test_a_file_with_flipped_bytes_loads_or_is_refused_with_a_model_error(moe: Path, tmp_path: Path) -> None:
    whole, path, draw = moe.read_bytes(), tmp_path / "m.gguf", random.Random(1)
    head = min(tensor.span.start for tensor in GgufFile(moe).tensors.values())
    refused = 0
    for _ in range(100):
        content = bytearray(whole)
        for _ in range(draw.choice((1, 1, 2, 4))):
            at = draw.randrange(head)
            content[at] = draw.choice((0, 0xFF, 0x7F, content[at] ^ 1 << draw.randrange(8)))
        path.write_bytes(content)
        for loader in LOADERS.values():
            try:
                checkpoint = opened(path)
                if obstacle(checkpoint.config) is None:
                    loader(checkpoint)
            except ModelError:
                refused += 1
    assert refused > 100
