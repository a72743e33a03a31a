"""A small random embedding model with the structure of Qwen3-Embedding, as sentence-transformers saves it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors
from transformers import PreTrainedModel

from tests.models.tiny_dense import tiny_qwen3
from tests.text.families import FAMILIES, write_directory

END = "<|endoftext|>"
PROMPTS = {"query": "Instruct: find what answers the question\nQuery:", "document": ""}
MODULES = ("Transformer", "Pooling", "Normalize")


def save_embedding_model(
    directory: Path,
    *,
    pooling: Mapping[str, Any] | None = None,
    modules: tuple[str, ...] = MODULES,
    default: str | None = None,
    **config: Any,
) -> PreTrainedModel:
    """Writes the model without its output matrix, under names without prefix. Returns the decoder. `pooling`: contents
    of the Pooling module's file; `config`: further keys of `config.json`."""
    write_directory(FAMILIES["Qwen"], directory)
    file = str(directory / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(file)
    backend.post_processor = processors.TemplateProcessing(
        f"$A {END}", special_tokens=[(END, backend.token_to_id(END))]
    )
    backend.save(file)
    decoder: PreTrainedModel = tiny_qwen3(vocab_size=1000, tie_word_embeddings=False).base_model
    decoder.save_pretrained(directory)
    write(directory, "config.json", json.loads((directory / "config.json").read_text()) | config)
    listed = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"), ("3_Dense", "Dense")]
    kinds = [(path, kind) for path, kind in listed if kind in modules]
    write(
        directory,
        "modules.json",
        [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(kinds)
        ],
    )
    usual = {"word_embedding_dimension": 48, "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
    write(directory, "1_Pooling/config.json", {**usual, "include_prompt": True} if pooling is None else dict(pooling))
    write(directory, "config_sentence_transformers.json", {"prompts": PROMPTS, "default_prompt_name": default})
    return decoder


def write(directory: Path, name: str, content: object) -> None:
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).write_text(json.dumps(content))
