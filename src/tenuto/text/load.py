"""Loads a tokenizer from a GGUF file or a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

from tenuto.base.errors import ModelError
from tenuto.formats.gguf_file import GgufFile
from tenuto.text.gguf import tokenizer_from_gguf
from tenuto.text.hf_directory import tokenizer_from_directory
from tenuto.text.tokenizer import Tokenizer


def load_tokenizer(path: Path, opened: GgufFile | None = None) -> Tokenizer:
    """Loads the tokenizer of the model at `path`: a GGUF file, which may be `opened` already, or a directory with
    `tokenizer.json`. Raises `ModelError`."""
    if path.is_dir():
        return tokenizer_from_directory(path)
    if path.is_file():
        return tokenizer_from_gguf(opened or GgufFile(path))
    raise ModelError(f"there is no model at {path}; expected a .gguf file or a directory with tokenizer.json")
