"""An encoder of large messages as MessagePack in pieces, without the whole in one block of memory.

The format: https://github.com/msgpack/msgpack/blob/master/spec.md. The bytes are those that `msgspec` writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import msgspec

from tenuto.base.turns import Message
from tenuto.base.wire.moves import StatePiece

Bytes = bytes | memoryview

PIECE = 2**16
"""The size, in characters of text or in bytes, at which a piece is complete."""
_ARRAY, _MAP, _TEXT, _BYTES = (0xDC, 0xDD), (0xDE, 0xDF), (0xDA, 0xDB), (0xC5, 0xC6)
"""The first byte before a 16-bit length, and before a 32-bit length."""


def in_pieces(message: msgspec.Struct, encoder: msgspec.msgpack.Encoder) -> list[Bytes]:
    """Encodes a message with a tag. The bytes of state and encoded values are not copied. Raises what the encoder
    raises."""
    pieces: list[Bytes] = []
    short = bytearray()  # written, but not yet in `pieces`
    for part in _message(message, encoder):
        if len(part) >= PIECE:
            pieces += [bytes(short), part]
            short = bytearray()
            continue
        short += part
        if len(short) >= PIECE:
            pieces.append(bytes(short))
            short = bytearray()
    return [*pieces, bytes(short)]


def _message(message: msgspec.Struct, encoder: msgspec.msgpack.Encoder) -> Iterator[Bytes]:
    names, config = message.__struct_fields__, message.__struct_config__
    yield _head(_ARRAY if config.array_like else _MAP, 1 + len(names))
    if not config.array_like:
        yield encoder.encode(config.tag_field)
    yield encoder.encode(config.tag)
    for name in names:
        if not config.array_like:
            yield encoder.encode(name)
        yield from _value(getattr(message, name), encoder)


def _value(value: Any, encoder: msgspec.msgpack.Encoder) -> Iterator[Bytes]:
    if isinstance(value, str) and len(value) >= PIECE:
        yield from _text(value)
    elif isinstance(value, StatePiece):
        yield from _state(value, encoder)
    elif isinstance(value, msgspec.Raw):
        yield memoryview(value)
    elif isinstance(value, Sequence) and len(value) and isinstance(value[0], Message):
        yield _head(_ARRAY, len(value))
        for said in value:
            yield from _said(said, encoder)
    else:
        yield encoder.encode(value)


def _state(piece: StatePiece, encoder: msgspec.msgpack.Encoder) -> Iterator[Bytes]:
    if len(piece.data) < PIECE:
        yield encoder.encode(piece)
        return
    yield _head(_ARRAY, len(piece.__struct_fields__))
    yield encoder.encode(piece.group)
    yield encoder.encode(piece.first)
    yield _head(_BYTES, len(piece.data))
    yield piece.data
    yield encoder.encode(piece.checksums)


def _said(message: Message, encoder: msgspec.msgpack.Encoder) -> Iterator[Bytes]:
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
    """Returns the header of an array, map, text or bytes of this length. Lengths up to 15 of arrays and maps take one
    byte, as in `msgspec`; text and bytes in pieces are longer."""
    if length < 16:
        return bytes([(0x90 if kind is _ARRAY else 0x80) + length])
    short, long = kind
    return bytes([short]) + length.to_bytes(2, "big") if length < 2**16 else bytes([long]) + length.to_bytes(4, "big")
