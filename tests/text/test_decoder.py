from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tenuto.text.decoder import IncrementalDecoder
from tenuto.text.tokenizer import Tokenizer


@given(data=st.data())
def test_pieces_add_up_to_the_text_of_all_tokens(small: Tokenizer, data: st.DataObject) -> None:
    emoji = st.sampled_from(small.encode("😀é日"))
    token = st.one_of(st.integers(0, small.vocab_size + 3), emoji)
    pieces = data.draw(st.lists(st.lists(token, max_size=5)))
    decoder = IncrementalDecoder(small)
    text = "".join(decoder.push(piece) for piece in pieces) + decoder.flush()
    assert text == small.decode(token for piece in pieces for token in piece)


@given(text=st.text())
def test_only_whole_characters_come_out(small: Tokenizer, text: str) -> None:
    decoder = IncrementalDecoder(small)
    done = ""
    for token in small.encode(text):
        done += decoder.push([token])
        assert text.startswith(done)
    assert done == text
    assert decoder.flush() == ""


def test_an_emoji_appears_with_its_last_token(small: Tokenizer) -> None:
    decoder = IncrementalDecoder(small)
    assert [decoder.push([token]) for token in small.encode("😀")] == ["", "", "", "😀"]


def test_an_emoji_cut_off_at_the_end_is_one_replacement_character(small: Tokenizer) -> None:
    decoder = IncrementalDecoder(small)
    assert decoder.push(small.encode("a😀")[:-1]) == "a"
    assert decoder.flush() == "\ufffd"
    assert decoder.push(small.encode("b")) == "b"


def test_control_tokens_are_not_text(small: Tokenizer) -> None:
    assert IncrementalDecoder(small).push(small.encode("a<|im_end|>b", special=True)) == "ab"
