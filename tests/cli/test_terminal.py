"""Answers on a terminal break at words, whatever pieces they arrive in."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tenuto.cli.terminal import WordWrap

TEXT = st.text(st.sampled_from("ab,.  \n\t中é\U0001f600"), max_size=80)


def wrapped(pieces: list[str], width: int) -> str:
    wrap = WordWrap(width)
    return "".join([*map(wrap.feed, pieces), wrap.rest()])


@given(TEXT, st.integers(4, 30), st.lists(st.integers(0, 80), max_size=8))
def test_text_in_any_pieces_keeps_its_words_and_fits_the_line(text: str, width: int, cuts: list[int]) -> None:
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    shown = wrapped([text[a:b] for a, b in pairwise(places)], width)
    assert shown == wrapped([text], width)
    assert "".join(shown.split()) == "".join(text.split())
    for line in shown.split("\n"):
        assert cell_len(line) <= width or len(line.split()) == 1


def test_a_line_breaks_at_a_word_and_indentation_stays() -> None:
    assert wrapped(["one two thr", "ee\n    four"], 10) == "one two\nthree\n    four"


def test_an_emoji_that_does_not_fit_begins_a_line_also_when_it_arrives_with_its_word() -> None:
    assert wrapped(["aaa", "\U0001f600"], 4) == wrapped(["aaa\U0001f600"], 4) == "aaa\n\U0001f600"


def test_a_word_that_fills_the_line_goes_on_there_however_it_arrives() -> None:
    assert wrapped(["aaaa", "a"], 4) == wrapped(["aaaaa"], 4) == "aaaaa"


def test_a_word_wider_than_the_line_is_shown_as_it_arrives() -> None:
    wrap = WordWrap(8)
    assert wrap.feed("abcdefgh") == "abcdefgh"
