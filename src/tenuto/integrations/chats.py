"""Chats in the form of OpenAI's API, which frameworks produce, as input of turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tenuto.base.errors import InvalidRequest

_FIELDS = ("tool_calls", "tool_call_id", "name")


def native_message(given: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a message. Developers' messages become the system's. Raises `InvalidRequest` for content other than
    text."""
    role, content = given["role"], given.get("content") or ""
    if not isinstance(content, str):
        content = "".join(map(_text_of, content))
    rest = {name: given[name] for name in _FIELDS if given.get(name)}
    return {"role": "system" if role == "developer" else role, "content": content, **rest}


def _text_of(part: str | Mapping[str, Any]) -> str:
    if isinstance(part, str):
        return part
    if part.get("type") != "text":
        raise InvalidRequest(f"a message has a part of type {part.get('type')!r}; allowed: text")
    return str(part["text"])
