"""Regular expressions that end a turn, found in text that arrives in pieces.

RE2 searches in time proportional to the text, whatever the expression. It does not tell whether a text may still become
a match, so a second expression is made of each: one that matches every beginning of its matches.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import re2

from tenuto.base.checks import check_unicode
from tenuto.base.errors import InvalidRequest

MAX_STOP_PATTERNS = 8
MAX_PATTERN_LENGTH = 256
"""In characters."""
MAX_MATCH_LENGTH = 1024
"""In characters. Longer matches are not found, so that no more has to be searched with every token, or held back."""
MAX_PROGRAM_BYTES = 2**20
"""Memory for the compiled form of an expression and the states its search meets."""

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
"""A part of an expression that RE2 has accepted."""
_AT_END = ("$", r"\b", r"\B", r"\z")
"""Atoms that depend on what follows, or on whether anything does."""


@dataclass(frozen=True, slots=True)
class StopPattern:
    """A compiled expression, for all turns with it. `begun` matches at every position from which the text up to its end
    may become a match. `looks_ahead`: it may match the beginning of a text, but not more of the same text."""

    pattern: str
    whole: re2._Regexp
    begun: re2._Regexp
    looks_ahead: bool


class PatternFinder:
    """Finds the first match of a pattern in a growing text: the one that ends first, and of those the longest, of at
    most `MAX_MATCH_LENGTH` characters. The end of the text so far counts as an end of the text."""

    def __init__(self, pattern: StopPattern) -> None:
        self._pattern = pattern
        self._text = ""  # Invariant: the text so far from the character before `border` on
        self._start = 0  # where `_text` starts
        self.border = 0
        """Where the text starts that may still become a match."""

    def find(self, text: str) -> tuple[int, int, str] | None:
        """Read on. Start and end of the match, if there is one now, and the expression."""
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
    """Raises `InvalidRequest` for what is not a regular expression, or one that is too large."""
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
    return [_compiled(pattern) for pattern in patterns]


@functools.lru_cache(maxsize=256)
def _compiled(pattern: str) -> StopPattern:
    whole = _program(pattern, pattern)
    if whole.search("") is not None:
        raise _refused(f"stop_regex {pattern!r} matches the empty text; allowed: what needs at least a character")
    parts = _Parts(pattern)
    begun = _program(rf"(?:{parts.beginnings()})\z", pattern)
    return StopPattern(pattern, whole, begun, not parts.atoms.isdisjoint(_AT_END))


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


def _refused(problem: str) -> InvalidRequest:
    return InvalidRequest(problem, param="stop_regex")


@dataclass(slots=True)
class _Parts:
    """An expression that RE2 has accepted, taken apart as far as sequences, choices, groups and repetitions go."""

    pattern: str
    atoms: set[str] = field(default_factory=set)
    _at: int = 0

    def beginnings(self) -> str:
        """An expression that matches the beginnings of all matches, the empty one included, and maybe matches."""
        return self._choice()[1]

    def _choice(self) -> tuple[str, str]:
        """What is between here and the end of the group: itself, and its beginnings."""
        itself, beginnings = [], []
        sequence: list[tuple[str, str]] = []
        flags: list[tuple[str, str]] = []  # they hold up to the end of the group, in later choices too
        while (part := self._next()) is not None and part.lastgroup != "closed":
            text, kind = part.group(), part.lastgroup
            if kind == "either":
                itself.append("".join(whole for whole, _ in sequence))
                beginnings.append(_of_sequence(sequence))
                sequence = list(flags)
            elif kind == "flags":
                flags.append((text, ""))
                sequence.append((text, ""))
            elif kind == "quoted":
                sequence += [(re2.escape(letter), "") for letter in text[2:].removesuffix(r"\E")]
            elif kind == "opened":
                head = text if text.endswith(":") else "(?:"
                inside, begun = self._choice()
                sequence.append((f"{head}{inside})", f"{head}{begun})"))
            elif kind == "repeated":
                sequence.append(_repeated(*sequence.pop(), text))
            else:
                if text == r"\C":
                    raise _refused(r"stop_regex has \C; allowed: what matches whole characters")
                self.atoms.add(text)
                sequence.append((text, ""))
        itself.append("".join(whole for whole, _ in sequence))
        beginnings.append(_of_sequence(sequence))
        return "|".join(itself), "|".join(beginnings)

    def _next(self) -> re.Match[str] | None:
        part = _PART.match(self.pattern, self._at)
        if part is not None:
            self._at = part.end()
        return part


def _of_sequence(sequence: Sequence[tuple[str, str]]) -> str:
    """The beginnings of a sequence: those of its first part, and that part followed by beginnings of the rest."""
    rest = ""
    for whole, begun in reversed(sequence):
        rest = f"(?:{whole}{rest}|{begun})"
    return rest


def _repeated(whole: str, begun: str, times: str) -> tuple[str, str]:
    """A repetition, and its beginnings: some whole repetitions and the beginning of one more."""
    if times[0] == "{":
        most = times[1 : times.index("}")].rpartition(",")[2]
        before = f"{{0,{int(most)}}}" if most else "*"
    else:
        before = "" if times[0] == "?" else "*"
    begun = f"(?:{begun})" if begun else ""
    return whole + times, (f"(?:{whole}){before}" if before else "") + begun
