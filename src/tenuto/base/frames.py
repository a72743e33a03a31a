"""Messages on a stream of bytes: each is four bytes of length, little-endian, and its MessagePack."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_LENGTH = struct.Struct("<I")


def frame(payload: bytes) -> bytes:
    """A message as it is sent."""
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Cuts what is received into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, received: bytes) -> Iterator[bytes]:
        """The messages that `received` completes."""
        buffer = self._buffer
        buffer += received
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            with memoryview(buffer) as whole, whole[start + _LENGTH.size : end] as part:
                payload = bytes(part)
            start = end
            yield payload
        del buffer[:start]
