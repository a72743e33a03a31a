"""The fields by which clients of several APIs ask for a grammar."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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


of_regex = partial(Grammar, "regex")


def of_any_json(_: bool) -> Grammar:
    """An object, whatever is in it."""
    return Grammar("json_object")


def of_rules(rules: str) -> Grammar:
    """A grammar written as EBNF, or for Lark."""
    return Grammar("ebnf" if "::=" in rules else "lark", rules)


Asking = tuple[str, Callable[[Any], Grammar], Any]
"""The name of a field that may ask for a grammar, what makes one of its value, and the value; `None` asks for none."""


def only_one(*fields: Asking) -> GrammarField | None:
    """The grammar that the fields of a request ask for, if one does; several may ask for the same. Raises
    `InvalidRequest` if they ask for different ones."""
    asked: list[GrammarField] = []
    for name, make, value in fields:
        if value is None:
            continue
        try:
            asked.append(GrammarField(name, make(value)))
        except InvalidRequest as error:
            error.param = name
            raise
    if len({field.grammar for field in asked}) > 1:
        names = " and ".join(name for name, _ in asked)
        raise InvalidRequest(f"there are {names}; allowed: one of them, or the same in each", param=asked[1].name)
    return asked[0] if asked else None
