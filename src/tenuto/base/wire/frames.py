"""Messages on a byte stream: each is a four-byte little-endian length followed by MessagePack."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_LENGTH = struct.Struct("<I")


def frame(payload: bytes) -> bytes:
    """A message with its length in front."""
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Splits received bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Yield the messages that `received` completes."""
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
