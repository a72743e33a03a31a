"""Grammars that force calls, in a model's format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tenuto.base.checks import parsed_json, shown
from tenuto.base.errors import InvalidRequest
from tenuto.base.tools.answers import CLOSE_THOUGHT, OPEN_THOUGHT
from tenuto.base.tools.call_text import CLOSE_FUNCTION, CLOSE_PARAMETER, OPEN_FUNCTION, OPEN_PARAMETER, types_of
from tenuto.base.tools.channels import CHANNEL, CONSTRAIN, END, MESSAGE, START
from tenuto.base.tools.definitions import TAGS, ModelHabits
from tenuto.base.tools.grammar import NOT_JSON, Grammar, json_rule


def shape_of(
    habits: ModelHabits, answer: Grammar | None, functions: Mapping[str, Any], *, forced: bool, parallel: bool
) -> Grammar | None:
    """Returns the grammar of an answer in a chat, or `None` if it may be any text. It allows `answer`, if given, and
    calls of `functions`; with `forced` only calls. Thoughts may come first if the model has them. Raises
    `InvalidRequest`."""
    if functions and (forced or answer is not None):
        return calls_grammar(habits, functions, parallel=parallel, answer=None if forced else answer)
    plain = habits.thinks == "no" and habits.tools != "channels"
    if answer is None or plain or answer.kind not in ("json_object", "json_schema", "choice"):
        return answer
    return Grammar("lark", "\n".join([*_thoughts(habits), "said: answer", f"answer: {_answer(habits, answer)}"]))


def has_thoughts(grammar: Grammar) -> bool:
    """Whether a grammar made by this module allows thoughts."""
    return grammar.source.startswith(_START)


_START = "start: thought"


def _thoughts(habits: ModelHabits) -> list[str]:
    """Returns the first rules of a grammar: thoughts in the model's format, if it has any, then `said`, which the
    caller adds."""
    if habits.tools == "channels":
        closed = f'{_mark(habits, END)} {_mark(habits, START)} "assistant"'
        opened = f'{_mark(habits, CHANNEL)} "analysis" {_mark(habits, MESSAGE)}'
        return [f"{_START}? said", f"thought: {opened} thoughts {closed}", "thoughts: /(.|\\n)*/"]
    if habits.thinks == "no":
        return ["start: said"]
    rules = [f'thoughts[suffix="{CLOSE_THOUGHT}"]: /(.|\\n)*/', "gap: /\\n{0,2}/"]
    thoughts = "thoughts gap"
    if habits.mark(CLOSE_THOUGHT) is not None:
        rules[0], thoughts = "thoughts: /(.|\\n)*/", f"thoughts {_mark(habits, CLOSE_THOUGHT)} gap"
    if habits.thinks == "opened":
        return [f"start: {thoughts} said", *rules]
    return [f"{_START}? said", f"thought: {_tag(habits, OPEN_THOUGHT)} {thoughts}", *rules]


def calls_grammar(
    habits: ModelHabits, functions: Mapping[str, Any], *, parallel: bool, answer: Grammar | None = None
) -> Grammar:
    """Returns a grammar for a call of one of these functions, or with `parallel` several, or an `answer` if given.
    `functions`: schemas of parameters by name. Raises `InvalidRequest` if the answer's grammar cannot be embedded."""
    bodies = []
    for number, (name, schema) in enumerate(functions.items()):
        parameters = _of_object(name, schema) if isinstance(schema, Mapping) else {"type": "object"}
        bodies.append(f"tool_{number}: {_call(habits, name, f'args_{number}')}")
        bodies += _arguments(habits, name, parameters, f"args_{number}")
    one = " | ".join(f"tool_{number}" for number in range(len(functions)))
    said = "said: calls" if answer is None else "said: calls | answer"
    rules = [said, *_several(habits, parallel=parallel), f"body: {one}"]
    if answer is not None:
        rules.append(f"answer: {_answer(habits, answer)}")
    return Grammar("lark", "\n".join([*_thoughts(habits), *rules, *bodies]))


def _several(habits: ModelHabits, *, parallel: bool) -> list[str]:
    """Returns the rule `calls`: one call, or with `parallel` several. `body`, which the caller adds, is a call without
    the text around it."""
    more = ' (", " body)*' if parallel else ""
    opens, closes = TAGS.get(habits.tools, ("", ""))
    match habits.tools:
        case "tags" | "functions":
            call = f'call: {_tag(habits, opens)} "\\n" body "\\n" {_tag(habits, closes)}'
            return ['calls: call ("\\n" call)*' if parallel else "calls: call", call]
        case "list":
            return [f'calls: {_tag(habits, opens)} "[" body{more} "]" {_tag(habits, closes)}']
        case "named":
            return ["calls: body+" if parallel else "calls: body"]
        case "channels":
            return ["calls: body"]  # the next token ends the answer
        case "json" if habits.opens:
            closing = _mark(habits, "<|/tool_call|>")
            return [f'calls: {_mark(habits, habits.opens)} " "? "[" body{more} "]" {closing}']
        case "json":
            return [f'calls: body | "[" body{more} "]"' if parallel else "calls: body"]


def _call(habits: ModelHabits, name: str, arguments: str) -> str:
    """Returns the rule of a call of a function. `arguments`: the name of its arguments' rule."""
    match habits.tools:
        case "named":
            own_id = [_mark(habits, "[CALL_ID]"), CALL_ID] if habits.mark("[CALL_ID]") is not None else []
            return " ".join([_mark(habits, habits.opens), _quoted(name), *own_id, _mark(habits, "[ARGS]"), arguments])
        case "functions":
            return f"{_quoted(f'{OPEN_FUNCTION}{name}>{chr(10)}')} {arguments} {_quoted(CLOSE_FUNCTION)}"
        case "channels":
            header = _quoted(f"commentary to=functions.{name} ")
            marks = [_mark(habits, mark) for mark in (CHANNEL, CONSTRAIN, MESSAGE)]
            return f'{marks[0]} {header} {marks[1]} "json" {marks[2]} {arguments}'
        case _:
            head = json.dumps({"name": name}, ensure_ascii=False)[:-1] + f', "{habits.arguments}": '
            own_id = [_quoted(', "id": "'), CALL_ID, _quoted('"')] if habits.short_ids else []
            return " ".join([_quoted(head), arguments, *own_id, _quoted("}")])


def _arguments(habits: ModelHabits, name: str, schema: Mapping[str, Any], rule: str) -> list[str]:
    """Returns the rule of a function's arguments and the rules that it refers to."""
    if habits.tools != "functions":
        return [f"{rule}: {json_rule(schema)}"]
    if unknown := sorted(_NOT_IN_TAGS & schema.keys()):
        raise InvalidRequest(
            f"the parameters of {name!r} have {', '.join(unknown)}, which this model's calls cannot be forced to "
            "follow; allowed: an object with properties",
            param="tools",
        )
    properties, rules, parts = schema.get("properties") or {}, list[str](), list[str]()
    required = schema.get("required") or ()
    for number, (key, own) in enumerate(properties.items()):
        value, value_rules = _value(f"{rule}_{number}", own, schema)
        parameter = f"{_quoted(f'{OPEN_PARAMETER}{key}>{chr(10)}')} {value}"
        rules += [f"{rule}_{number}: {parameter}", *value_rules]
        parts.append(f"{rule}_{number}" if key in required else f"{rule}_{number}?")
    return [f"{rule}: {' '.join(parts) or _quoted('')}", *rules]


_NOT_IN_TAGS = frozenset(
    ("anyOf", "oneOf", "allOf", "not", "if", "$ref", "patternProperties", "dependentRequired", "minProperties")
)
_OF_TEXT = frozenset(("pattern", "minLength", "maxLength"))


def _value(rule: str, schema: Any, root: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Returns the rule of a parameter's value and closing tag, and the rules that it refers to. A value of type string
    is written without quotation marks."""
    closes = f"\n{CLOSE_PARAMETER}\n"
    types = types_of(schema)
    if types and "string" not in types:
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return f"{rule}_value {_quoted(closes)}", [f"{rule}_value: {json_rule({**schema, **shared})}"]
    given = schema if isinstance(schema, Mapping) else {}
    texts = given.get("enum") or ([given["const"]] if "const" in given else None)
    if texts:
        one = " | ".join(_quoted(text if isinstance(text, str) else json.dumps(text)) for text in texts)
        return f"{rule}_value {_quoted(closes)}", [f"{rule}_value: {one}"]
    if found := sorted(_OF_TEXT & given.keys()):
        raise InvalidRequest(
            f"a parameter of text has {', '.join(found)}, which this model's calls cannot be forced to follow; "
            "allowed: text of any kind, enum or const",
            param="tools",
        )
    return f"{rule}_text", [f"{rule}_text[suffix={_quoted(closes)}]: /(.|\\n)*/"]


def _answer(habits: ModelHabits, answer: Grammar) -> str:
    """Returns the rule of an answer without calls."""
    if habits.tools != "channels":
        return _part(answer)
    return f'{_mark(habits, CHANNEL)} "final" {_mark(habits, MESSAGE)} ({_part(answer)})'


def _of_object(name: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the schema of a function's parameters, narrowed to objects. Raises `InvalidRequest` if it allows no
    object."""
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidRequest(
            f"the parameters of {name!r} are of type {shown(kind)}; allowed: a schema of an object", param="tools"
        )
    return {**schema, "type": "object"}


CALL_ID = "/[A-Za-z0-9]{9}/"
"""The pattern of a call's id, if the model writes it."""


def _tag(habits: ModelHabits, text: str) -> str:
    """Returns a tag as a control token if the model has one, else as text."""
    return _mark(habits, text) or _quoted(text)


def _mark(habits: ModelHabits, text: str) -> str:
    """Returns a control token; empty if the model does not have it."""
    token = habits.mark(text)
    return f"<[{token}]>" if token is not None else ""


def _part(grammar: Grammar) -> str:
    """Returns a grammar as a part of a Lark rule. Raises `InvalidRequest` unless it is for JSON or choices."""
    if grammar.kind == "json_object":
        return json_rule({"type": "object"})
    if grammar.kind == "json_schema":
        schema = parsed_json(NOT_JSON, grammar.source, "grammar")
        return json_rule({} if schema is True else schema)
    if grammar.kind == "choice":
        return " | ".join(map(_quoted, grammar.choices()))
    raise InvalidRequest(f"tools with a {grammar.kind}; allowed with tools: JSON, or choices", param="tools")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
