"""Parsing of large JSON bodies without their long texts. The parser holds Python's lock while it runs. So each long
text is decoded in pieces, between which other threads can run, and the parser reads a mark in its place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec

PIECE = 2**16
"""Maximum size, in bytes, of a piece of text that is decoded at once."""
LONG = 2**10
"""Minimum size of a text, in bytes, that is decoded beside the rest of its body, unless it is a name."""
_MARK = "\x00"
"""Begins the mark of a text; its number follows. A body with other strings that may have this character is parsed as a
whole."""
_MARK_JSON = rb"\u0000"
"""The only way to write it in JSON."""
_ESCAPE = 12
"""Bytes of the longest escape in a string: a surrogate pair, `\\ud83d\\ude00`."""


class Unfit(Exception):
    """The body has to be parsed as a whole."""


def parsed_beside(body: bytes, places: Sequence[tuple[int, int]]) -> Any:
    """Parses a body whose long texts begin and end at `places`. Raises `Unfit`, or an error of `msgspec.json.decode` if
    the body is not JSON, and for some bodies that are: parse these as a whole."""
    rest, at, texts = bytearray(), 0, list[str]()
    for begin, end in places:
        follows = body[end + 1 : end + 1 + LONG].lstrip()[:1]
        if follows == b":":  # it is a name, which may be that of another field too
            continue
        if not follows and end + 1 + LONG < len(body):
            raise Unfit
        rest += b"%b%b%d" % (body[at:begin], _MARK_JSON, len(texts))
        texts.append("".join(_decoded(body, begin, end)))
        at = end
    rest += body[at:]
    if rest.count(_MARK_JSON) > len(texts):
        raise Unfit
    return _restored(msgspec.json.decode(rest), texts)


def _decoded(body: bytes, begin: int, end: int) -> Iterator[str]:
    """Yields the pieces of a text. Raises as `parsed_beside` does."""
    while end - begin > PIECE:
        for cut in _cuts(body, begin + PIECE):
            with suppress(ValueError):  # cut inside a character, an escape or a surrogate pair
                piece = _decode(body[begin:cut])
                break
        else:
            raise Unfit
        yield piece
        begin = cut
    yield _decode(body[begin:end])


def _cuts(body: bytes, at: int) -> Sequence[int]:
    """Returns places up to `at`. If `at` is inside a valid text, one of them is between two characters or escapes."""
    escapes = [place for place in range(at - 1, at - 2 * _ESCAPE, -1) if body[place] == ord("\\")]
    return escapes if escapes and escapes[0] >= at - _ESCAPE else range(at, at - 4, -1)


def _decode(piece: bytes) -> str:
    return msgspec.json.decode(b'"%b"' % piece, type=str)


def _restored(value: Any, texts: Sequence[str]) -> Any:
    """Returns a value with texts in place of their marks."""
    if isinstance(value, str):
        return texts[int(value[1:])] if value.startswith(_MARK) else value
    if isinstance(value, list):
        return [_restored(each, texts) for each in value]
    if isinstance(value, dict):
        return {name: _restored(each, texts) for name, each in value.items()}
    return value
