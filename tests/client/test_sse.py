from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.client.sse import EventParser, ServerEvent
from tenuto.serve.shared.sse import data, event


def parsed(stream: bytes) -> list[tuple[str, str, str]]:
    return [(e.name, e.data, e.id) for e in EventParser().feed(stream)]


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_names_data_and_ids_are_read_with_any_line_ending(end: str) -> None:
    lines = ["event: delta", "id: 7", "data: one", "data:two", "", "data:  three", "", ""]
    assert parsed(end.join(lines).encode()) == [("delta", "one\ntwo", "7"), ("message", " three", "7")]


def test_fields_the_standard_ignores_are_ignored() -> None:
    assert parsed(b"\xef\xbb\xbfdata: a\n\n") == [("message", "a", "")]
    assert parsed(b": ping\n\nevent: x\n\ndata: b\n\n") == [("message", "b", "")]  # without data there is no event
    assert parsed(b"retry: 5\nnonsense\nid: a\0b\ndata\n\n") == [("message", "", "")]
    assert parsed(b"data: cut off\n") == []
    assert parsed("data: \u00fc\n\n".encode() + b"data: \xff\n\n")[0] == ("message", "\u00fc", "")


@given(
    st.lists(st.text(alphabet="ab:\n\r \u00e9", max_size=8), max_size=6),
    st.sampled_from([b"\n", b"\r", b"\r\n"]),
    st.data(),
)
def test_a_stream_is_parsed_alike_wherever_it_is_cut(texts: list[str], end: bytes, draw: st.DataObject) -> None:
    stream = b"".join(
        b"id: %d" % number + end + b"".join(b"data: " + line.encode() + end for line in text.splitlines()) + end
        for number, text in enumerate(texts)
    )
    parser, events, rest = EventParser(), list[ServerEvent](), stream
    while rest:
        cut = draw.draw(st.integers(1, min(len(rest), 9)))
        events += parser.feed(rest[:cut])
        rest = rest[cut:]
    assert events == EventParser().feed(stream)


def test_the_clients_parser_reads_the_servers_events() -> None:
    said = {"text": "a\nb\u2028\r", "tokens": [1]}
    assert parsed(event("delta", said, 3)) == [("delta", '{"text":"a\\nb\u2028\\r","tokens":[1]}', "3")]
    assert parsed(data("x")) == [("message", '"x"', "")]
