"""An encoder of large requests as MessagePack in pieces, without the whole in one block of memory.

The format: https://github.com/msgpack/msgpack/blob/master/spec.md. The bytes are those that `msgspec` writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import msgspec

from tenuto.base.turns import Message
from tenuto.base.wire.messages import Request

PIECE = 2**16
"""The size, in characters of text or in bytes, at which a piece is complete."""
_ARRAY, _MAP, _TEXT = (0xDC, 0xDD), (0xDE, 0xDF), (0xDA, 0xDB)
"""The first byte before a 16-bit length, and before a 32-bit length."""


def in_pieces(request: Request[Any], encoder: msgspec.msgpack.Encoder) -> list[bytes]:
    """Encodes a request. Raises what the encoder raises."""
    pieces: list[bytes] = []
    short = bytearray()  # written, but not yet in `pieces`
    for part in _request(request, encoder):
        if len(part) >= PIECE:
            pieces += [bytes(short), part]
            short = bytearray()
            continue
        short += part
        if len(short) >= PIECE:
            pieces.append(bytes(short))
            short = bytearray()
    return [*pieces, bytes(short)]


def _request(request: Request[Any], encoder: msgspec.msgpack.Encoder) -> Iterator[bytes]:
    names = request.__struct_fields__
    yield _head(_ARRAY, 1 + len(names))
    yield encoder.encode(request.__struct_config__.tag)
    for name in names:
        value = getattr(request, name)
        yield from _value(value, encoder)


def _value(value: Any, encoder: msgspec.msgpack.Encoder) -> Iterator[bytes]:
    if isinstance(value, str) and len(value) >= PIECE:
        yield from _text(value)
    elif isinstance(value, Sequence) and len(value) and isinstance(value[0], Message):
        yield _head(_ARRAY, len(value))
        for message in value:
            yield from _message(message, encoder)
    else:
        yield encoder.encode(value)


def _message(message: Message, encoder: msgspec.msgpack.Encoder) -> Iterator[bytes]:
    if message.size < PIECE:
        yield encoder.encode(message)
        return
    named = fields(message)
    yield _head(_MAP, len(named))
    for each in named:
        yield encoder.encode(each.name)
        yield from _value(getattr(message, each.name), encoder)


def _text(text: str) -> Iterator[bytes]:
    parts = [text[at : at + PIECE].encode() for at in range(0, len(text), PIECE)]
    yield _head(_TEXT, sum(map(len, parts)))
    yield from parts


def _head(kind: tuple[int, int], length: int) -> bytes:
    """Returns the header of an array, map or text of this length. Lengths up to 15 of arrays and maps take one byte, as
    in `msgspec`; a text in pieces is longer."""
    if length < 16 and kind is not _TEXT:
        return bytes([(0x90 if kind is _ARRAY else 0x80) + length])
    short, long = kind
    return bytes([short]) + length.to_bytes(2, "big") if length < 2**16 else bytes([long]) + length.to_bytes(4, "big")
