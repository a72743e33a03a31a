"""Messages on a byte stream: each is a four-byte little-endian length followed by MessagePack."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_LENGTH = struct.Struct("<I")
LARGE = 2**18
"""The size in bytes from which a message is not copied. Copying tens of megabytes holds up all other threads."""
RECEIVE_BYTES = 2**17
"""How much is received at once, except for large messages."""


def frame(*pieces: bytes | memoryview) -> tuple[bytes | memoryview, ...]:
    """Returns the bytes to send for a message given in pieces: its length, and the pieces."""
    size = sum(map(len, pieces))
    length = _LENGTH.pack(size)
    return (length, *pieces) if size >= LARGE else (b"".join((length, *pieces)),)


class FrameReader:
    """Splits received bytes into messages. They are written to `room`, and `took` says how many.

    Invariant: `_large` is the buffer of a large message of which the first `_filled` bytes have come; `_rest` is empty
    then. Otherwise `_rest` is the beginning of a message, and not all of that.
    """

    def __init__(self) -> None:
        self._received = bytearray(RECEIVE_BYTES)
        self._rest = bytearray()
        self._large: bytearray | None = None
        self._filled = 0

    def room(self) -> memoryview:
        """Returns where the next bytes go: if they are of a large message, to their place in it."""
        return memoryview(self._received) if self._large is None else memoryview(self._large)[self._filled :]

    def took(self, count: int) -> Iterator[bytes | memoryview]:
        """Yields the messages that the first `count` bytes in `room` complete. A large message is a view of the buffer
        that it arrived in."""
        if self._large is None:
            yield from self.feed(memoryview(self._received)[:count])
            return
        self._filled += count
        if self._filled == len(self._large):
            arrived, self._large = self._large, None
            yield memoryview(arrived)
            del arrived  # the reader may wait long for the next message

    def feed(self, received: bytes | memoryview) -> Iterator[bytes | memoryview]:
        """Yields the messages that bytes complete which were not written to `room`."""
        given = memoryview(received)
        while given:
            if self._large is not None:
                part = given[: len(self._large) - self._filled]
                self.room()[: len(part)] = part
                given = given[len(part) :]
                yield from self.took(len(part))
                continue
            self._rest += given
            given = memoryview(b"")
            start = 0
            while len(self._rest) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._rest, start)
                begin, end = start + _LENGTH.size, start + _LENGTH.size + length
                if length >= LARGE:
                    given, start = memoryview(self._rest[begin:]), len(self._rest)
                    self._large, self._filled = bytearray(length), 0
                    break
                if len(self._rest) < end:
                    break
                with memoryview(self._rest) as whole, whole[begin:end] as payload:
                    message = bytes(payload)
                start = end
                yield message
            del self._rest[:start]
