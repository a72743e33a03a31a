"""Formats of answers: OpenAI's response formats, and the fields of vLLM and SGLang for the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field

from tenuto.base.errors import InvalidRequest
from tenuto.base.tools.grammar import Grammar
from tenuto.serve.shared.grammars import (
    Asking,
    Choices,
    GrammarField,
    Schema,
    of_any_json,
    of_regex,
    of_rules,
    only_one,
)
from tenuto.serve.shared.objects import NOTHING, ForeignObject
from tenuto.serve.shared.turn_request import TurnRequest


class JsonSchema(ForeignObject):
    """A named JSON schema. It is always enforced, also without `strict`."""

    ignored = frozenset({"description", "strict"})

    name: str = Field("", max_length=256)
    schema_: Schema | None = Field(None, alias="schema")


class ResponseFormat(ForeignObject):
    """The format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Schema | None = Field(None, alias="schema", description="llama.cpp's field: a schema for `json_object`.")

    def asking(self) -> tuple[Asking, ...]:
        """Returns the fields that may ask for a grammar. Raises `InvalidRequest` if `json_schema` does not agree with
        the type."""
        if (self.json_schema is not None) != (self.type == "json_schema"):
            problem = "is missing" if self.json_schema is None else f"is given with type {self.type}"
            raise InvalidRequest(
                f"response_format.json_schema {problem}; it belongs to type json_schema", param="response_format"
            )
        schema = self.json_schema.schema_ if self.json_schema is not None else None
        if self.json_schema is not None and schema is None:
            schema = True
        any_json = True if self.type == "json_object" and self.schema_ is None else None
        if self.schema_ is not None and self.type != "json_object":
            raise InvalidRequest(
                f"response_format.schema is given with type {self.type}; it belongs to type json_object",
                param="response_format.schema",
            )
        return (
            ("response_format", of_any_json, any_json),
            ("response_format.json_schema.schema", Grammar.of_schema, schema),
            ("response_format.schema", Grammar.of_schema, self.schema_),
        )


KINDS: dict[str, Callable[[Any], Grammar]] = {
    "json": Grammar.of_schema,
    "regex": of_regex,
    "choice": Grammar.of_choice,
    "grammar": of_rules,
}
"""vLLM's kinds of grammars."""


FIELDS: dict[str, Callable[[Any], Grammar]] = {
    "regex": of_regex,
    "ebnf": of_rules,
    "grammar": of_rules,
    "json_schema": Grammar.of_schema,
}
"""SGLang's and llama.cpp's fields for grammars."""


class StructuredOutputs(ForeignObject):
    """vLLM's field for grammars."""

    ignored = frozenset({"disable_any_whitespace", "disable_fallback"})
    not_supported = dict.fromkeys(("structural_tag", "whitespace_pattern", "disable_additional_properties"), NOTHING)

    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


class Structured(ForeignObject, TurnRequest):
    """The fields of a request that ask for a grammar; at most one may."""

    response_format: ResponseFormat | None = Field(None, description="Text, or JSON; `json_schema` is always enforced.")
    structured_outputs: StructuredOutputs | None = Field(None, description="vLLM's field: one kind of grammar.")
    guided_json: Schema | None = Field(None, description="vLLM's older field for a JSON schema.")
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = Field(None, description="A grammar as EBNF or for Lark.")
    regex: str | None = Field(None, description="SGLang's field for a regular expression.")
    ebnf: str | None = Field(None, description="SGLang's field for a grammar as EBNF.")
    grammar: str | None = Field(None, description="llama.cpp's field for a grammar as EBNF.")
    json_schema: Schema | None = Field(None, description="llama.cpp's field for a JSON schema.")

    def grammar_field(self) -> GrammarField | None:
        fields: list[Asking] = [
            *((f"guided_{kind}", make, getattr(self, f"guided_{kind}")) for kind, make in KINDS.items()),
            *((name, make, getattr(self, name)) for name, make in FIELDS.items()),
        ]
        if (outputs := self.structured_outputs) is not None:
            given = outputs.model_dump(by_alias=True)
            fields += [(f"structured_outputs.{kind}", make, given[kind]) for kind, make in KINDS.items()]
            fields += [("structured_outputs.json_object", of_any_json, outputs.json_object or None)]
        return only_one(*(self.response_format.asking() if self.response_format is not None else ()), *fields)
