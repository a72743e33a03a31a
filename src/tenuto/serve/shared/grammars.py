"""Grammars from the request fields of several APIs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from tenuto.base.checks import json_text, parsed_json
from tenuto.base.errors import InvalidRequest
from tenuto.base.tools.grammar import MAX_CHOICES, Grammar

Schema = dict[str, Any] | bool | str
"""A JSON schema, or its JSON text."""
Choices = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]


class GrammarField(NamedTuple):
    """A grammar, and the field that asks for it."""

    name: str
    grammar: Grammar


of_regex = partial(Grammar, "regex")


def of_any_json(_: bool) -> Grammar:
    """Returns the grammar of any JSON object."""
    return Grammar("json_object")


def of_rules(rules: str) -> Grammar:
    """Returns a grammar written as EBNF, or for Lark."""
    return Grammar("ebnf" if "::=" in rules else "lark", rules)


Asking = tuple[str, Callable[[Any], Grammar], Any]
"""The name of a field that may ask for a grammar, a function that makes the grammar from its value, and the value or
`None`."""


def only_one(*fields: Asking) -> GrammarField | None:
    """Returns the grammar that the fields of a request ask for, if any. Raises `InvalidRequest` if two fields ask for
    different ones."""
    asked: list[GrammarField] = []
    for name, make, value in fields:
        if value is None:
            continue
        try:
            asked.append(GrammarField(name, make(value)))
        except InvalidRequest as error:
            error.param = name
            raise
    if len(asked) > 1 and len({_respaced(field) for field in asked}) > 1:
        names = " and ".join(name for name, _ in asked)
        raise InvalidRequest(
            f"{names} ask for different grammars; allowed: one of them, or the same grammar", param=asked[1].name
        )
    return asked[0] if asked else None


def _respaced(field: GrammarField) -> Grammar:
    """Returns the grammar that a field asks for, with JSON text in its usual spacing. Raises `InvalidRequest`."""
    if field.grammar.kind != "json_schema":
        return field.grammar
    schema = parsed_json("the JSON schema is not JSON", field.grammar.source, field.name)
    return Grammar("json_schema", json_text("the JSON schema", schema, field.name))
