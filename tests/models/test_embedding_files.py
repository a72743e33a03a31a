"""The habits of embedding models are read from their files, and those that we cannot follow are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tenuto.base.embedding import EmbeddingHabits
from tenuto.base.errors import ModelError
from tenuto.formats.gguf_file import GgufFile
from tenuto.models.embedding_files import embedding_habits
from tenuto.models.gguf import GgufCheckpoint
from tenuto.models.hf import HfCheckpoint
from tests.models.tiny import save_gguf, save_hf, tiny_llama
from tests.models.tiny_embedding import MODULES, PROMPTS, save_embedding_model, write


def habits(directory: Path) -> EmbeddingHabits:
    return embedding_habits(directory, HfCheckpoint(directory).config, None)


def test_a_decoder_without_such_files_has_the_usual_habits(tmp_path: Path) -> None:
    directory = save_hf(tmp_path / "model", tiny_llama())
    assert habits(directory) == EmbeddingHabits(96, "last", normalized=True, shorter=(), prompts=(), default="")
    for name in ("modules.json", "config_sentence_transformers.json"):
        assert not (directory / name).exists()


def test_the_files_of_sentence_transformers_set_pooling_norm_and_prompts(tmp_path: Path) -> None:
    save_embedding_model(tmp_path / "usual", default="query")
    usual = EmbeddingHabits(48, "last", prompts=tuple(PROMPTS.items()), default="query", declared=True, only=True)
    assert habits(tmp_path / "usual") == usual
    mean = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    save_embedding_model(tmp_path / "mean", pooling=mean, modules=MODULES[:2], is_matryoshka=True)
    found = habits(tmp_path / "mean")
    assert (found.pooling, found.normalized, found.shorter, found.default) == ("mean", False, None, "")
    save_embedding_model(tmp_path / "cls", pooling={"pooling_mode": "cls"}, matryoshka_dimensions=[48, 16, 32])
    assert (habits(tmp_path / "cls").pooling, habits(tmp_path / "cls").shorter) == ("first", (16, 32))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"modules": (*MODULES, "Dense")}, "has a module Dense; supported: Transformer, Pooling and Normalize"),
        ({"pooling": {"pooling_mode_max_tokens": True}}, r"has the pooling modes \['max_tokens'\]"),
        ({"pooling": {"pooling_mode_lasttoken": True, "pooling_mode_cls_token": True}}, "pooling modes"),
        ({"pooling": {}}, "pooling modes"),
        ({"pooling": {"pooling_mode_mean_tokens": True, "include_prompt": False}}, "leaves prompts out"),
        ({"default": "other"}, "no prompt 'other'"),
        ({"is_causal": False}, "is_causal = False; supported: True"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = True; supported: False"),
        ({"matryoshka_dimensions": ["a"]}, "matryoshka_dimensions"),
    ],
)
def test_what_cannot_be_followed_is_refused(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    save_embedding_model(tmp_path / "model", **given)
    with pytest.raises(ModelError, match=said):
        habits(tmp_path / "model")


@pytest.mark.parametrize(("kind", "pooling"), [(None, "last"), (1, "mean"), (2, "first"), (3, "last"), (4, "last")])
def test_a_gguf_file_names_its_pooling(tmp_path: Path, kind: int | None, pooling: str) -> None:
    more: dict[str, Any] = {"pooling": ("llama.pooling_type", kind)} if kind is not None else {}
    file = GgufFile(save_gguf(tmp_path / "model.gguf", tiny_llama(), **more))
    found = embedding_habits(file.path, GgufCheckpoint(file).config, file)
    assert (found.width, found.pooling, found.declared) == (96, pooling, kind in (1, 2, 3))


def test_a_gguf_file_of_an_encoder_is_refused(tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "model.gguf", tiny_llama(), causal=("llama.attention.causal", False))
    with pytest.raises(ModelError, match="an encoder"):
        GgufCheckpoint(path)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    save_embedding_model(tmp_path / "model")
    for name, content in (
        ("modules.json", {"a": 1}),
        ("modules.json", [{"type": "x.Pooling", "path": "../1_Pooling"}]),
        ("config_sentence_transformers.json", {"prompts": {"query": 1}}),
    ):
        before = (tmp_path / "model" / name).read_text()
        write(tmp_path / "model", name, content)
        with pytest.raises(ModelError):
            habits(tmp_path / "model")
        (tmp_path / "model" / name).write_text(before)
    habits(tmp_path / "model")
