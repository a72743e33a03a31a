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
    reader, found, at = FrameReader(), [], 0
    while at < len(stream):
        count = len(part := stream[at : at + min(step, len(reader.room()))])
        reader.room()[:count] = part
        found += map(bytes, reader.took(count))
        at += count
    assert found == sent


def test_a_large_message_is_not_copied() -> None:
    message = bytes(LARGE)
    assert frame(message)[1] is message
    reader = FrameReader()
    assert not list(reader.feed(frame(message)[0]))
    room = reader.room()
    assert len(room) == LARGE
    (found,) = reader.took(LARGE)
    assert isinstance(found, memoryview)
    assert found.obj is room.obj
