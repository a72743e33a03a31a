"""What functions an answer may call, or must, and the grammars that see to it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from tenuto.base.answers import CLOSE_CALL, CLOSE_THOUGHT, OPEN_CALL, OPEN_THOUGHT, Reading
from tenuto.base.checks import check_unicode, flag, items, shown
from tenuto.base.errors import InvalidRequest
from tenuto.base.grammar import WHITE_SPACE, Grammar, parsed
from tenuto.base.options import TOOL_OPTIONS
from tenuto.base.tools import MAX_TOOLS, ModelHabits, Tools

ToolChoice = Literal["auto", "none", "required"]
NAME = r"^[A-Za-z0-9_.-]{1,64}$"
"""Of a function."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions that a model is told of, each a mapping with `name`, and if it has them `description` and
    `parameters`, a JSON schema; and what its answer makes of them. With `choice` "auto" it may call them, with "none"
    nothing that it says is a call, and "required" forces a call, by a grammar: of any of them, or of the one called
    `only`. There may be several calls if they may be `parallel`."""

    functions: tuple[Mapping[str, Any], ...] = ()
    choice: ToolChoice = "auto"
    only: str = ""
    parallel: bool = True

    def __post_init__(self) -> None:
        """Raises `InvalidRequest`."""
        if len(self.functions) > MAX_TOOLS:
            raise InvalidRequest(f"there are {len(self.functions)} tools; allowed: at most {MAX_TOOLS}", param="tools")
        names = [function["name"] for function in self.functions]
        for number, name in enumerate(names):
            if name in names[:number]:
                raise InvalidRequest(
                    f"two tools are called {name!r}; allowed: every name once", param=f"tools[{number}].name"
                )
        if self.choice not in get_args(ToolChoice):
            allowed = ", ".join(get_args(ToolChoice))
            raise InvalidRequest(
                f"tool_choice is {shown(self.choice)}; allowed: {allowed}, or a function's name", param="tool_choice"
            )
        if self.choice == "required" and not self.chosen:
            raise InvalidRequest(
                "tool_choice asks for a call of a function that tools does not have; allowed: one of them",
                param="tool_choice",
            )
        _ = self.told  # raises `InvalidRequest` for what cannot be told

    @classmethod
    def of(cls, tools: object, choice: object = None, parallel: object = None) -> ToolUse:
        """From what a Python client writes. A tool is a function's definition, or an object whose `function` is one.
        `choice`: "auto", "none", "required", or an object with the `name` of the function that must be called. Raises
        `InvalidRequest`."""
        functions = tuple(_function(number, given) for number, given in enumerate(items("tools", tools, "a list")))
        parallel = parallel is None or flag("parallel_tool_calls", parallel)
        only = unwrapped(choice)
        if isinstance(only, Mapping):
            name = only.get("name")
            if set(only) != {"name"} or not isinstance(name, str):
                raise InvalidRequest(
                    f"tool_choice is {shown(choice)}; allowed: an object with a function's name", param="tool_choice"
                )
            return cls(functions, "required", name, parallel)
        chosen = "auto" if choice is None else choice
        return cls(functions, chosen, parallel=parallel)  # type: ignore[arg-type] # checked when it is made

    @classmethod
    def among(cls, options: Mapping[str, object]) -> ToolUse | None:
        """What a turn's options say, or `None` if they do not mention tools. Raises `InvalidRequest`."""
        tools, choice, parallel = (options.get(name) for name in TOOL_OPTIONS)
        if tools is not None:
            return cls.of(tools, choice, parallel)
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice without tools; allowed: with tools", param="tool_choice")
        if parallel is not None:
            flag("parallel_tool_calls", parallel)
        return None

    @property
    def chosen(self) -> tuple[Mapping[str, Any], ...]:
        """The functions that may be called."""
        if self.choice == "none":
            return ()
        return tuple(each for each in self.functions if self.only in ("", each["name"]))

    @property
    def told(self) -> Tools:
        """What the model is told of, with any `choice`, so that a conversation's later turns may have another."""
        return Tools.of(list(self.functions))

    def grammar(self, habits: ModelHabits, answer: Grammar | None) -> Grammar | None:
        """What the answer must follow: `answer`, if that is given, or calls, where they are forced or may come instead.
        Raises `InvalidRequest`."""
        functions = {each["name"]: each.get("parameters") for each in self.chosen}
        parallel = self.parallel and not self.only
        return shape_of(habits, answer, functions, forced=self.choice == "required", parallel=parallel)

    def reading(self, habits: ModelHabits, grammar: Grammar | None) -> Reading:
        """How an answer is taken apart that follows `grammar`, if there is one: where that has no room for thoughts,
        there are none."""
        thinks = habits.thinks if grammar is None or grammar.source.startswith(_START) else "no"
        return Reading(replace(habits, thinks=thinks), tuple(each["name"] for each in self.chosen))


def unwrapped(given: object) -> object:
    """A function in the form `{"type": "function", "function": {...}}`, as others write it, without that."""
    if isinstance(given, Mapping) and set(given) == {"type", "function"} and given["type"] == "function":
        return given["function"]
    return given


_FIELDS = ("name", "description", "parameters")


def _function(number: int, given: object) -> Mapping[str, Any]:
    """A function's definition. Raises `InvalidRequest`."""
    field, function = f"tools[{number}]", unwrapped(given)
    if not isinstance(function, Mapping) or not {"name"} <= set(function) <= {*_FIELDS, "strict"}:
        raise InvalidRequest(
            f"{field} is {shown(given)}; allowed: an object with name, and description and parameters", param=field
        )
    name = function["name"]
    if not isinstance(name, str) or re.fullmatch(NAME, name) is None:
        raise InvalidRequest(
            f"{field}.name is {shown(name)}; allowed: 1 to 64 letters, digits, '_', '.' and '-'", param=f"{field}.name"
        )
    description, parameters = function.get("description"), function.get("parameters")
    if description is not None:
        if not isinstance(description, str):
            raise InvalidRequest(
                f"{field}.description is {shown(description)}; allowed: text", param=f"{field}.description"
            )
        check_unicode(f"{field}.description", description)
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidRequest(
            f"{field}.parameters is {shown(parameters)}; allowed: a JSON schema", param=f"{field}.parameters"
        )
    if not isinstance(strict := function.get("strict"), bool | None):  # others write it; forced calls always are
        raise InvalidRequest(f"{field}.strict is {shown(strict)}; allowed: true or false", param=f"{field}.strict")
    return {key: function[key] for key in _FIELDS if function.get(key) is not None}


def shape_of(
    habits: ModelHabits, answer: Grammar | None, functions: Mapping[str, Any], *, forced: bool, parallel: bool
) -> Grammar | None:
    """What an answer in a chat must follow: `answer`, if that is given, or calls of these functions, which may come in
    its place, or with `forced` must. A model that thinks may do so before. Raises `InvalidRequest`."""
    if functions and (forced or answer is not None):
        return calls_grammar(habits, functions, parallel=parallel, answer=None if forced else answer)
    if answer is None or habits.thinks == "no" or answer.kind not in ("json_object", "json_schema", "choice"):
        return answer
    return Grammar("lark", "\n".join([*_thoughts(habits), f"said: {_part(answer)}"]))


_START = "start: thought"


def _thoughts(habits: ModelHabits) -> list[str]:
    """Rules of what is `said` after thoughts, as the model has them."""
    if habits.thinks == "no":
        return ["start: said"]
    rest = f'thoughts[suffix="{CLOSE_THOUGHT}"]: /(.|\\n)*/'
    if habits.thinks == "opened":
        return [f"{_START}s gap said", rest, "gap: /\\n{0,2}/"]
    return [f"{_START}? said", f'thought: "{OPEN_THOUGHT}" thoughts gap', rest, "gap: /\\n{0,2}/"]


def calls_grammar(
    habits: ModelHabits, functions: Mapping[str, Any], *, parallel: bool, answer: Grammar | None = None
) -> Grammar:
    """A call of one of these functions, by name with their parameters' schemas, or with `parallel` several; or an
    `answer` if that is given. Raises `InvalidRequest` if the answer's grammar cannot be part of another."""
    bodies = []
    for number, (name, schema) in enumerate(functions.items()):
        parameters = _of_object(name, schema) if isinstance(schema, Mapping) else {"type": "object"}
        bodies.append(f"tool_{number}: {_call(habits, name, f'args_{number}')}")
        bodies.append(f"args_{number}: {_json(parameters)}")
    one = " | ".join(f"tool_{number}" for number in range(len(functions)))
    if habits.tools == "tags":
        call = f"call: {_quoted(OPEN_CALL + chr(10))} body {_quoted(chr(10) + CLOSE_CALL)}"
        calls = 'calls: call ("\\n" call)*' if parallel else "calls: call"
        rules = [calls, call, f"body: {one}"]
    elif habits.tools == "named":
        rules = ["calls: body+" if parallel else "calls: body", f"body: {one}"]
    elif habits.opens is not None:
        more = ' (", " body)*' if parallel else ""
        rules = [f'calls: {_control(habits.opens)} " "? "[" body{more} "]" {_control(habits.closes)}', f"body: {one}"]
    elif parallel:
        rules = ['calls: body | "[" body (", " body)* "]"', f"body: {one}"]
    else:
        rules = [f"calls: {one}"]
    said = "said: calls" if answer is None else "said: calls | answer"
    if answer is not None:
        rules.append(f"answer: {_part(answer)}")
    return Grammar("lark", "\n".join([*_thoughts(habits), said, *rules, *bodies]))


def _call(habits: ModelHabits, name: str, arguments: str) -> str:
    """A call of a function, whose arguments have a rule of this name."""
    if habits.tools == "named":
        made = [_control(habits.opens), _quoted(name)]
        if habits.before_id is not None:
            made += [_control(habits.before_id), CALL_ID]
        return " ".join([*made, _control(habits.before_arguments), arguments])
    head = json.dumps({"name": name}, ensure_ascii=False)[:-1] + f', "{habits.arguments}": '
    own_id = [_quoted(', "id": "'), CALL_ID, _quoted('"')] if habits.short_ids else []
    return " ".join([_quoted(head), arguments, *own_id, _quoted("}")])


def _of_object(name: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a function's parameters, which are an object. Raises `InvalidRequest` if it does not allow one."""
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidRequest(
            f"the parameters of {name!r} are of type {shown(kind)}; allowed: a schema of an object", param="tools"
        )
    return {**schema, "type": "object"}


def _json(schema: Any) -> str:
    """JSON by a schema. Raises `InvalidRequest` unless that is an object."""
    if not isinstance(schema, Mapping):
        raise InvalidRequest("the JSON schema is not an object; allowed: an object, or true", param="grammar")
    own = schema.get("x-guidance")
    options = {"whitespace_pattern": WHITE_SPACE, **(own if isinstance(own, Mapping) else {})}
    return f"%json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}"


CALL_ID = "/[A-Za-z0-9]{9}/"
"""Of a call whose id the model writes."""


def _control(token: int | None) -> str:
    """A control token, if there is one."""
    return f"<[{token}]>" if token is not None else ""


def _part(grammar: Grammar) -> str:
    """A grammar as a part of a Lark rule."""
    if grammar.kind == "json_object":
        return _json({"type": "object"})
    if grammar.kind == "json_schema":
        schema = parsed(grammar.source)
        return _json({} if schema is True else schema)
    if grammar.kind == "choice":
        return " | ".join(map(_quoted, grammar.choices()))
    raise InvalidRequest(f"tools with a {grammar.kind}; allowed with tools: JSON, or choices", param="tools")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
