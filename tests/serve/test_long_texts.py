"""Long texts of JSON bodies are decoded piece by piece, beside the rest."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.serve.shared import bodies, long_texts
from tenuto.serve.shared.bodies import Structure
from tenuto.serve.shared.long_texts import LONG, PIECE, Unfit, parsed_beside

TEXTS = st.text(st.sampled_from('a,:[]{}"\\\né\U0001f600'), max_size=40)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=30,
)

SMALLEST_PIECE = 24
"""In bytes: two surrogate pairs."""
LETTERS = ["a", "\\", '"', "\x00", "\n", "é", "\U0001f600", ",", "[", "}", ":"]


@st.composite
def written(draw: st.DrawFn) -> str:
    """A string as JSON, in one of the ways to write each character, sometimes with half a surrogate pair."""
    text = ""
    for letter in draw(st.lists(st.sampled_from(LETTERS), max_size=12)):
        ways = [json.dumps(letter)[1:-1], "".join(f"\\u{unit:04X}" for unit in units(letter))]
        ways += [letter] if letter.isprintable() and letter not in '"\\' else []
        text += draw(st.sampled_from(ways))
    half = draw(st.sampled_from([""] * 8 + ["\\ud83d", "\\ude00", "\\ud83d\\u0041", "\\/"]))
    return f'"{text}{half}"'


def units(letter: str) -> list[int]:
    """The character in UTF-16."""
    raw = letter.encode("utf-16-be")
    return [int.from_bytes(raw[at : at + 2]) for at in range(0, len(raw), 2)]


GAPS = st.sampled_from(["", "", "", " ", "\n \t"])
NUMBERS = st.sampled_from(
    [
        "0",
        "-0",
        "7",
        "1.5",
        "1e3",
        "1E-400",
        "1e999",
        "01",
        "NaN",
        "-Infinity",
        "123456789012345678901234567890",
        "0.1e",
    ]
)
NAMES = st.sampled_from(['"a"', '"a"', '"\\u0061"', '"b"', '"\\u0000"']) | written()
ANY_JSON = st.recursive(
    st.sampled_from(["null", "true", "fals"]) | NUMBERS | written(),
    lambda inner: (
        st.lists(st.tuples(GAPS, inner, GAPS).map("".join), max_size=5).map(lambda all_: f"[{','.join(all_)}]")
        | st.lists(st.tuples(GAPS, NAMES, GAPS, st.just(":"), GAPS, inner).map("".join), max_size=5).map(
            lambda all_: f"{{{','.join(all_)}}}"
        )
    ),
    max_leaves=20,
)
DAMAGES: list[Callable[[bytes, int], bytes]] = [
    lambda body, _: body,
    lambda body, _: body,
    lambda body, _: body + b" ]",
    lambda body, _: body + b",1",
    lambda body, _: b"\xef\xbb\xbf" + body,
    lambda body, at: body[:at],
    lambda body, at: body[:at] + b"\xe9" + body[at:],
    lambda body, at: body[:at] + b"\xed\xa0\x80" + body[at:],
    lambda body, at: body[:at] + b"," + body[at:],
    lambda body, at: body[:at] + body[at + 1 :],
]


def outcome(parse: Callable[[], Any]) -> str:
    """The value, or the error."""
    try:
        return repr(parse())
    except (ValueError, RecursionError) as error:
        return repr(error)


def places(body: bytes, size: int, long: int = LONG) -> list[tuple[int, int]]:
    """Returns the places of texts of more than `long` bytes in a body that arrives in pieces of `size` bytes."""
    structure = Structure(long=long)
    for at in range(0, len(body), size):
        structure.feed(body[at : at + size])
    return structure.texts


@given(VALUES, st.integers(1, 20), st.integers(0, 10), st.booleans(), st.sampled_from([None, 1]))
def test_a_body_parsed_beside_its_texts_equals_the_body_parsed_whole(
    value: Any, size: int, long: int, escaped: bool, indent: int | None
) -> None:
    body = json.dumps(value, ensure_ascii=escaped, indent=indent).encode()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(long_texts, "PIECE", SMALLEST_PIECE)
        found = parsed_beside(body, places(body, size, long))
    assert repr(found) == repr(msgspec.json.decode(body))


@given(VALUES, st.integers(0, 10_000), st.sampled_from([b",", b'"', b"[", b"}", b"", b"\\"]), st.integers(0, 10))
def test_a_body_that_is_invalid_as_a_whole_is_invalid_beside_its_texts(
    value: Any, place: int, damage: bytes, long: int
) -> None:
    body = json.dumps(value).encode()
    place %= len(body)
    body = body[:place] + damage + body[place + 1 :]
    try:
        found = parsed_beside(body, places(body, 4, long))
    except (Unfit, ValueError):
        return
    assert repr(found) == repr(msgspec.json.decode(body))


@settings(max_examples=100)
@given(
    st.tuples(GAPS, ANY_JSON, GAPS).map("".join),
    st.sampled_from(DAMAGES),
    st.integers(0, 10_000),
    st.integers(1, 12),
    st.integers(SMALLEST_PIECE, SMALLEST_PIECE + 20),
)
def test_any_body_has_the_same_value_or_error_with_texts_in_pieces_of_any_size(
    text: str, damage: Callable[[bytes, int], bytes], place: int, size: int, piece_bytes: int
) -> None:
    body = damage(text.encode(), place % len(text.encode()))
    expected = outcome(lambda: bodies.parsed(body))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(long_texts, "PIECE", piece_bytes)
        for long in range(20):
            texts = places(body, size, long)
            assert outcome(partial(bodies._value, [body], texts)) == expected, (long, texts)


def test_a_string_may_look_like_the_mark_of_a_text() -> None:
    for value in ({"a": "x" * 40, "\0": 5}, {"a": "x" * 40, "\0000": "y"}, ["\0000", "x" * 40], ["\0" * 40]):
        body = json.dumps(value).encode()
        for long in range(12):
            assert bodies._value([body], places(body, 3, long)) == value


def test_deep_objects_with_long_names_full_of_quotes_take_about_as_long_in_pieces_as_whole() -> None:
    name = b'"' + b'\\"' * 2000 + b'":'
    body = b"%b[%b0]%b" % ((b"{" + name) * 250, b"123456789," * 1_500_000, b"}" * 250)
    texts = places(body, PIECE)
    assert len(texts) == 250
    begin = time.thread_time()
    value = bodies._value([body], texts)
    spent = time.thread_time() - begin
    assert value == msgspec.json.decode(body)
    assert spent < 5.0, "it took minutes when every name was read once per cut and quote"


@pytest.mark.parametrize(
    "value",
    [
        {"messages": [{"role": "user", "content": "x" * 3000}] * 300},
        {"text": ["\U0001f600" * 5000] * 200},
        {"prompt": "hello " * 200_000, "n": 1},
        {"messages": [{"content": 'é"\\\U0001f600' * 70_000}, {"content": "x"}]},
        {"a": {"b": {"c": ["x" * 200_000, {"d": list(range(10_000))}]}}},
        "x" * 1_000_000,
    ],
    ids=["messages", "prompts", "text", "escapes", "nested", "string"],
)
def test_the_parser_never_holds_more_than_a_few_pieces_of_the_texts_of_a_large_body(
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
    assert bodies._value(pieces, places(body, PIECE)) == value
    assert len(given_sizes) > len(body) / (4 * PIECE)
    assert max(given_sizes) < 4 * PIECE


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":"one","b":2,"a":"another","c":"last"}',
        b'{"a":"another","b":1,"a":"one"}',
        b'{"a":["one"],"\\u0061":["another"],"b":1,"a":["last"]}',
    ],
)
def test_the_last_of_several_fields_of_one_name_also_counts_beside_its_texts(body: bytes) -> None:
    for long in range(6):
        texts = places(body, 3, long)
        assert texts
        assert list(parsed_beside(body, texts).items()) == list(json.loads(body).items())
