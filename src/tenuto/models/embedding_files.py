"""The description of embeddings in a model's files: the files of sentence-transformers, or a GGUF file's metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tenuto.base.embedding import EmbeddingHabits
from tenuto.base.errors import ModelError
from tenuto.base.options import Pooling
from tenuto.formats.gguf_file import GgufFile
from tenuto.models.config import ModelConfig
from tenuto.models.settings import Settings, read_json

MODULES = "modules.json"
"""The list of a sentence-transformers model's modules, in its directory."""
_PROMPTS = "config_sentence_transformers.json"
_MODES: dict[str, Pooling] = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean", "cls_token": "first"}
_MODES |= {"cls": "first"}
_GGUF_TYPES: dict[Any, Pooling] = {1: "mean", 2: "first", 3: "last"}
"""Values of llama.cpp's key `pooling_type`."""


def embedding_habits(path: Path, config: ModelConfig, opened: GgufFile | None) -> EmbeddingHabits:
    """Returns the habits of the model in the directory `path`, or in the file `opened`. Raises `ModelError` if vectors
    would go through modules that we do not have."""
    if opened is not None:
        architecture = opened.metadata.get("general.architecture")
        kind = _GGUF_TYPES.get(opened.metadata.get(f"{architecture}.pooling_type"))
        return EmbeddingHabits(config.hidden, kind or "last", declared=kind is not None)
    settings = Settings(read_json(path / "config.json"), path / "config.json")
    sizes = tuple(settings.numbers("matryoshka_dimensions"))
    any_size = settings.get("is_matryoshka", bool, default=False) and not sizes
    shorter = None if any_size else tuple(sorted(size for size in sizes if 0 < size < config.hidden))
    if not (path / MODULES).is_file():
        return EmbeddingHabits(config.hidden, shorter=shorter, only=config.headless)
    modules = _modules(path)
    prompts, default = _prompts(path)
    pooling = _pooling(path, modules.get("Pooling"), prompted=bool(prompts))
    return EmbeddingHabits(
        config.hidden,
        pooling,
        "Normalize" in modules,
        shorter,
        tuple(prompts.items()),
        default,
        declared=True,
        only=config.headless,
    )


def _modules(path: Path) -> dict[str, str]:
    """Returns the directory of each module, by the module's kind."""
    file = path / MODULES
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))
        found = {str(each["type"]).rpartition(".")[2]: str(each["path"]) for each in listed}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{file} is not a list of modules ({error!r}); fetch the model again") from error
    if unknown := [kind for kind in found if kind not in ("Transformer", "Pooling", "Normalize")]:
        raise ModelError(f"{file} has a module {unknown[0]}; supported: Transformer, Pooling and Normalize")
    return found


def _pooling(path: Path, directory: str | None, *, prompted: bool) -> Pooling:
    """Returns the pooling that the Pooling module does; without one, the default."""
    if directory is None:
        return "last"
    if Path(directory).name != directory:
        raise ModelError(f"{path / MODULES} has a module in {directory!r}; expected: a directory beside it")
    file = path / directory / "config.json"
    values = read_json(file)
    named = values.get("pooling_mode")
    modes = named if isinstance(named, list) else [named] if named else []
    modes += [key.removeprefix("pooling_mode_") for key, on in values.items() if on is True and key != "include_prompt"]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise ModelError(f"{file} has the pooling modes {modes}; supported: one of {', '.join(_MODES)}")
    pooling = _MODES[modes[0]]
    if prompted and pooling != "last" and values.get("include_prompt") is False:
        raise ModelError(f"{file} leaves prompts out of {modes[0]}, which is not supported")
    return pooling


def _prompts(path: Path) -> tuple[dict[str, str], str]:
    """Returns the model's prompts by name, and the name of the usual one."""
    file = path / _PROMPTS
    if not file.is_file():
        return {}, ""
    settings = Settings(read_json(file), file)
    prompts = settings.get("prompts", dict, {})
    if not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"{file} has prompts that are not text")
    default = settings.optional("default_prompt_name", str) or ""
    if default and default not in prompts:
        raise ModelError(f"{file} has no prompt {default!r}, the default")
    return prompts, default
