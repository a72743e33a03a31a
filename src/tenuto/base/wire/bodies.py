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
    return _to_json(_names(value.__class__), msgspec.to_builtins(value))


def read_body(kind: type[T], body: Mapping[str, Any]) -> T:
    """The dataclass of a JSON object, whose other fields are ignored. Raises `msgspec.ValidationError` or
    `TypeError`."""
    any_kind: Any = kind
    return msgspec.convert(_from_json(_names(any_kind), body), kind)


Names = dict[str, tuple[str, "Names | None"]]
"""The JSON names of a dataclass's fields, by their own, each with those of the dataclass it holds, if it does."""


def _to_json(names: Names, plain: Mapping[str, Any]) -> dict[str, Any]:
    return {name: plain[own] if inner is None else _to_json(inner, plain[own]) for own, (name, inner) in names.items()}


def _from_json(names: Names, body: Mapping[str, Any]) -> dict[str, Any]:
    return {
        own: body[name] if inner is None else _from_json(inner, body[name])
        for own, (name, inner) in names.items()
        if name in body
    }


@cache
def _names(kind: Any) -> Names:
    types = get_type_hints(kind)
    return {
        each.name: (
            each.metadata.get("name", each.name),
            _names(types[each.name]) if is_dataclass(types[each.name]) else None,
        )
        for each in fields(kind)
    }
