"""Stop strings and stop patterns, matched in text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tenuto.base.errors import InvalidRequest
from tenuto.text.patterns import PatternFinder, stop_patterns

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
"""In characters."""


class StopMatcher:
    """Finds the first stop, a string or a match of a pattern, in a growing text, and holds back text that may still
    become one.

    The first stop is the one that ends first; ties go to the longest. So it does not depend on how the text is split
    into pieces.
    """

    def __init__(self, stop_strings: Sequence[str], patterns: Sequence[str] = ()) -> None:
        """Raises `InvalidRequest` if a stop is empty, too long or not a valid pattern, or if there are too many."""
        _check(stop_strings)
        self._finders: list[_Finder] = [PatternFinder(pattern) for pattern in stop_patterns(patterns)]
        if stop_strings:
            self._finders.append(_StringFinder(stop_strings))
        self._held = ""  # Invariant: until a match, the text from the lowest border of all finders on
        self._read = 0  # characters
        self.matched: str | None = None
        """The stop string or pattern that was found, if any."""
        self._text: str | None = None  # of the match

    @property
    def pending(self) -> int:
        """Number of characters held back."""
        return len(self._held)

    def push(self, text: str) -> tuple[str, str | None]:
        """Appends `text`. Returns the text that can now be delivered, and the text of the stop once one is found. Text
        after the stop is dropped."""
        if self.matched is not None:
            return "", self._text
        if not self._finders:
            return text, None
        text = self._held + text
        base, new = self._read - len(self._held), text[len(self._held) :]
        self._read += len(new)
        found = [match for finder in self._finders if (match := finder.find(new)) is not None]
        if found:
            start, end, self.matched = min(found, key=lambda match: (match[1], match[0]))
            self._held, self._text = "", text[start - base : end - base]
            return text[: start - base], self._text
        border = min(finder.border for finder in self._finders) - base
        self._held = text[border:]
        return text[:border], None

    def flush(self) -> str:
        """Returns the text held back; call it at the end of the text."""
        rest, self._held = self._held, ""
        return rest


class _Finder(Protocol):
    """Finds one kind of stop. Positions count characters of the whole text."""

    border: int
    """Position from which the text may still become a match."""

    def find(self, text: str) -> tuple[int, int, str] | None:
        """Appends `text`. Returns start and end of the match and the stop string or pattern, once there is a match."""


class _StringFinder:
    """Finds stop strings. A character costs O(1) (Aho and Corasick, Efficient string matching, CACM 1975)."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._state = _automaton(stop_strings)
        self._read = 0
        self.border = 0

    def find(self, text: str) -> tuple[int, int, str] | None:
        for position, letter in enumerate(text, self._read + 1):
            self._state = self._state.step(letter)
            if (match := self._state.match) is not None:
                return position - len(match), position, match
        self._read += len(text)
        self.border = self._read - self._state.depth
        return None


@dataclass(eq=False, repr=False, slots=True)  # `next` begins a long chain
class _State:
    """A state of the automaton: the longest prefix of a stop string, of `depth` characters, that the text ends with.

    `match` is the longest stop string at the end of this prefix, and `fallback` the next shorter prefix there."""

    depth: int
    fallback: _State | None = None
    match: str | None = None
    next: dict[str, _State] = field(default_factory=dict)

    def step(self, letter: str) -> _State:
        state = self
        while letter not in state.next:
            if state.fallback is None:
                return state
            state = state.fallback
        return state.next[letter]


def _automaton(stop_strings: Sequence[str]) -> _State:
    """Returns the state of the empty prefix, from which all others are reached."""
    root = _State(0)
    for stop in stop_strings:
        state = root
        for letter in stop:
            state = state.next.setdefault(letter, _State(state.depth + 1))
        state.match = stop
    queue = deque([root])
    while queue:
        state = queue.popleft()
        for letter, child in state.next.items():
            child.fallback = root if state.fallback is None else state.fallback.step(letter)
            child.match = child.match or child.fallback.match
            queue.append(child)
    return root


def _check(stop_strings: Sequence[str]) -> None:
    if isinstance(stop_strings, str):
        raise InvalidRequest("stop strings are a single string; allowed: a list of strings", param="stop")
    if len(stop_strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            f"there are {len(stop_strings)} stop strings; allowed: at most {MAX_STOP_STRINGS}", param="stop"
        )
    for stop in stop_strings:
        if not isinstance(stop, str):
            raise InvalidRequest(f"a stop string is a {type(stop).__name__}; allowed: text", param="stop")
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise InvalidRequest(
                f"a stop string has {len(stop)} characters; allowed: 1 to {MAX_STOP_LENGTH}", param="stop"
            )
