"""Regular expressions that end a turn, matched in text that arrives in pieces.

RE2 searches in time proportional to the text, whatever the expression. It cannot report that a text may still become a
match, so we derive a second expression from each, which matches every prefix of its matches.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import re2

from tenuto.base.checks import check_unicode
from tenuto.base.errors import InvalidRequest

MAX_STOP_PATTERNS = 8
MAX_PATTERN_LENGTH = 256
"""In characters."""
MAX_MATCH_LENGTH = 1024
"""In characters. Longer matches are not found; this bounds the text searched for every token, and the text held
back."""
MAX_SIZE = 256
"""Characters, classes and assertions in a turn's expressions, each counted as often as it may be repeated. Larger
automata may not fit into RE2's cache of states; it then follows every position in the expression for every character of
the text. An expression of size 1,000 takes 20 ms per token, one of this size up to 3 ms."""
MAX_PROGRAM_BYTES = 2**20
"""Memory for the compiled form of an expression and the automaton states its search visits."""
MAX_CACHED = 32
"""Number of compiled expressions cached, least recently used evicted first."""

_PART = re.compile(
    r"""
      (?P<quoted>\\Q(?:(?!\\E).)*(?:\\E)?)
    | (?P<repeated>[*+?]\??|\{\d+(?:,\d*)?\}\??)
    | (?P<flags>\(\?[a-zA-Z-]+\))
    | (?P<opened>\((?:\?(?:P?<\w+>|[a-zA-Z-]*:))?)
    | (?P<closed>\))
    | (?P<either>\|)
    | (?P<atom>\\[pP](?:\{[^}]*\}|.)|\\x(?:\{[^}]*\}|..)|\\[0-7]{1,3}|\\.
        |\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\]|.)
    """,
    re.VERBOSE | re.DOTALL,
)
"""Matches the next part of an expression that RE2 has accepted."""
_AT_END = ("$", r"\b", r"\B", r"\z")
"""Atoms that depend on the following character, or on whether there is one."""


@dataclass(frozen=True, slots=True)
class StopPattern:
    """A compiled expression, shared by all turns that use it. `begun` matches wherever the rest of the text may still
    become a match. `looks_ahead`: a match may depend on the character after it, or on whether the text ends there.
    `size` is counted as for `MAX_SIZE`."""

    pattern: str
    whole: re2._Regexp
    begun: re2._Regexp
    looks_ahead: bool
    size: int


class PatternFinder:
    """Finds the first match of a pattern in a growing text: of the matches that end first, the longest, up to
    `MAX_MATCH_LENGTH` characters. `$` and the like match at the end of the text so far."""

    def __init__(self, pattern: StopPattern) -> None:
        self._pattern = pattern
        self._text = ""  # Invariant: the text so far from the character before `border` on
        self._start = 0  # where `_text` starts
        self.border = 0
        """Position from which the text may still become a match."""

    def find(self, text: str) -> tuple[int, int, str] | None:
        """Appends `text`. Returns start and end of the match and the expression, once there is a match."""
        read = len(self._text)
        self._text += text
        whole = self._pattern.whole
        if self._pattern.looks_ahead or whole.search(self._text, self.border - self._start) is not None:
            for end in range(read + 1, len(self._text) + 1):
                after = max(self.border - self._start, end - MAX_MATCH_LENGTH)
                if (match := whole.search(self._text[:end], after)) is not None:
                    return self._start + match.start(), self._start + end, self._pattern.pattern
        begun = self._pattern.begun.search(
            self._text, max(self.border - self._start, len(self._text) - MAX_MATCH_LENGTH)
        )
        border = begun.start() if begun is not None else len(self._text)
        self.border = self._start + border
        kept = max(0, border - 1)
        self._start, self._text = self._start + kept, self._text[kept:]
        return None


def stop_patterns(patterns: Sequence[str]) -> list[StopPattern]:
    """Compiles a turn's stop patterns. Raises `InvalidRequest` if one is not a regular expression, if there are too
    many, or if they are too large."""
    if isinstance(patterns, str):
        raise _refused("stop_regex is a single string; allowed here: a list of strings")
    if len(patterns) > MAX_STOP_PATTERNS:
        raise _refused(f"stop_regex has {len(patterns)} expressions; allowed: at most {MAX_STOP_PATTERNS}")
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise _refused(f"an expression of stop_regex is a {type(pattern).__name__}; allowed: text")
        if not 1 <= len(pattern) <= MAX_PATTERN_LENGTH:
            raise _refused(
                f"an expression of stop_regex has {len(pattern)} characters; allowed: 1 to {MAX_PATTERN_LENGTH}"
            )
        check_unicode("stop_regex", pattern)
    compiled = [_compiled(pattern) for pattern in patterns]
    size = sum(each.size for each in compiled)
    if size > MAX_SIZE:
        raise _too_large(size)
    return compiled


@functools.lru_cache(maxsize=MAX_CACHED)
def _compiled(pattern: str) -> StopPattern:
    whole = _program(pattern, pattern)
    if whole.search("") is not None:
        raise _refused(
            f"stop_regex {pattern!r} matches the empty text; allowed: expressions that need at least one character"
        )
    parts = _Parser(pattern)
    found = parts.choice()
    if found.size > MAX_SIZE:
        raise _too_large(found.size)
    begun = _program(rf"(?:{found.begun})\z", pattern)
    return StopPattern(pattern, whole, begun, not parts.atoms.isdisjoint(_AT_END), found.size)


def _program(expression: str, pattern: str) -> re2._Regexp:
    options = re2.Options()
    options.log_errors = False
    options.never_capture = True
    options.max_mem = MAX_PROGRAM_BYTES
    try:
        return re2.compile(expression, options)
    except re2.error as error:
        reason = error.args[0].decode() if isinstance(error.args[0], bytes) else str(error)
        raise _refused(
            f"stop_regex {pattern!r} cannot be used: {reason}; allowed: expressions in RE2's syntax, which has no "
            "look-around and no backreferences"
        ) from None


def _too_large(size: int) -> InvalidRequest:
    return _refused(
        f"stop_regex has {size} characters, classes and assertions; allowed: {MAX_SIZE} in all, each counted as often"
        " as it may be repeated"
    )


def _refused(problem: str) -> InvalidRequest:
    return InvalidRequest(problem, param="stop_regex")


class _Fragment(NamedTuple):
    """A fragment of an expression. `itself`: its source; `begun`: an expression that matches the prefixes of its
    matches; `size`: as counted for `MAX_SIZE`."""

    itself: str
    begun: str = ""
    size: int = 0


@dataclass(slots=True)
class _Parser:
    """Parser of an expression that RE2 has accepted; it recognizes sequences, choices, groups and repetitions."""

    pattern: str
    atoms: set[str] = field(default_factory=set)
    _at: int = 0

    def choice(self) -> _Fragment:
        """Parses the choices from here to the end of the group, or of the expression. The result's `begun` matches
        every prefix of a match, the empty one included, and possibly whole matches."""
        choices: list[_Fragment] = []
        sequence: list[_Fragment] = []
        flags: list[_Fragment] = []  # flags apply up to the end of the group, in later choices too
        while (part := self._next()) is not None and part.lastgroup != "closed":
            text, kind = part.group(), part.lastgroup
            if kind == "either":
                choices.append(_of_sequence(sequence))
                sequence = list(flags)
            elif kind == "flags":
                flags.append(_Fragment(text))
                sequence.append(_Fragment(text))
            elif kind == "quoted":
                sequence += [_Fragment(re2.escape(letter), size=1) for letter in text[2:].removesuffix(r"\E")]
            elif kind == "opened":
                head = text if text.endswith(":") else "(?:"
                inside = self.choice()
                sequence.append(_Fragment(f"{head}{inside.itself})", f"{head}{inside.begun})", inside.size))
            elif kind == "repeated":
                sequence.append(_repeated(sequence.pop(), text))
            else:
                if text == r"\C":
                    raise _refused(r"stop_regex has \C; allowed: expressions that match whole characters")
                self.atoms.add(text)
                sequence.append(_Fragment(text, size=1))
        choices.append(_of_sequence(sequence))
        itself, begun = ("|".join(each) for each in zip(*((one.itself, one.begun) for one in choices), strict=True))
        return _Fragment(itself, begun, sum(one.size for one in choices))

    def _next(self) -> re.Match[str] | None:
        part = _PART.match(self.pattern, self._at)
        if part is not None:
            self._at = part.end()
        return part


def _of_sequence(sequence: Sequence[_Fragment]) -> _Fragment:
    """Joins the parts of a sequence. Its prefixes are those of its first part, and the first part followed by prefixes
    of the rest."""
    rest = ""
    for part in reversed(sequence):
        rest = f"(?:{part.itself}{rest}|{part.begun})"
    return _Fragment("".join(part.itself for part in sequence), rest, sum(part.size for part in sequence))


def _repeated(part: _Fragment, times: str) -> _Fragment:
    """Repeats a part. A prefix of the result consists of whole repetitions, at most one fewer than allowed, and a
    prefix of the part."""
    most: int | None
    if times[0] == "{":
        least, comma, last = times[1 : times.index("}")].partition(",")
        most = None if comma and not last else int(last or least)
        count = max(1, int(last or least))
    else:
        most, count = 1 if times[0] == "?" else None, 1
    begun = f"(?:{part.begun})" if part.begun else ""
    if most == 0:
        begun = ""
    elif most != 1:
        begun = f"(?:{part.itself})" + ("*" if most is None else f"{{0,{most - 1}}}") + begun
    return _Fragment(part.itself + times, begun, part.size * count)
