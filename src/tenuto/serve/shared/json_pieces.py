"""Parsing of large JSON bodies in pieces. The parser holds Python's lock while it runs; between two pieces, other
threads can run.

A body is cut after commas and inside long strings. Each piece is made a complete value: the brackets open at its start
are written before it, and those open at its end are closed after it. Then the values are joined.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt

PIECE = 2**16
"""Minimum size of a piece in bytes."""
MAX_KEY = 2**12
"""Maximum size, in bytes, of the name of a field whose value is cut."""
_ESCAPE = 12
"""Bytes of the longest escape in a string: a surrogate pair, `\\ud83d\\ude00`."""
_MARK = "\x00"
"""Stands for the name of a field whose value was cut. A body that may have an equal name is parsed as a whole."""
_MARK_JSON = msgspec.json.encode(_MARK).strip(b'"')
"""The only way to write it in JSON."""
_NAME = re.compile(rb'"(.*?)"[^\\]', re.DOTALL)
"""A field's name, backwards, and the byte before it. Quotes in names follow a backslash."""

Letters = npt.NDArray[np.uint8]
_OPENS, _OBJECT, _COMMA = b"[{", ord("{"), ord(",")
_BRACKET = np.isin(np.arange(256), list(b"[{]}"))


class Open(NamedTuple):
    """A list or object that is not closed yet: its bracket and the bracket's place."""

    bracket: int
    at: int


@dataclass(slots=True)
class Cut:
    """A place at which the body may be cut: at a comma, or inside the string that begins at `quote`, at all places in
    `text`. `path`: the lists and objects open there, outermost first."""

    at: int
    path: tuple[Open, ...]
    quote: int | None = None
    text: list[int] = field(default_factory=list)


class Cuts:
    """Finds places at which a body can be cut while it arrives. In a body that is not JSON, the places mean nothing."""

    def __init__(self, piece: int = PIECE) -> None:
        self.found: list[Cut] = []
        self._piece = piece
        self._path: list[Open] = []
        self._last = 0  # the last mark outside of strings
        self._quote: int | None = None  # start of the string in which the body ends so far, if it may be cut
        self._next = piece  # the first byte at which to cut again

    def feed(self, marks: Letters, places: npt.NDArray[np.int64], quote: int | None) -> None:
        """Reads on. `marks`: brackets, commas and colons outside of strings. `places`: their places in the body.
        `quote`: start of the string in which the body ends so far, if any."""
        begin = 0
        while (comma := self._comma(marks, places, begin)) is not None:
            self._follow(marks[begin:comma], places[begin:comma])
            if self._path:
                self.found.append(Cut(int(places[comma]), tuple(self._path)))
            self._next, begin = int(places[comma]) + self._piece, comma
        self._follow(marks[begin:], places[begin:])
        if len(marks):
            self._last = int(marks[-1])
        names = self._last == _OBJECT or (self._last == _COMMA and self._path and self._path[-1].bracket == _OBJECT)
        self._quote = None if names else quote

    def inside(self, at: int) -> None:
        """Records that the body continues up to `at` inside the same string."""
        if self._quote is None or at < self._next:
            return
        if not self.found or self.found[-1].quote != self._quote:
            self.found.append(Cut(at, tuple(self._path), self._quote))
        self.found[-1].text.append(at)
        self._next = at + self._piece

    def _comma(self, marks: Letters, places: npt.NDArray[np.int64], begin: int) -> int | None:
        """Returns the index of the comma at which to cut next."""
        first = max(begin, int(np.searchsorted(places, self._next)))
        commas = np.flatnonzero(marks[first:] == _COMMA)
        return first + int(commas[0]) if len(commas) else None

    def _follow(self, marks: Letters, places: npt.NDArray[np.int64]) -> None:
        brackets = np.flatnonzero(_BRACKET[marks])
        for bracket, at in zip(marks[brackets].tolist(), places[brackets].tolist(), strict=True):
            if bracket in _OPENS:
                self._path.append(Open(bracket, at))
            elif self._path:
                self._path.pop()


class Unfit(Exception):
    """The body cannot be parsed in pieces."""


def parsed_in_pieces(body: bytes, cuts: Sequence[Cut]) -> Any:
    """Parses a body that is cut at `cuts`. Raises `Unfit` or an error of `msgspec.json.decode` if the body is not JSON,
    and for some bodies that are: parse these as a whole."""
    value: Any = None
    names: dict[int, str] = {}
    join: _Join | None = None  # joins the values before and after the last cut
    begin = 0
    for cut in (*cuts, None):
        middle: list[str] = []
        end = resume = len(body)
        if cut is not None and cut.quote is not None:
            places = [_between_letters(body, cut.quote, at) for at in cut.text]
            end, resume = places[0], places[-1]
            middle = [msgspec.json.decode(b'"%b"' % body[a:b], type=str) for a, b in pairwise(places)]
        elif cut is not None:
            end, resume = cut.at, cut.at + 1
        before = join.cut if join is not None else None
        piece = body[begin:end]
        _check_ends(piece, before, cut)
        opening = _opening(before)
        if _MARK_JSON in opening and _MARK_JSON in piece:
            raise Unfit
        decoded = msgspec.json.decode(b"%b%b%b" % (opening, piece, _closing(cut)))
        value = decoded if join is None else join.put(value, decoded)
        if cut is not None:
            join, begin = _Join(body, cut, middle, names), resume
    return value


def _between_letters(body: bytes, quote: int, at: int) -> int:
    """Returns the last place up to `at` between two characters or escapes of the string. Raises `Unfit`."""
    at = min(at, len(body) - 1)
    for place in range(at, max(quote, at - 2 * _ESCAPE), -1):
        head = body[max(quote + 1, place - _ESCAPE) : place]
        if 0x80 <= body[place] < 0xC0:
            continue
        if b"\\" not in head or not _escaped(body, quote, place):
            return place
    raise Unfit


def _escaped(body: bytes, quote: int, place: int) -> bool:
    """Whether `place` is inside an escape or a surrogate pair."""
    for start in range(place - 1, max(quote, place - _ESCAPE), -1):
        if body[start] != ord("\\") or _backslashes(body, quote, start) % 2:
            continue
        follows, size = body[start + 1 : start + 2], 2
        if follows == b"u":
            first = body[start + 2 : start + 4].lower()
            size = 12 if first in (b"d8", b"d9", b"da", b"db") else 6
        return start + size > place
    return False


def _backslashes(body: bytes, quote: int, end: int) -> int:
    """Returns the number of backslashes right before `end`. Raises `Unfit` if there are too many to count."""
    before = body[max(quote + 1, end - MAX_KEY) : end]
    count = len(before) - len(before.rstrip(b"\\"))
    if count == MAX_KEY:
        raise Unfit
    return count


def _check_ends(piece: bytes, before: Cut | None, cut: Cut | None) -> None:
    """Raises `Unfit` if the comma at a cut has no value before or after it, which parsing the pieces would not show."""
    if before is not None and before.quote is None and piece[: MAX_KEY + 1].lstrip()[:1] in (b"", b"]", b"}"):
        raise Unfit
    if cut is not None and cut.quote is None and piece[-MAX_KEY:].rstrip()[-1:] in (b"", b"[", b"{"):
        raise Unfit


def _opening(cut: Cut | None) -> bytes:
    """Returns the brackets, names and quote to write before the piece that follows a cut."""
    if cut is None:
        return b""
    text = b'"' if cut.quote is not None else b""
    mark = msgspec.json.encode(_MARK) + b":"
    opening = b""
    for depth, each in enumerate(cut.path):
        continued = depth < len(cut.path) - 1 or text
        opening += b"{" + (mark if continued else b"") if each.bracket == _OBJECT else b"["
    return opening + text


def _closing(cut: Cut | None) -> bytes:
    """Returns the quote and brackets to write after the piece that precedes a cut."""
    if cut is None:
        return b""
    brackets = bytes(ord("}") if each.bracket == _OBJECT else ord("]") for each in reversed(cut.path))
    return (b'"' if cut.quote is not None else b"") + brackets


class _Join:
    """Joins the values before and after a cut. `texts`: the texts between them, if a string was cut. `names`: the names
    of fields by the places of their values, as far as they were read."""

    def __init__(self, body: bytes, cut: Cut, texts: Sequence[str], names: dict[int, str]) -> None:
        self.cut = cut
        self._body, self._path, self._quote, self._texts = body, cut.path, cut.quote, texts
        self._names = names

    def put(self, old: Any, new: Any, depth: int = 0) -> Any:
        """Returns the value joined from its parts `old` and `new`."""
        if depth == len(self._path):
            return "".join([old, *self._texts, new])
        innermost = depth == len(self._path) - 1 and self._quote is None
        if self._path[depth].bracket != _OBJECT:
            if not innermost:
                old[-1] = self.put(old[-1], new.pop(0), depth + 1)
            old.extend(new)
            return old
        if not innermost:
            name = self._name(self._path[depth + 1].at if depth + 1 < len(self._path) else cast("int", self._quote))
            old[name] = self.put(old[name], new.pop(_MARK), depth + 1)
        old.update(new)
        return old

    def _name(self, at: int) -> str:
        """Returns the name of the field whose value begins at `at`. Raises `Unfit`."""
        if at not in self._names:
            before = self._body[max(0, at - MAX_KEY) : at].rstrip().removesuffix(b":").rstrip()
            found = _NAME.match(before[::-1])
            if found is None:
                raise Unfit
            self._names[at] = msgspec.json.decode(b'"%b"' % found[1][::-1], type=str)
        return self._names[at]
