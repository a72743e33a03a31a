"""Stop strings, found in text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tenuto.base.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
"""In characters."""


class StopMatcher:
    """Finds the first stop string in a growing text and holds back what could still become one.

    The first match is the one that ends first, and of those the longest: it is known as soon as it is complete, so it
    does not depend on how the text is split into pieces. A character costs O(1) (Aho and Corasick, Efficient string
    matching, CACM 1975).
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        """Raises `InvalidRequest` on an empty string, or too many or too long ones."""
        _check(stop_strings)
        self._states = _automaton(stop_strings)
        self._state = self._states[0]
        self._held = ""  # Invariant: without a match, the text that spells `_state`, which may still become one
        self._matched: str | None = None

    @property
    def pending(self) -> int:
        """How many characters are held back."""
        return len(self._held)

    @property
    def matched(self) -> str | None:
        """The stop string that was found, if any."""
        return self._matched

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that can now be delivered, and the stop string if it was found. Text after it is dropped."""
        if self._matched is not None:
            return "", self._matched
        start = len(self._held)
        text = self._held + text
        for position in range(start, len(text)):
            self._state = self._state.step(text[position])
            if self._state.match is not None:
                self._matched, self._held = self._state.match, ""
                return text[: position + 1 - len(self._state.match)], self._matched
        border = len(text) - self._state.depth
        self._held = text[border:]
        return text[:border], None

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        rest, self._held, self._state = self._held, "", self._states[0]
        return rest


class _State:
    """A prefix of some stop string, of `depth` characters: the longest that the text so far ends with.

    `match` is the longest stop string that it ends with; `fallback` the next shorter prefix that it ends with."""

    __slots__ = ("depth", "fallback", "match", "next")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.fallback: _State | None = None
        self.match: str | None = None
        self.next: dict[str, _State] = {}

    def step(self, letter: str) -> _State:
        state = self
        while letter not in state.next:
            if state.fallback is None:
                return state
            state = state.fallback
        return state.next[letter]


def _automaton(stop_strings: Sequence[str]) -> list[_State]:
    """All states, the one of the empty prefix first."""
    root = _State(0)
    for stop in stop_strings:
        state = root
        for letter in stop:
            state = state.next.setdefault(letter, _State(state.depth + 1))
        state.match = stop
    states, queue = [root], deque([root])
    while queue:
        state = queue.popleft()
        for letter, child in state.next.items():
            child.fallback = root if state.fallback is None else state.fallback.step(letter)
            child.match = child.match or child.fallback.match
            states.append(child)
            queue.append(child)
    return states


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
