"""Tool calls and thoughts in what models say, found as the text arrives. `tool_use` has grammars that force them."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

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
        before, opened, after = self._rest.partition(OPEN_CALL)
        if not opened and ended:
            return self._tell(said, len(self._rest))
        if not opened:
            until = len(self._rest) - _overlap(self._rest, OPEN_CALL)
            return self._tell(said, len(self._rest[:until].rstrip()))  # white space before a call is not told
        inside, closed, rest = after.partition(CLOSE_CALL)
        while closed and _in_string(inside):  # the tag is part of an argument
            more, closed, rest = rest.partition(CLOSE_CALL)
            inside += CLOSE_CALL + more
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

    def _named(self, said: Said, *, ended: bool) -> bool:
        """Calls from the beginning on, each a name, nine letters and digits or not, and arguments."""
        begun = self._rest.lstrip()
        head, brace, _ = begun.partition("{")
        if self._started or not (brace or self._begins_name(head)) or (ended and not brace):
            self._started = self._started or bool(begun)
            return self._tell(said, len(self._rest)) if begun or ended else False
        if not brace:
            return False
        name = self._name_of(head.rstrip())
        try:
            arguments, end = json.JSONDecoder().raw_decode(begun, len(head))
        except (ValueError, RecursionError):
            if name and not ended:
                return False  # the rest of them is still to come
            arguments, end = None, 0
        call = self._call({"name": name, "arguments": arguments, "id": head.rstrip()[len(name) :]})
        if call is None:
            self._started = True
            return self._tell(said, len(self._rest))
        said.calls.append(call)
        self._rest = begun[end:]
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
        return ToolCall(given["name"], json.dumps(arguments, ensure_ascii=False), self._id_of(given.get("id")))

    def _id_of(self, given: Any) -> str:
        """The id of the next call: the one that the model has written, if it writes them."""
        self._called += 1
        if isinstance(given, str) and re.fullmatch("[A-Za-z0-9]{9}", given):
            return given
        made = blake2b(f"{self._answer} {self._called}".encode(), digest_size=12).hexdigest()
        return made[:9] if self._habits.short_ids or self._habits.tools == "named" else f"call_{made}"


_BEHIND_NAME = re.compile(r"[A-Za-z0-9]{0,9}\s*")


def _in_string(text: str) -> bool:
    """Whether JSON that begins like this goes on inside a string."""
    try:
        json.JSONDecoder().raw_decode(text.lstrip())
    except RecursionError:
        return False
    except ValueError as error:
        return "Unterminated string" in str(error)
    return False


def _overlap(text: str, tag: str) -> int:
    """How many of the last letters of `text` begin `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
