"""An incremental parser of answers into text, thoughts and tool calls. `tool_use` has grammars that force calls."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

from tenuto.base.errors import InvalidRequest
from tenuto.base.tools.answer_part import AnswerPart
from tenuto.base.tools.call_text import CLOSE_FUNCTION, OPEN_FUNCTION, Scan, Types, functions_in, objects_in, overlap
from tenuto.base.tools.channels import Header, content_end, header_of
from tenuto.base.tools.definitions import TAGS, THOUGHTS, ModelHabits, ToolCall

OPEN_THOUGHT, CLOSE_THOUGHT = THOUGHTS


@dataclass(frozen=True, slots=True)
class Reading:
    """The settings for parsing an answer: the format of its model, the `names` of the functions that it may call, and
    the `types` of their parameters, needed if the model writes arguments without quotation marks. `forced`: a grammar
    allows nothing but calls."""

    habits: ModelHabits
    names: tuple[str, ...]
    types: Types = field(default_factory=dict)
    forced: bool = False

    def reader(self, answer: str = "") -> AnswerReader:
        """Returns a parser. `answer`: an id of the answer; parsers with the same one give its calls the same ids."""
        return AnswerReader(self.habits, self.names, answer, self.types, forced=self.forced)

    def thought_tokens(self, pieces: Iterable[tuple[str, int]]) -> int:
        """Returns the number of tokens in thoughts. `pieces`: those of an answer, each its text and the number of its
        tokens. A piece that ends a thought counts as a whole."""
        if self.habits.thinks == "no" and self.habits.tools != "channels":
            return 0
        reader = self.reader("")
        return sum(tokens for text, tokens in pieces if reader.push(text).reasoning or reader.thinking)


class AnswerReader:
    """Parses an answer as it arrives. Text that may still become a tag or a call is held back. `names`: the functions
    that may be called; without any, calls are text. `types`, `forced`: as in `Reading`. The ids of calls are derived
    from `answer`, or random without one."""

    def __init__(
        self,
        habits: ModelHabits,
        names: Iterable[str] = (),
        answer: str = "",
        types: Types = MappingProxyType({}),
        *,
        forced: bool = False,
    ) -> None:
        self._habits = habits
        self._names = frozenset(names)
        self._types = types
        self._forced = forced
        self._answer = answer or secrets.token_hex(12)
        self._called = 0
        self._rest = ""  # not yet passed on
        self._thinking: bool | None = {"no": False, "tags": None, "opened": True}[habits.thinks]  # None: not yet known
        self._started = False  # text has been passed on: no call can follow, where calls are whole answers
        self._dropped = ""  # characters that are dropped until another one comes
        self._scan: Scan | None = None  # of the call that the rest begins with
        self._opens, self._closes = TAGS.get(habits.tools, ("", ""))
        self._mark = ""  # the control token before the rest and its blanks; passed on unless a call follows
        self._header: Header | None = None  # of the message that the rest belongs to
        self._searched: int | None = None  # the rest begins with a call whose end was searched up to here
        self._read = {
            "tags": self._tags,
            "list": self._tags,
            "functions": self._functions,
            "channels": self._channels,
        }.get(habits.tools, self._after_mark)
        if self._thinking:
            self._dropped = "\n"

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends within a thought."""
        return bool(self._thinking)

    def push(self, text: str) -> AnswerPart:
        """Returns the part that `text` completes."""
        self._rest += text
        return self._parse(ended=False)

    def finish(self) -> AnswerPart:
        """Returns the text held back, at the end of the answer."""
        return self._parse(ended=True)

    def read(self, text: str, *, ended: bool) -> AnswerPart:
        """Returns the part that `text` completes and, if the answer has `ended`, the text held back."""
        said = self.push(text)
        if ended:
            said.add(self.finish())
        return said

    def _parse(self, *, ended: bool) -> AnswerPart:
        said = AnswerPart()
        while self._step(said, ended=ended):
            pass
        return said

    def _step(self, said: AnswerPart, *, ended: bool) -> bool:
        """Passes on some of the text that is not passed on yet. Returns False if no more can be until further text
        comes."""
        if self._dropped:
            self._rest = self._rest.lstrip(self._dropped)
            if not self._rest:
                return False
            self._dropped = ""
        if self._thinking is None:
            return self._begin(ended=ended)
        if self._thinking:
            return self._think(said, ended=ended)
        if not self._names and self._habits.tools != "channels":
            return self._tell(said, len(self._rest))
        return self._read(said, ended=ended)

    def _begin(self, *, ended: bool) -> bool:
        """Determines whether the answer begins with a thought."""
        begun = self._rest.lstrip()
        if OPEN_THOUGHT.startswith(begun) and not ended and begun != OPEN_THOUGHT:
            return False
        self._thinking = begun.startswith(OPEN_THOUGHT)
        if self._thinking:
            self._rest, self._dropped = begun.removeprefix(OPEN_THOUGHT), "\n"
        return True

    def _think(self, said: AnswerPart, *, ended: bool) -> bool:
        thought, closed, after = self._rest.partition(CLOSE_THOUGHT)
        if closed:
            said.reasoning += thought.removesuffix("\n")
            self._rest, self._thinking, self._dropped = after, False, "\n"
            return True
        held = max(overlap(self._rest, CLOSE_THOUGHT), overlap(self._rest, "\n" + CLOSE_THOUGHT))
        until = len(self._rest) if ended else len(self._rest) - held
        said.reasoning += self._rest[:until]
        self._rest = self._rest[until:]
        return False

    def _tell(self, said: AnswerPart, until: int) -> bool:
        """Passes on `until` characters as text. Returns False, as `_step` does."""
        if until:
            said.text += self._mark
            self._mark = ""
        said.text += self._rest[:until]
        self._rest = self._rest[until:]
        return False

    def _tags(self, said: AnswerPart, *, ended: bool) -> bool:
        if self._scan is None:
            before, opened, _ = self._rest.partition(self._opens)
            if not opened and ended:
                return self._tell(said, len(self._rest))
            if not opened:
                until = len(self._rest) - overlap(self._rest, self._opens)
                return self._tell(said, len(self._rest[:until].rstrip()))  # white space before a call is dropped
            self._tell(said, len(before.rstrip()))
            self._scan = Scan(self._rest.index(self._opens) + len(self._opens), self._closes)
        scan = self._scan
        closed, calls = scan.closing(self._rest), list[ToolCall]()
        if closed is None and not ended:
            return False
        if closed is None or closed != scan.first:
            calls = self._made(objects_in(self._rest[scan.start : closed]))
        if not calls and scan.first is not None:
            closed = scan.first  # a quotation mark is missing, so this tag was not inside a string
            calls = self._made(objects_in(self._rest[scan.start : closed]))
        self._scan = None
        end = len(self._rest) if closed is None else closed + len(self._closes)
        said.text += "" if calls else self._rest[:end]
        said.calls += calls
        self._rest, self._dropped = self._rest[end:], string.whitespace if calls else ""
        return closed is not None

    def _functions(self, said: AnswerPart, *, ended: bool) -> bool:
        """Parses calls whose arguments are text between tags. The tags around a whole call may be missing."""
        if self._searched is None:
            found = [at for tag in (self._opens, OPEN_FUNCTION) if (at := self._rest.find(tag)) >= 0]
            if not found:
                held = 0 if ended else max(overlap(self._rest, self._opens), overlap(self._rest, OPEN_FUNCTION))
                before = self._rest[: len(self._rest) - held]
                return self._tell(said, len(before if ended else before.rstrip()))
            self._tell(said, len(self._rest[: min(found)].rstrip()))
            self._rest, self._searched = self._rest.lstrip(), 0
        bare = self._rest.startswith(OPEN_FUNCTION)
        inside = self._rest[len(self._opens) : _LONGEST_END].lstrip()[: len(OPEN_FUNCTION)]
        if not (bare or ended) and inside != OPEN_FUNCTION and OPEN_FUNCTION.startswith(inside):
            return False  # too short to tell whether it is such a call
        ends = _BARE_END if bare else _FUNCTION_END if inside == OPEN_FUNCTION else _TAG_END
        end = ends.search(self._rest, self._searched)
        if end is None and not ended:
            self._searched = max(0, len(self._rest) - _LONGEST_END)
            return False
        whole = self._rest[: end.end() if end is not None else len(self._rest)]
        untagged = whole.removeprefix(self._opens).removesuffix(self._closes)
        calls = self._made(functions_in(whole, self._types) or objects_in(untagged))
        said.text += "" if calls else whole
        said.calls += calls
        self._searched, self._rest = None, self._rest[len(whole) :]
        self._dropped = string.whitespace if calls else ""
        return bool(self._rest)

    def _after_mark(self, said: AnswerPart, *, ended: bool) -> bool:
        """Parses calls in the formats in which they fill the answer, or all of it after a control token."""
        mark = self._habits.opens
        before, found, after = self._rest.partition(mark) if mark else (self._rest, "", "")
        if found and (self._started or not before.strip() or self._is_text(before)):
            told = before.rstrip()
            self._tell(said, len(told))
            self._mark += before[len(told) :] + mark
            self._rest, self._started = after, False
            return True
        if self._started and mark and not ended:
            until = len(self._rest) - overlap(self._rest, mark)
            return self._tell(said, len(self._rest[:until].rstrip()))
        if mark and not ended and self._rest and mark.startswith(self._rest.lstrip()):
            return False
        return (self._named if self._habits.tools == "named" else self._json)(said, ended=ended)

    def _is_text(self, before: str) -> bool:
        """Whether the text before a control token is certainly not a call."""
        if self._habits.tools == "named":
            return False
        called = self._called
        calls, self._called = self._made(objects_in(before)), called
        return not calls

    def _json(self, said: AnswerPart, *, ended: bool) -> bool:
        """Parses an answer that consists only of calls."""
        if self._forced:
            return self._each(said, ended=ended)
        begun = self._rest.lstrip()
        if self._started or (begun and begun[0] not in "{["):
            return self._start(said, ended=ended)
        if not ended:
            return False
        for mark, _ in self._habits.marks:
            begun = begun.replace(mark, " ")
        calls = self._made(objects_in(begun))
        said.calls += calls
        if calls:
            self._rest = self._mark = ""
        return self._tell(said, len(self._rest))

    def _each(self, said: AnswerPart, *, ended: bool) -> bool:
        """Parses an answer that certainly consists of calls: each call as soon as it is complete. The rest of one that
        was cut short is text."""
        if self._scan is None:
            start = self._rest.find("{")
            if start < 0:
                self._rest = "" if ended and self._called else self._rest  # a bracket that closes the list
                self._forced = not ended
                return bool(ended and self._rest)
            self._rest, self._scan = self._rest[start:], Scan(0)
        end = self._scan.end(self._rest)
        if end is None and not ended:
            return False
        self._scan = None
        calls = self._made(objects_in(self._rest[:end])) if end is not None else []
        if not calls:
            self._forced = False
            return True
        said.calls += calls
        self._rest, self._mark = self._rest[end:], ""
        return bool(self._rest)

    def _start(self, said: AnswerPart, *, ended: bool) -> bool:
        """Passes on text that turned out not to be a call; a control token with a call may still follow."""
        again = not self._started and bool(self._habits.opens) and not ended
        self._started = True
        return True if again else self._tell(said, len(self._rest))

    def _named(self, said: AnswerPart, *, ended: bool) -> bool:
        """Parses calls at the start of the remaining text: a name, an optional nine-character id, then JSON
        arguments."""
        if self._scan is None:
            begun = self._rest.lstrip()
            head, brace, _ = begun.partition("{")
            if self._started or not (brace or self._begins_name(self._bare(head))) or (ended and not brace):
                if not begun and not ended:
                    return False
                return self._start(said, ended=ended) if begun else self._tell(said, len(self._rest))
            if not brace:
                return False
            self._scan = Scan(self._rest.index("{"))
        start = self._scan.start
        head = self._bare(self._rest[:start]).strip()
        name, call = self._name_of(head), None
        end = self._scan.end(self._rest) if name else None
        if name and end is None and not ended:
            return False  # the arguments are incomplete
        self._scan = None
        if end is not None:
            with suppress(ValueError, RecursionError):
                arguments = json.loads(self._rest[start:end])
                call = self._call({"name": name, "arguments": arguments, "id": head[len(name) :]})
        if call is None:
            return self._start(said, ended=ended)
        said.calls.append(call)
        self._rest, self._mark = self._rest[end:], ""
        return bool(self._rest)

    def _bare(self, head: str) -> str:
        """Returns `head`, the text before the arguments, without control tokens, even one still incomplete at its
        end."""
        for mark, _ in self._habits.marks:
            head = head.replace(mark, "")
        held = max((overlap(head, mark) for mark, _ in self._habits.marks), default=0)
        return head[: len(head) - held]

    def _channels(self, said: AnswerPart, *, ended: bool) -> bool:
        """Parses messages. The header of each marks it as a thought, as text or as a call."""
        if self._header is None:
            self._header, self._rest = header_of(self._rest, begun=self._started, ended=ended)
            self._started = self._started or self._header is not None
            return self._header is not None
        end, behind = content_end(self._rest, ended=ended)
        content, whole = self._rest[:end], behind is not None
        name = self._header.called
        if name in self._names:
            if not (whole or ended):
                return False
            calls = self._made([{"name": name, "arguments": content}])
            said.calls += calls
            said.text += "" if calls else content
        elif self._header.channel == "analysis" and not name:
            said.reasoning += content
        else:
            said.text += content
        self._rest = self._rest[end if behind is None else behind :]
        if whole:
            self._header = None
        return whole

    def _begins_name(self, head: str) -> bool:
        """Whether `head` may still become a function's name, with or without an id after it."""
        behind = [head.removeprefix(name) for name in self._names if head.startswith(name)]
        return any(name.startswith(head) for name in self._names) or any(map(_BEHIND_NAME.fullmatch, behind))

    def _name_of(self, head: str) -> str:
        """Returns the function's name in the text before arguments; empty if there is no name."""
        found = [name for name in self._names if head == name or re.fullmatch(re.escape(name) + "[A-Za-z0-9]{9}", head)]
        return max(found, key=len, default="")

    def _made(self, found: list[Any]) -> list[ToolCall]:
        """Converts parsed values to calls. Returns an empty list unless every value is a call."""
        called, calls = self._called, [self._call(one) for one in found]
        if None in calls:
            self._called = called
            return []
        return [call for call in calls if call is not None]

    def _call(self, given: Any) -> ToolCall | None:
        if not isinstance(given, Mapping) or given.get("name") not in self._names:
            return None
        arguments = given.get("arguments", given.get("parameters", {}))
        if isinstance(arguments, str):  # some models write JSON text
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
            return None  # nested too deeply or not Unicode, so no conversation can contain it

    def _id_of(self, given: Any) -> str:
        """Returns the id of the next call: the one that the model has written, or a derived one."""
        self._called += 1
        if isinstance(given, str) and re.fullmatch("[A-Za-z0-9]{9}", given):
            return given
        made = blake2b(f"{self._answer} {self._called}".encode(), digest_size=12).hexdigest()
        return made[:9] if self._habits.short_ids or self._habits.tools == "named" else f"call_{made}"


_BARE_END = re.compile(CLOSE_FUNCTION)
_FUNCTION_END = re.compile(rf"{CLOSE_FUNCTION}\s{{0,64}}</tool_call>")
_TAG_END = re.compile("</tool_call>")
_LONGEST_END = 128
_BEHIND_NAME = re.compile(r"[A-Za-z0-9]{0,9}\s*")
