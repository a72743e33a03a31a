"""Grammars that a turn's output must follow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from tenuto.base.checks import check_unicode, json_text, parsed_json, shown, wrong
from tenuto.base.errors import InvalidRequest

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "ebnf", "lark"]
KINDS: tuple[GrammarKind, ...] = get_args(GrammarKind)
MAX_GRAMMAR = 2**18
"""Maximum length of a grammar's source, in characters."""
MAX_CHOICES = 4096
NOT_JSON = "the grammar is not JSON"
WHITE_SPACE = r"(\x20|\x0A\x20{0,32})?"
"""The white space allowed in JSON: one blank, or a new line and its indentation. Small models tend to repeat unbounded
white space forever."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form of an output: JSON by a schema, any JSON object, text that matches a regular expression as a whole, one
    of several strings, or a sentence of a context-free grammar. Grammars are written as EBNF (rules `name ::= ...`, the
    first called `root`) or for Lark (rules `name: ...`, the first called `start`).

    `source`: the schema as JSON text, the expression, the choices as a JSON list, or the rules; empty for
    `json_object`.
    """

    kind: GrammarKind
    source: str = ""

    def __post_init__(self) -> None:
        """Raises `InvalidRequest` for a wrong kind or size. Errors in the source are found when it is compiled."""
        if self.kind not in KINDS:
            raise InvalidRequest(f"grammar is of kind {shown(self.kind)}; allowed: {', '.join(KINDS)}", param="grammar")
        if not isinstance(self.source, str):
            raise InvalidRequest(f"grammar has the source {shown(self.source)}; allowed: text", param="grammar")
        if len(self.source) > MAX_GRAMMAR:
            raise InvalidRequest(
                f"grammar has {len(self.source)} characters; allowed: at most {MAX_GRAMMAR}", param="grammar"
            )
        check_unicode("grammar", self.source)
        if not self.source and self.kind != "json_object":
            raise InvalidRequest(f"grammar is an empty {self.kind}; allowed: something to follow", param="grammar")

    @classmethod
    def of(cls, given: object) -> Self:
        """Reads a client's object with one field, named as the kind. Its value is a schema (an object, a boolean or
        JSON text), `true` for `json_object`, a list of strings for `choice`, and text for all others. Raises
        `InvalidRequest`."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping) or len(given) != 1 or next(iter(given)) not in KINDS:
            raise wrong("grammar", given, f"an object with one of {', '.join(KINDS)}")
        ((kind, value),) = given.items()
        if kind == "json_schema":
            return cls.of_schema(value)
        if kind == "choice":
            return cls.of_choice(value)
        if kind == "json_object":
            if value is not True:
                raise wrong("grammar.json_object", value, "true", param="grammar")
            return cls(kind)
        return cls(kind, value)

    @classmethod
    def of_schema(cls, schema: object) -> Self:
        """Returns a grammar for JSON by a schema: an object, a boolean, or JSON text of either. Raises
        `InvalidRequest`."""
        if isinstance(schema, Mapping | bool):
            return cls("json_schema", json_text("the JSON schema", schema, "grammar"))
        if isinstance(schema, str):
            return cls("json_schema", schema)
        raise wrong("the JSON schema", schema, "an object or JSON text", param="grammar")

    @classmethod
    def of_choice(cls, choices: object) -> Self:
        """Returns a grammar for one of several strings. Raises `InvalidRequest`."""
        if not isinstance(choices, Sequence) or isinstance(choices, str | bytes):
            raise wrong("choice", choices, "a list of strings", param="grammar")
        strings = tuple(choices)
        if not 1 <= len(strings) <= MAX_CHOICES:
            raise InvalidRequest(f"there are {len(strings)} choices; allowed: 1 to {MAX_CHOICES}", param="grammar")
        for string in strings:
            if not isinstance(string, str) or not string:
                raise wrong("a choice", string, "text, not empty", param="grammar")
        return cls("choice", json.dumps(strings, ensure_ascii=False))

    def choices(self) -> list[str]:
        """Returns the strings of a `choice`. Raises `InvalidRequest` if its source is not a list of strings."""
        strings: list[str] = parsed_json(NOT_JSON, self.source, "grammar")
        self.of_choice(strings)
        return strings

    def given(self) -> dict[str, Any]:
        """Returns the object that a client writes; the inverse of `of`."""
        if self.kind == "json_object":
            return {self.kind: True}
        return {self.kind: self.choices() if self.kind == "choice" else self.source}


def json_rule(schema: object) -> str:
    """Returns a Lark rule for JSON by a schema. Raises `InvalidRequest` unless the schema is an object."""
    if not isinstance(schema, Mapping):
        raise InvalidRequest("the JSON schema is not an object; allowed: an object, or true", param="grammar")
    own = schema.get("x-guidance")
    options = {"whitespace_pattern": WHITE_SPACE, **(own if isinstance(own, Mapping) else {})}
    return f"%json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}"
