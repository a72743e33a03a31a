"""The fields by which clients of several interfaces ask for a grammar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from tenuto.base.errors import InvalidRequest
from tenuto.base.tools.grammar import MAX_CHOICES, Grammar

Schema = dict[str, Any] | bool | str
"""A JSON schema, or its JSON text."""
Choices = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]


class GrammarField(NamedTuple):
    """A grammar, and the field that asks for it."""

    name: str
    grammar: Grammar


def of_rules(rules: str) -> Grammar:
    """A grammar written as EBNF, or for Lark."""
    return Grammar("ebnf" if "::=" in rules else "lark", rules)


def of_schema(name: str, schema: object) -> Grammar:
    """JSON by the schema in the field `name`. Raises `InvalidRequest`."""
    try:
        return Grammar.of_schema(schema)
    except InvalidRequest as error:
        error.param = name
        raise


def only_one(given: Mapping[str, Grammar | None]) -> GrammarField | None:
    """The grammar that the request's fields, by name, ask for, if one does; several may ask for the same. Raises
    `InvalidRequest` if they ask for different ones."""
    asked = [GrammarField(name, grammar) for name, grammar in given.items() if grammar is not None]
    if len({field.grammar for field in asked}) > 1:
        names = " and ".join(name for name, _ in asked)
        raise InvalidRequest(f"there are {names}; allowed: one of them, or the same in each", param=asked[1].name)
    return asked[0] if asked else None
