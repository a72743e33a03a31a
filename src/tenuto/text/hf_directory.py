"""Loads the tokenizer of a Hugging Face model directory."""

from __future__ import annotations

import json
from collections.abc import Collection
from operator import itemgetter
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from tenuto.base.errors import ModelError
from tenuto.text.fill import fill_tokens
from tenuto.text.tokenizer import Tokenizer


def tokenizer_from_directory(path: Path) -> Tokenizer:
    """Reads `tokenizer.json` and, where present, `tokenizer_config.json`, `generation_config.json` and the chat
    template files. Raises `ModelError`."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{path} has no tokenizer.json")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception for every damaged file
        raise ModelError(f"{file} cannot be read: {error}") from None
    config = _read_json(path / "tokenizer_config.json")
    _add_tokens(backend, config)
    bos_id = _token_id(backend, config.get("bos_token"))
    eos_ids = _eos_ids(backend, config, _read_json(path / "generation_config.json"))
    _steer(backend, {bos_id, *eos_ids})
    usual, with_tools = _chat_templates(path, config)
    return Tokenizer(
        backend,
        bos_id=bos_id,
        eos_ids=eos_ids,
        adds_bos=bos_id is not None and _adds_bos(backend, bos_id, config.get("add_bos_token")),
        end_id=_end_id(backend, config),
        fill=fill_tokens(backend.token_to_id, {}, backend.get_vocab_size()),
        chat_template=usual,
        tool_template=with_tools,
    )


def _add_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Adds the tokens that only `tokenizer_config.json` declares, as transformers does: those in
    `added_tokens_decoder`, then the named special tokens. Tokens whose id would differ from the declared one are left
    out, as the model has no embedding for them. Raises `ModelError` if `added_tokens_decoder` is malformed."""
    present = backend.get_added_tokens_decoder()
    for token_id, token in _described(config.get("added_tokens_decoder")):
        known = backend.token_to_id(token.content)
        if repr(present.get(token_id)) != repr(token) and token_id in (known, backend.get_vocab_size()):
            backend.add_tokens([token])
    for named in _named(config):
        added = {token.content for token in backend.get_added_tokens_decoder().values()}
        if _token_id(backend, named) is not None and _text(named) not in added:
            backend.add_special_tokens([AddedToken(_text(named), special=True)])


def _described(given: object) -> list[tuple[int, AddedToken]]:
    """Returns the tokens of `added_tokens_decoder` with their ids, sorted by id. Raises `ModelError`."""
    try:
        found = [
            (int(key), AddedToken(**{name: fields[name] for name in _FIELDS if name in fields}))
            for key, fields in (given.items() if isinstance(given, dict) else ())
        ]
    except (TypeError, ValueError) as error:
        raise ModelError(f"added_tokens_decoder in tokenizer_config.json does not describe tokens: {error}") from None
    return sorted(found, key=itemgetter(0))


_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _named(config: dict[str, Any]) -> list[object]:
    """Returns the special tokens that a configuration names, each as a text or an object."""
    named = [config.get(role) for role in _ROLES]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = config.get(key) or []
        named += more.values() if isinstance(more, dict) else more
    return [token for token in named if _text(token)]


def _steer(backend: tokenizers.Tokenizer, ids: Collection[int | None]) -> None:
    """Makes the added tokens in `ids` special, so that users' text never encodes to a token that ends a turn."""
    for i, token in backend.get_added_tokens_decoder().items():
        if i in ids and not token.special:
            token.special = True
            backend.add_special_tokens([token])


def _adds_bos(backend: tokenizers.Tokenizer, bos_id: int, configured: object) -> bool:
    """Whether prompts begin with `bos_id`: as `configured` or, if that is not a bool, as the post-processor does."""
    if isinstance(configured, bool):
        return configured
    first: list[int] = backend.encode("a", add_special_tokens=True).ids[:1]
    return first == [bos_id]


def _end_id(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> int | None:
    """Returns the token that the post-processor puts behind a text, or, with `add_eos_token`, the end token."""
    plain: list[int] = backend.encode("a", add_special_tokens=False).ids
    whole: list[int] = backend.encode("a", add_special_tokens=True).ids
    if len(whole) > len(plain) and whole[-len(plain) :] != plain:
        return whole[-1]
    return _token_id(backend, config.get("eos_token")) if config.get("add_eos_token") is True else None


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
    """Returns the id of a token named in tokenizer_config.json, as a string or as an object with `content`."""
    token_id: int | None = backend.token_to_id(_text(token)) if _text(token) else None
    return token_id


def _text(token: object) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _eos_ids(backend: tokenizers.Tokenizer, config: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    """Returns the ids of the tokenizer's end token and of the tokens (one id or a list) that end generation."""
    stops = generation.get("eos_token_id")
    ids = [_token_id(backend, config.get("eos_token")), *(stops if isinstance(stops, list) else [stops])]
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int)))


def _chat_templates(path: Path, config: dict[str, Any]) -> tuple[str | None, str | None]:
    """Returns the usual chat template and the one for conversations with tools; either may be missing. Files take
    precedence over the tokenizer's configuration. Of several named templates, `default` is the usual one and `tool_use`
    serves conversations with tools, as in transformers."""
    file, beside = path / "chat_template.jinja", path / "additional_chat_templates" / "tool_use.jinja"
    if file.is_file():
        with_tools = beside.read_text(encoding="utf-8") if beside.is_file() else None
        return file.read_text(encoding="utf-8"), with_tools
    template = _read_json(path / "chat_template.json").get("chat_template", config.get("chat_template"))
    if template is None or isinstance(template, str):
        return template, None
    if not isinstance(template, list) or not all(isinstance(entry, dict) for entry in template):
        raise ModelError(
            f"the chat template in {path} is a {type(template).__name__}; expected text or a list of objects"
        )
    named = {entry.get("name"): entry.get("template") for entry in template}
    usual, with_tools = named.get("default"), named.get("tool_use")
    if wrong := [one for one in (usual, with_tools) if not isinstance(one, str | None)]:
        raise ModelError(f"a chat template in {path} is a {type(wrong[0]).__name__}; expected text")
    return usual if usual is not None else with_tools, with_tools
