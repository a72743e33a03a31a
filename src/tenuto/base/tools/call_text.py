"""Parsers of calls as models write them, in complete or growing text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

Types = Mapping[str, Mapping[str, Sequence[str]]]
"""The JSON types of parameters, by function and parameter; parameters without types are left out."""

OPEN_FUNCTION, CLOSE_FUNCTION = "<function=", "</function>"
OPEN_PARAMETER, CLOSE_PARAMETER = "<parameter=", "</parameter>"


class Scan:
    """Finds the end of a JSON value that begins at position `start` of a growing text. It reads every character
    once."""

    def __init__(self, start: int, closes: str = "") -> None:
        """`closes`: the tag after the JSON, if there is one."""
        self.start = start
        self.first: int | None = None
        """The position of the first closing tag, if it seems to lie inside a string."""
        self._closes = closes
        self._at = self._searched = start
        self._depth = 0
        self._quoted = self._broken = False

    def end(self, text: str) -> int | None:
        """Returns the end of the object or list, or `None` if it is incomplete."""
        self._read(text, len(text))
        return self._at if self._at > self.start and not self._depth else None

    def closing(self, text: str) -> int | None:
        """Returns the position of the first closing tag outside the JSON's strings; if its quotation marks are not
        paired, that of the first closing tag. `None` while that tag has not come."""
        while (found := text.find(self._closes, self._searched)) >= 0:
            if self.first is None and text[self.start : found].lstrip()[:1] not in "{[":
                return found
            self._read(text, found, nested=False)
            if self._broken or not self._quoted:
                return self.first if self._broken and self.first is not None else found
            self.first = found if self.first is None else self.first
            self._searched = found + len(self._closes)
        self._searched = max(self._searched, len(text) - len(self._closes) + 1)
        if self.first is not None:
            self._read(text, len(text), nested=False)
        return self.first if self._broken else None

    def _read(self, text: str, until: int, *, nested: bool = True) -> None:
        """Reads the text up to `until`; with `nested`, at most to the end of the object or list."""
        for mark in _MARKS.finditer(text, self._at, max(self._at, until)):
            letter, self._at = mark[0], mark.end()
            if letter == "\\":  # the escaped character is missing
                self._at = mark.start()
                return
            if letter == '"' and self._quoted:
                after = _BEHIND_STRING.search(text, self._at)
                if after is None:  # not yet there
                    self._at = mark.start()
                    return
                self._broken = self._broken or after[0] not in ",:}]"
            if letter == '"':
                self._quoted = not self._quoted
            elif not self._quoted and letter[0] != "\\":
                self._depth += 1 if letter in "{[" else -1
                if nested and self._depth <= 0:
                    return
        self._at = max(self._at, until)


_MARKS = re.compile(r"""\\.?|["{}\[\]]""", re.DOTALL)
_BEHIND_STRING = re.compile(r"\S")


def overlap(text: str, tag: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def objects_in(text: str) -> list[Any]:
    """Returns the JSON values in a text, with lists replaced by their elements. Empty if the text contains anything
    besides JSON."""
    decoder, found, text = json.JSONDecoder(), list[Any](), text.strip()
    try:
        while text:
            one, end = decoder.raw_decode(text)
            found += one if isinstance(one, list) else [one]
            text = text[end:].lstrip(" \n\t;,")
    except (ValueError, RecursionError):
        return []
    return found


_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(
    r"<parameter=([^>\n]+)>\n?(.*?)(?:\n?</parameter>\s*(?=<parameter=|\Z)|\n?(?=\n<parameter=)|\n?\s*\Z)", re.DOTALL
)


def functions_in(text: str, types: Types) -> list[Any]:
    """Parses calls that name functions and parameters in tags. A closing tag of a parameter may be missing."""
    found = []
    for name, body in _FUNCTION.findall(text):
        known, given = types.get(name.strip(), {}), _PARAMETER.findall(body.strip("\n"))
        arguments = {key.strip(): _value(value, known.get(key.strip(), ())) for key, value in given}
        if not arguments and body.strip():
            return []
        found.append({"name": name.strip(), "arguments": arguments})
    return found


_PYTHON = {"True": True, "False": False, "None": None}


def _value(text: str, types: Sequence[str]) -> Any:
    """Parses an argument written without quotation marks: text, unless it fits another type of the schema."""
    if not types or set(types) == {"string"}:
        return text
    bare = text.strip()
    if bare in _PYTHON:
        return _PYTHON[bare]
    try:
        value = json.loads(bare)
    except (ValueError, RecursionError):
        return text
    return value if "string" not in types or type_of(value) in types else text


def type_of(value: object) -> str:
    """Returns the name of the JSON type of `value`, or an empty string for other values."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "")


def types_of(schema: Any) -> tuple[str, ...]:
    """Returns the JSON types that a schema allows; empty if it does not list any."""
    if not isinstance(schema, Mapping):
        return ()
    kind = schema.get("type")
    if isinstance(kind, str):
        return (kind,)
    if isinstance(kind, list):
        return tuple(one for one in kind if isinstance(one, str))
    if isinstance(values := schema.get("enum"), list):
        return tuple(dict.fromkeys(map(type_of, values)))
    if "const" in schema:
        return (type_of(schema["const"]),)
    branches = [one for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list) for one in schema[key]]
    return tuple(dict.fromkeys(one for branch in branches for one in types_of(branch))) or (
        ("object",) if "$ref" in schema or "properties" in schema else ()
    )
