"""The tokenizer of a Hugging Face model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from tenuto.base.errors import ModelError
from tenuto.text.tokenizer import Tokenizer


def tokenizer_from_directory(path: Path) -> Tokenizer:
    """Read `tokenizer.json` and, where present, `tokenizer_config.json`, `generation_config.json` and the chat template
    files. Raises `ModelError`."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{path} has no tokenizer.json")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception for every damaged file
        raise ModelError(f"{file} cannot be read: {error}") from None
    config = _read_json(path / "tokenizer_config.json")
    bos_id = _token_id(backend, config.get("bos_token"))
    probe = backend.encode("a", add_special_tokens=True).ids
    return Tokenizer(
        backend,
        bos_id=bos_id,
        eos_ids=_eos_ids(backend, config, _read_json(path / "generation_config.json")),
        adds_bos=bos_id is not None and probe[:1] == [bos_id],
        chat_template=_chat_template(path, config),
    )


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds a {type(content).__name__}; expected an object")
    return content


def _token_id(backend: tokenizers.Tokenizer, token: object) -> int | None:
    """The id of a token named in tokenizer_config.json, where it is a string or an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return None
    token_id: int | None = backend.token_to_id(text)
    return token_id


def _eos_ids(backend: tokenizers.Tokenizer, config: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    """The tokenizer's end token, then those that end generation: one id or a list."""
    stops = generation.get("eos_token_id")
    ids = [_token_id(backend, config.get("eos_token")), *(stops if isinstance(stops, list) else [stops])]
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int)))


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    """A template file takes precedence over the tokenizer's configuration; of several templates, `default` is used."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = _read_json(path / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    if template is None or isinstance(template, str):
        return template
    raise ModelError(f"the chat template in {path} is a {type(template).__name__}; expected text or a list")
