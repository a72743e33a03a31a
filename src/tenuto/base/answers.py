"""Tool calls and thoughts in what models say, found as the text arrives. `tool_use` has grammars that force them."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from tenuto.base.errors import InvalidRequest
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

    def add(self, other: Said) -> None:
        """What was said next."""
        self.text += other.text
        self.reasoning += other.reasoning
        self.calls += other.calls

    def message(self) -> dict[str, Any]:
        """As the assistant's message of a conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": None if self.calls and not self.text else self.text}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "name": call.name, "arguments": call.arguments} for call in self.calls
            ]
        return message


@dataclass(frozen=True, slots=True)
class Reading:
    """How an answer is to be taken apart: how its model writes, and the `names` of the functions that it may call."""

    habits: ModelHabits
    names: tuple[str, ...]

    def reader(self, answer: str = "") -> AnswerReader:
        """`answer`: what tells this one from others; the ids of its calls follow from that, whoever reads it."""
        return AnswerReader(self.habits, self.names, answer)


class AnswerReader:
    """Takes an answer apart as it arrives. What may still turn out to be a tag, or a call, is held back until that is
    known. `names`: of the functions that may be called; without any, calls are text. The ids of calls follow from
    `answer`, or are random."""

    def __init__(self, habits: ModelHabits, names: Iterable[str] = (), answer: str = "") -> None:
        self._habits = habits
        self._names = frozenset(names)
        self._answer = answer or secrets.token_hex(12)
        self._called = 0
        self._rest = ""  # not yet told
        self._thinking: bool | None = {"no": False, "tags": None, "opened": True}[habits.thinks]  # None: not known yet
        self._started = False  # text has been told: what follows is no call, where calls are whole answers
        self._dropped = ""  # letters that are dropped until another comes
        self._scan: _Scan | None = None  # of the call that the rest begins with
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
        read = {"tags": self._tags, "named": self._named, "json": self._json}[self._habits.tools]
        return read(said, ended=ended)

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
        if self._scan is None:
            before, opened, _ = self._rest.partition(OPEN_CALL)
            if not opened and ended:
                return self._tell(said, len(self._rest))
            if not opened:
                until = len(self._rest) - _overlap(self._rest, OPEN_CALL)
                return self._tell(said, len(self._rest[:until].rstrip()))  # white space before a call is not told
            self._tell(said, len(before.rstrip()))
            self._scan = _Scan(self._rest.index(OPEN_CALL) + len(OPEN_CALL))
        scan = self._scan
        closed, calls = scan.closing(self._rest), list[ToolCall]()
        if closed is None and not ended:
            return False
        if closed is None or closed != scan.first:
            calls = self._calls(self._rest[scan.start : closed])
        if not calls and scan.first is not None:
            closed = scan.first  # the tags in its strings were none: a quotation mark is missing
            calls = self._calls(self._rest[scan.start : closed])
        self._scan = None
        end = len(self._rest) if closed is None else closed + len(CLOSE_CALL)
        said.text += "" if calls else self._rest[:end]
        said.calls += calls
        self._rest, self._dropped = self._rest[end:], string.whitespace if calls else ""
        return closed is not None

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

    def _named(self, said: Said, *, ended: bool) -> bool:
        """Calls from the beginning on, each a name, nine letters and digits or not, and arguments."""
        if self._scan is None:
            begun = self._rest.lstrip()
            head, brace, _ = begun.partition("{")
            if self._started or not (brace or self._begins_name(head)) or (ended and not brace):
                self._started = self._started or bool(begun)
                return self._tell(said, len(self._rest)) if begun or ended else False
            if not brace:
                return False
            self._scan = _Scan(self._rest.index("{"))
        start = self._scan.start
        head = self._rest[:start].strip()
        name, call = self._name_of(head), None
        end = self._scan.end(self._rest) if name else None
        if name and end is None and not ended:
            return False  # the rest of the arguments is still to come
        self._scan = None
        if end is not None:
            with suppress(ValueError, RecursionError):
                arguments = json.loads(self._rest[start:end])
                call = self._call({"name": name, "arguments": arguments, "id": head[len(name) :]})
        if call is None:
            self._started = True
            return self._tell(said, len(self._rest))
        said.calls.append(call)
        self._rest = self._rest[end:]
        return bool(self._rest)

    def _begins_name(self, head: str) -> bool:
        """Whether a name of a function, and what may stand behind it, may begin like this."""
        behind = [head.removeprefix(name) for name in self._names if head.startswith(name)]
        return any(name.startswith(head) for name in self._names) or any(map(_BEHIND_NAME.fullmatch, behind))

    def _name_of(self, head: str) -> str:
        """The function's name in what stands before arguments; empty if it has none."""
        found = [name for name in self._names if head == name or re.fullmatch(re.escape(name) + "[A-Za-z0-9]{9}", head)]
        return max(found, key=len, default="")

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
        called, calls = self._called, [self._call(one) for one in found]
        if None in calls:
            self._called = called
        return [call for call in calls if call is not None] if None not in calls else []

    def _call(self, given: Any) -> ToolCall | None:
        if not isinstance(given, Mapping) or given.get("name") not in self._names:
            return None
        arguments = given.get("arguments", given.get("parameters", {}))
        if isinstance(arguments, str):  # as JSON text, which some models write
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                return None
        if not isinstance(arguments, Mapping):
            return None
        try:
            text = json.dumps(arguments, ensure_ascii=False)
            return ToolCall(given["name"], text, self._id_of(given.get("id")))
        except (InvalidRequest, RecursionError):
            return None  # nested too deeply, or not Unicode: no conversation could have it

    def _id_of(self, given: Any) -> str:
        """The id of the next call: the one that the model has written, if it writes them."""
        self._called += 1
        if isinstance(given, str) and re.fullmatch("[A-Za-z0-9]{9}", given):
            return given
        made = blake2b(f"{self._answer} {self._called}".encode(), digest_size=12).hexdigest()
        return made[:9] if self._habits.short_ids or self._habits.tools == "named" else f"call_{made}"


_BEHIND_NAME = re.compile(r"[A-Za-z0-9]{0,9}\s*")


class _Scan:
    """Looks for the end of JSON that begins at `start` of a text, as the text grows: every letter is looked at once."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.first: int | None = None
        """Where the first closing tag is, if a string seems to go on there."""
        self._at = self._searched = start
        self._depth = 0
        self._quoted = self._broken = False

    def end(self, text: str) -> int | None:
        """Where the object or list ends, if it does already."""
        self._read(text, len(text))
        return self._at if self._at > self.start and not self._depth else None

    def closing(self, text: str) -> int | None:
        """Where the first closing tag is that is not in a string; where the quotation marks make no sense, the first
        of all."""
        while (found := text.find(CLOSE_CALL, self._searched)) >= 0:
            if self.first is None and text[self.start : found].lstrip()[:1] not in "{[":
                return found
            self._read(text, found, nested=False)
            if self._broken or not self._quoted:
                return self.first if self._broken and self.first is not None else found
            self.first = found if self.first is None else self.first
            self._searched = found + len(CLOSE_CALL)
        self._searched = max(self._searched, len(text) - len(CLOSE_CALL) + 1)
        if self.first is not None:
            self._read(text, len(text), nested=False)
        return self.first if self._broken else None

    def _read(self, text: str, until: int, *, nested: bool = True) -> None:
        """Look at the text up to `until`, if `nested` at most to the end of the object or list."""
        for mark in _MARKS.finditer(text, self._at, max(self._at, until)):
            letter, self._at = mark[0], mark.end()
            if letter == "\\":  # what it escapes is still to come
                self._at = mark.start()
                return
            if letter == '"' and self._quoted:
                after = _BEHIND_STRING.search(text, self._at)
                if after is None:  # it is still to come
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


def _overlap(text: str, tag: str) -> int:
    """How many of the last letters of `text` begin `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
