"""Conversion of values to and from JSON of the native HTTP API. A field declares its JSON name if it differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, get_type_hints

import msgspec

T = TypeVar("T")


def named(name: str) -> dict[str, str]:
    """Returns metadata for a dataclass field whose name in JSON is `name`."""
    return {"name": name}


def body_of(value: Any) -> dict[str, Any]:
    """Converts a dataclass to a JSON object."""
    return _renamed(value.__class__, msgspec.to_builtins(value), to_json=True)


def read_body(kind: type[T], body: Mapping[str, Any]) -> T:
    """Converts a JSON object to a dataclass; unknown fields are ignored. Raises `msgspec.ValidationError` or
    `TypeError`."""
    return msgspec.convert(_renamed(kind, body, to_json=False), kind)


def _renamed(kind: Any, values: Mapping[str, Any], *, to_json: bool) -> dict[str, Any]:
    renamed: dict[str, Any] = {}
    for own, name, inner in _fields(kind):
        old, new = (own, name) if to_json else (name, own)
        if old in values:
            renamed[new] = _renamed(inner, values[old], to_json=to_json) if inner is not None else values[old]
    return renamed


@cache
def _fields(kind: Any) -> tuple[tuple[str, str, Any], ...]:
    """Returns for every field its name, its name in JSON, and the dataclass it contains or `None`."""
    types = get_type_hints(kind)
    inner = {name: held if is_dataclass(held) else None for name, held in types.items()}
    return tuple((each.name, each.metadata.get("name", each.name), inner[each.name]) for each in fields(kind))
