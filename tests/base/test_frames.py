"""Messages on a byte stream."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tenuto.base.wire.frames import LARGE, FrameReader, frame


@given(st.lists(st.sampled_from([0, 1, 5, LARGE - 1, LARGE, LARGE + 3]), max_size=6), st.integers(1, 2 * LARGE))
def test_messages_arrive_as_sent_however_the_stream_is_cut(sizes: list[int], size: int) -> None:
    sent = [bytes([number]) * length for number, length in enumerate(sizes)]
    stream = b"".join(piece for message in sent for piece in frame(message))
    reader, found = FrameReader(), list[bytes]()
    step = max(size, len(stream) // 50)
    for at in range(0, len(stream), step):
        found += map(bytes, reader.feed(stream[at : at + step]))
    assert found == sent


def test_a_large_message_is_not_copied() -> None:
    message = bytes(LARGE)
    assert frame(message)[1] is message
    reader = FrameReader()
    buffer = reader._buffer
    (found,) = reader.feed(b"".join(frame(message)))
    assert isinstance(found, memoryview)
    assert found.obj is buffer
