"""The text of a turn: when it is delivered, and how many tokens that is."""

from __future__ import annotations

import codecs
from functools import cache

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from tenuto.base.errors import InvalidRequest
from tenuto.text.stream import TextStream
from tenuto.text.tokenizer import Tokenizer


@cache
def byte_tokenizer() -> Tokenizer:
    """Makes a tokenizer with one token for each byte, some of two bytes, and a control token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ð", "Ł"), ("Ł", "ĺ"), ("Ģ", "s")]
    vocab = {text: i for i, text in enumerate([*letters, *(left + right for left, right in merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return Tokenizer(backend)


def ends_inside_a_character(ids: list[int]) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(b"".join(map(byte_tokenizer().token_bytes, ids)))
    return decoder.getstate()[0] != b""


def delivered_whole(ids: list[int], text: str, *, ended: bool = False) -> int:
    """Returns the naive answer: the most leading tokens that end with a whole character and whose text begins
    `text`."""
    return max(
        count
        for count in range(len(ids) + 1)
        if text.startswith(byte_tokenizer().decode(ids[:count]))
        and ((ended and count == len(ids)) or not ends_inside_a_character(ids[:count]))
    )


def encode(text: str) -> list[int]:
    return byte_tokenizer().encode(text)


texts = st.text(alphabet="abs😀é€\ufffd", max_size=8).map(encode)
anything = st.lists(st.integers(0, byte_tokenizer().vocab_size - 1), max_size=12)
outputs = st.lists(st.one_of(texts, anything), max_size=4).map(
    lambda parts: [token for part in parts for token in part]
)
stop_strings = st.lists(st.text(alphabet="abs😀é\ufffd", min_size=1, max_size=4), max_size=3).map(tuple)


@given(ids=outputs, stop=stop_strings)
def test_delivered_tokens_are_always_those_whose_text_was_delivered(ids: list[int], stop: tuple[str, ...]) -> None:
    stream, text = TextStream(byte_tokenizer(), stop), ""
    for end, token in enumerate(ids, 1):
        stopped = stream.push(token)
        text += stream.take_text()
        assert stream.delivered_tokens == delivered_whole(ids[:end], text)
        if stopped:
            return
    stream.finish()
    text += stream.take_text()
    assert stream.delivered_tokens == delivered_whole(ids, text, ended=True)


@given(ids=outputs, stop=stop_strings)
def test_the_text_ends_before_the_first_stop_string(ids: list[int], stop: tuple[str, ...]) -> None:
    stream, text, stopped = TextStream(byte_tokenizer(), stop), "", False
    for token in ids:
        stopped = stopped or stream.push(token)
    stream.finish()
    text = stream.take_text()
    whole = byte_tokenizer().decode(ids)
    assert whole.startswith(text)
    assert not any(one in text for one in stop)
    if stopped or any(one in whole for one in stop):
        assert any(whole[len(text) :].startswith(one) for one in stop)
    else:
        assert text == whole


@given(ids=outputs, stop=stop_strings)
def test_the_text_may_include_the_stop_string_that_ended_it(ids: list[int], stop: tuple[str, ...]) -> None:
    texts = []
    for include_stop in (False, True):
        stream = TextStream(byte_tokenizer(), stop, include_stop=include_stop)
        for token in ids:
            stream.push(token)
        stream.finish()
        texts.append(stream.take_text())
    assert texts[1] == texts[0] + (stream.stop or "")


@given(ids=outputs)
def test_without_stop_strings_finish_delivers_every_token(ids: list[int]) -> None:
    stream = TextStream(byte_tokenizer())
    assert not any(stream.push(token) for token in ids)
    stream.finish()
    assert stream.delivered_tokens == len(ids)


def test_a_character_of_four_tokens_counts_when_its_last_token_arrives() -> None:
    stream = TextStream(byte_tokenizer())
    counts = []
    for byte in "a😀".encode():
        stream.push(next(i for i in range(256) if byte_tokenizer().token_bytes(i) == bytes([byte])))
        counts.append(stream.delivered_tokens)
    assert counts == [1, 1, 1, 1, 5]
    assert stream.take_text() == "a😀"


def test_a_possible_stop_string_is_held_back_until_it_is_ruled_out() -> None:
    stream = TextStream(byte_tokenizer(), ("sss",))
    for token in encode("bss"):
        assert not stream.push(token)
    assert (stream.take_text(), stream.delivered_tokens) == ("b", 1)
    assert not stream.push(encode("a")[0])
    assert (stream.take_text(), stream.delivered_tokens) == ("ssa", 4)
    assert [stream.push(token) for token in encode("sss")] == [False, False, True]
    stream.finish()
    assert (stream.take_text(), stream.delivered_tokens) == ("", 4)


def test_requested_marks_have_a_text_and_are_found_between_characters() -> None:
    tokens = [*encode("ab"), 7, *encode("b")]
    plain, marked = TextStream(byte_tokenizer()), TextStream(byte_tokenizer(), ("sss",), marks=(("[CALL]", 7),))
    for token in tokens:
        assert not plain.push(token)
        assert not marked.push(token)
    assert marked.take_text() == "ab[CALL]b"
    assert plain.take_text() == "ab" + byte_tokenizer().decode([7]) + "b"
    assert marked.delivered_tokens == len(tokens)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="0 characters"):
        TextStream(byte_tokenizer(), ("",))


@given(ids=outputs, stop=stop_strings, least=st.integers(0, 6))
def test_the_first_tokens_are_delivered_and_stop_strings_are_matched_after_them(
    ids: list[int], stop: tuple[str, ...], least: int
) -> None:
    stream = TextStream(byte_tokenizer(), stop, least)
    text, stopped = "", False
    for end, token in enumerate(ids, 1):
        stopped = stream.push(token)
        text += stream.take_text()
        assert not (stopped and end <= least)
        assert stream.delivered_tokens == delivered_whole(ids[:end], text)
        assert (stream.stop is not None) == stopped
        if stopped:
            break
    else:
        stream.finish()
        text += stream.take_text()
    whole, first = byte_tokenizer().decode(ids), TextStream(byte_tokenizer())
    for token in ids[:least]:
        first.push(token)
    if len(ids) <= least:
        assert (text, stream.stop) == (whole, None)
        return
    passed = first.take_text()
    assert text.startswith(passed)
    assert not any(one in text[len(passed) :] for one in stop)
    if stream.stop is not None:
        assert whole[len(text) :].startswith(stream.stop)


def test_a_stop_string_that_starts_in_the_first_tokens_is_not_matched() -> None:
    stream = TextStream(byte_tokenizer(), ("ss", "sb"), 2)
    assert [stream.push(token) for token in encode("ssbs")] == [False] * 4
    assert stream.take_text() == "ssb"
    assert stream.push(encode("s")[0])
    assert (stream.stop, stream.take_text(), stream.delivered_tokens) == ("ss", "", 3)
