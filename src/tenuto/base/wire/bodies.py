"""Values as JSON of the native HTTP API, in both directions. A field whose name differs there declares it itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, get_type_hints

import msgspec

T = TypeVar("T")


def named(name: str) -> dict[str, str]:
    """The metadata of a dataclass's field that is called `name` in JSON."""
    return {"name": name}


def body_of(value: Any) -> dict[str, Any]:
    """A dataclass as a JSON object."""
    return _renamed(value.__class__, msgspec.to_builtins(value), to_json=True)


def read_body(kind: type[T], body: Mapping[str, Any]) -> T:
    """The dataclass of a JSON object, whose other fields are ignored. Raises `msgspec.ValidationError` or
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
    """Of every field, its own name, the one in JSON, and the dataclass that it holds, if it does."""
    types = get_type_hints(kind)
    inner = {name: held if is_dataclass(held) else None for name, held in types.items()}
    return tuple((each.name, each.metadata.get("name", each.name), inner[each.name]) for each in fields(kind))
