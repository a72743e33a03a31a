"""Large JSON bodies are cut and parsed piece by piece."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.serve.shared import bodies
from tenuto.serve.shared.bodies import Structure
from tenuto.serve.shared.json_pieces import PIECE, Unfit, parsed_in_pieces

TEXTS = st.text(st.sampled_from('a,:[]{}"\\\né\U0001f600'), max_size=40)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=30,
)


def arrived(body: bytes, size: int, piece_bytes: int = PIECE) -> Structure:
    """Returns the structure of a body that arrived in pieces of `size` bytes."""
    structure = Structure(piece_bytes=piece_bytes)
    for at in range(0, len(body), size):
        structure.feed(body[at : at + size])
    return structure


@given(VALUES, st.integers(1, 20), st.integers(1, 10), st.booleans(), st.sampled_from([None, 1]))
def test_a_body_parsed_in_pieces_equals_the_body_parsed_whole(
    value: Any, size: int, piece_bytes: int, escaped: bool, indent: int | None
) -> None:
    body = json.dumps(value, ensure_ascii=escaped, indent=indent).encode()
    try:
        found = parsed_in_pieces(body, arrived(body, size, piece_bytes).cuts)
    except Unfit:
        return
    assert repr(found) == repr(msgspec.json.decode(body))


@given(VALUES, st.integers(0, 10_000), st.sampled_from([b",", b'"', b"[", b"}", b"", b"\\"]), st.integers(1, 10))
def test_a_body_that_is_invalid_as_a_whole_is_invalid_in_pieces(
    value: Any, place: int, damage: bytes, piece_bytes: int
) -> None:
    body = json.dumps(value).encode()
    place %= len(body)
    body = body[:place] + damage + body[place + 1 :]
    try:
        found = parsed_in_pieces(body, arrived(body, 4, piece_bytes).cuts)
    except (Unfit, ValueError):
        return
    assert repr(found) == repr(msgspec.json.decode(body))


@pytest.mark.parametrize(
    "value",
    [
        {"messages": [{"role": "user", "content": "x" * 3000}] * 300},
        {"text": ["\U0001f600" * 5000] * 200},
        {"prompt": "hello " * 200_000, "n": 1},
        {"messages": [{"content": 'é"\\\U0001f600' * 70_000}, {"content": "x"}]},
        {"a": {"b": {"c": ["x" * 200_000, {"d": list(range(100_000))}]}}},
        "x" * 1_000_000,
    ],
    ids=["messages", "prompts", "text", "escapes", "nested", "string"],
)
def test_the_parser_never_holds_more_than_a_few_pieces_of_a_large_body(
    value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = json.dumps(value).encode()
    given_sizes: list[int] = []
    decode = msgspec.json.decode

    def noted(raw: bytes, **kind: Any) -> Any:
        given_sizes.append(len(raw))
        return decode(raw, **kind)

    monkeypatch.setattr(msgspec.json, "decode", noted)
    pieces = [body[at : at + PIECE] for at in range(0, len(body), PIECE)]
    assert bodies._value(pieces, arrived(body, PIECE).cuts) == value
    assert len(given_sizes) > len(body) / (4 * PIECE)
    assert max(given_sizes) < 4 * PIECE


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":[1],"b":2,"a":[3,4,5,6],"c":[7,8,9]}',
        b'{"a":[1,2,3,4],"b":1,"a":[5]}',
        b'{"a":[[1,2],[3,4]],"b":1,"a":[[5,6,7,8]]}',
    ],
)
def test_the_last_of_several_fields_of_one_name_also_counts_in_pieces(body: bytes) -> None:
    for piece_bytes in range(1, 12):
        cuts = arrived(body, 3, piece_bytes).cuts
        assert cuts
        assert list(parsed_in_pieces(body, cuts).items()) == list(json.loads(body).items())
