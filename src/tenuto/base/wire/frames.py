"""Messages on a byte stream: each is a four-byte little-endian length followed by MessagePack."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_LENGTH = struct.Struct("<I")
LARGE = 2**18
"""The size in bytes from which a message is not copied. Copying tens of megabytes holds up all other threads."""


def frame(*pieces: bytes) -> tuple[bytes, ...]:
    """Returns the bytes to send for a message given in pieces: its length, and the pieces."""
    size = sum(map(len, pieces))
    length = _LENGTH.pack(size)
    return (length, *pieces) if size >= LARGE else (b"".join((length, *pieces)),)


class FrameReader:
    """Splits received bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, received: bytes) -> Iterator[bytes | memoryview]:
        """Yields the messages that `received` completes. A large message is a view of the buffer that it arrived in."""
        self._buffer += received
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            begin, end = start + _LENGTH.size, start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            if length >= LARGE:
                arrived, self._buffer, start = self._buffer, self._buffer[end:], 0
                yield memoryview(arrived)[begin:end]
                del arrived  # the reader may wait long for the next message
                continue
            with memoryview(self._buffer) as whole, whole[begin:end] as part:
                payload = bytes(part)
            start = end
            yield payload
        del self._buffer[:start]
