"""Tool calls and thoughts in what models say: found as the text arrives, and forced by grammars."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tenuto.base.errors import InvalidRequest
from tenuto.base.grammar import Grammar
from tenuto.base.tools import ModelHabits, ToolCall

OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
OPEN_THOUGHT, CLOSE_THOUGHT = "<think>", "</think>"


@dataclass(slots=True)
class Said:
    """A part of an answer: text for its readers, thoughts before it, and calls."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls)


class AnswerReader:
    """Takes an answer apart as it arrives. What may still turn out to be a tag, or a call, is held back until that is
    known. `names`: of the functions that may be called; without any, calls are text."""

    def __init__(self, habits: ModelHabits, names: Sequence[str] = ()) -> None:
        self._habits = habits
        self._names = frozenset(names)
        self._rest = ""  # not yet told
        self._thinking: bool | None = {"no": False, "tags": None, "opened": True}[habits.thinks]  # None: not known yet
        self._started = False  # text has been told: what follows is no call, where calls are whole answers
        self._dropped = ""  # letters that are dropped until another comes
        if self._thinking:
            self._dropped = "\n"

    def push(self, text: str) -> Said:
        """What `text` adds."""
        self._rest += text
        said = Said()
        while self._step(said, ended=False):
            pass
        return said

    def finish(self) -> Said:
        """What was held back, at the end of the answer."""
        said = Said()
        while self._step(said, ended=True):
            pass
        return said

    def _step(self, said: Said, *, ended: bool) -> bool:
        """Tell a part of the rest. False if nothing can be told now."""
        if self._dropped:
            self._rest = self._rest.lstrip(self._dropped)
            if not self._rest:
                return False
            self._dropped = ""
        if self._thinking is None:
            return self._begin(ended=ended)
        if self._thinking:
            return self._think(said, ended=ended)
        if not self._names:
            return self._tell(said, len(self._rest))
        if self._habits.tools == "tags":
            return self._tags(said, ended=ended)
        return self._json(said, ended=ended)

    def _begin(self, *, ended: bool) -> bool:
        """Find out whether the answer begins with a thought."""
        begun = self._rest.lstrip()
        if OPEN_THOUGHT.startswith(begun) and not ended and begun != OPEN_THOUGHT:
            return False
        self._thinking = begun.startswith(OPEN_THOUGHT)
        if self._thinking:
            self._rest, self._dropped = begun.removeprefix(OPEN_THOUGHT), "\n"
        return True

    def _think(self, said: Said, *, ended: bool) -> bool:
        thought, closed, after = self._rest.partition(CLOSE_THOUGHT)
        if closed:
            said.reasoning += thought.removesuffix("\n")
            self._rest, self._thinking, self._dropped = after, False, "\n"
            return True
        held = max(_overlap(self._rest, CLOSE_THOUGHT), _overlap(self._rest, "\n" + CLOSE_THOUGHT))
        until = len(self._rest) if ended else len(self._rest) - held
        said.reasoning += self._rest[:until]
        self._rest = self._rest[until:]
        return False

    def _tell(self, said: Said, until: int) -> bool:
        said.text += self._rest[:until]
        self._rest = self._rest[until:]
        return False

    def _tags(self, said: Said, *, ended: bool) -> bool:
        before, opened, after = self._rest.partition(OPEN_CALL)
        if not opened and ended:
            return self._tell(said, len(self._rest))
        if not opened:
            until = len(self._rest) - _overlap(self._rest, OPEN_CALL)
            return self._tell(said, len(self._rest[:until].rstrip()))  # white space before a call is not told
        inside, closed, rest = after.partition(CLOSE_CALL)
        if not closed and not ended:
            return self._tell(said, len(before.rstrip()))
        calls = self._calls(inside)
        said.text += before.rstrip() if calls else before + opened + inside + closed
        said.calls += calls
        self._rest, self._dropped = rest, string.whitespace if calls else ""
        return bool(closed)

    def _json(self, said: Said, *, ended: bool) -> bool:
        """An answer that is nothing but calls, after a control token that has no text or not."""
        begun = self._rest.lstrip()
        if self._started or (begun and begun[0] not in "{["):
            self._started = True
            return self._tell(said, len(self._rest))
        if not ended:
            return False
        calls = self._calls(begun)
        said.calls += calls
        if calls:
            self._rest = ""
        return self._tell(said, len(self._rest))

    def _calls(self, text: str) -> list[ToolCall]:
        """The calls that a text is, if it is nothing else: objects, one after the other or in a list."""
        decoder, found, text = json.JSONDecoder(), [], text.strip()
        try:
            while text:
                one, end = decoder.raw_decode(text)
                found += one if isinstance(one, list) else [one]
                text = text[end:].lstrip(" \n\t;,")
        except (ValueError, RecursionError):
            return []
        calls = [self._call(one) for one in found]
        return [call for call in calls if call is not None] if None not in calls else []

    def _call(self, given: Any) -> ToolCall | None:
        if not isinstance(given, Mapping) or given.get("name") not in self._names:
            return None
        arguments = given.get("arguments", given.get("parameters", {}))
        if isinstance(arguments, str):  # as JSON text, which some models write
            try:
                arguments = json.loads(arguments)
            except ValueError:
                return None
        if not isinstance(arguments, Mapping):
            return None
        return ToolCall(given["name"], json.dumps(arguments, ensure_ascii=False), f"call_{secrets.token_hex(12)}")


def _overlap(text: str, tag: str) -> int:
    """How many of the last letters of `text` begin `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def reader_of(habits: ModelHabits, names: Sequence[str], grammar: Grammar | None) -> AnswerReader:
    """A reader of answers that follow `grammar`, if there is one; where that has no room for thoughts, of none."""
    thinks = habits.thinks if grammar is None or grammar.source.startswith(_START) else "no"
    return AnswerReader(replace(habits, thinks=thinks), names)


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
        head = json.dumps({"name": name}, ensure_ascii=False)[:-1] + f', "{habits.arguments}": '
        parameters = schema if isinstance(schema, Mapping) and schema else {"type": "object"}
        bodies.append(f"tool_{number}: {_quoted(head)} args_{number} {_quoted('}')}")
        bodies.append(f"args_{number}: %json {json.dumps(parameters, ensure_ascii=False)}")
    one = " | ".join(f"tool_{number}" for number in range(len(functions)))
    if habits.tools == "tags":
        call = f"call: {_quoted(OPEN_CALL + chr(10))} body {_quoted(chr(10) + CLOSE_CALL)}"
        calls = 'calls: call ("\\n" call)*' if parallel else "calls: call"
        rules = [calls, call, f"body: {one}"]
    elif parallel:
        rules = ['calls: body | "[" body (", " body)* "]"', f"body: {one}"]
    else:
        rules = [f"calls: {one}"]
    said = "said: calls" if answer is None else "said: calls | answer"
    if answer is not None:
        rules.append(f"answer: {_part(answer)}")
    return Grammar("lark", "\n".join([*_thoughts(habits), said, *rules, *bodies]))


def _part(grammar: Grammar) -> str:
    """A grammar as a part of a Lark rule."""
    if grammar.kind == "json_object":
        return '%json {"type": "object"}'
    if grammar.kind == "json_schema":
        return f"%json {grammar.source}"
    if grammar.kind == "choice":
        return " | ".join(map(_quoted, grammar.choices()))
    raise InvalidRequest(f"tools with a {grammar.kind}; allowed with tools: JSON, or choices", param="tools")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
