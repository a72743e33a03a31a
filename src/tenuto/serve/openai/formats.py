"""What an answer must be: OpenAI's response formats, and the fields of vLLM and SGLang for the same."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from tenuto.base.errors import InvalidRequest
from tenuto.base.tools.grammar import Grammar
from tenuto.serve.shared.grammars import Choices, GrammarField, Schema, of_rules, of_schema, only_one
from tenuto.serve.shared.objects import NOTHING, ForeignObject


class JsonSchema(ForeignObject):
    """A named JSON schema. It is always enforced, whether `strict` or not."""

    ignored = frozenset({"description", "strict"})

    name: str = Field("", max_length=256)
    schema_: Schema | None = Field(None, alias="schema")


class ResponseFormat(ForeignObject):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def asked(self) -> GrammarField | None:
        """The grammar. Raises `InvalidRequest` if it has a schema without saying so, or none."""
        if (self.json_schema is not None) != (self.type == "json_schema"):
            problem = "is missing" if self.json_schema is None else f"is given, and the type is {self.type}"
            raise InvalidRequest(
                f"response_format.json_schema {problem}; allowed: with type json_schema", param="response_format"
            )
        if self.type == "json_object":
            return GrammarField("response_format", Grammar("json_object"))
        if self.json_schema is None:
            return None
        name, schema = "response_format.json_schema.schema", self.json_schema.schema_
        return GrammarField(name, of_schema(name, True if schema is None else schema))


class StructuredOutputs(ForeignObject):
    """vLLM's way to ask for a grammar."""

    ignored = frozenset({"disable_any_whitespace", "disable_fallback"})
    not_supported = dict.fromkeys(("structural_tag", "whitespace_pattern", "disable_additional_properties"), NOTHING)

    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


class Structured(ForeignObject):
    """The fields of a request that ask for a grammar; at most one may."""

    response_format: ResponseFormat | None = Field(None, description="Text, or JSON; `json_schema` is always enforced.")
    structured_outputs: StructuredOutputs | None = Field(None, description="vLLM's: one kind of grammar.")
    guided_json: Schema | None = Field(None, description="The same as a field: a JSON schema.")
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = Field(None, description="EBNF, or a grammar for Lark.")
    regex: str | None = Field(None, description="SGLang's name for the same.")
    ebnf: str | None = Field(None, description="SGLang's name for the same.")

    def grammar_field(self) -> GrammarField | None:
        """What is asked for, and by which field. Raises `InvalidRequest`."""
        given: dict[str, Grammar | None] = {}
        if self.response_format is not None and (asked := self.response_format.asked()) is not None:
            given[asked.name] = asked.grammar
        if (structured := self.structured_outputs) is not None:
            own = (structured.json_, structured.regex, structured.choice, structured.grammar)
            names = [f"structured_outputs.{name}" for name in ("json", "regex", "choice", "grammar")]
            given |= _grammars(dict(zip(names, own, strict=True)))
            given["structured_outputs.json_object"] = Grammar("json_object") if structured.json_object else None
        fields = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf")
        given |= _grammars({name: getattr(self, name) for name in fields})
        return only_one(given)


def _grammars(fields: dict[str, Any]) -> dict[str, Grammar | None]:
    """The grammars that fields ask for; the last part of a field's name says of which kind."""
    found: dict[str, Grammar | None] = {}
    for name, value in fields.items():
        kind = name.rpartition(".")[2].removeprefix("guided_")
        if value is None:
            continue
        if kind == "json":
            found[name] = of_schema(name, value)
        elif kind == "choice":
            found[name] = Grammar.of_choice(value)
        else:
            found[name] = Grammar("regex", value) if kind == "regex" else of_rules(value)
    return found
