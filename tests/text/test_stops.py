from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.base.errors import InvalidRequest
from tenuto.text.stops import MAX_STOP_LENGTH, MAX_STOP_STRINGS, StopMatcher, _automaton

letters = st.text(alphabet="ab\n", max_size=30)
stop_lists = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Returns the first end at which the text so far ends with a stop string, and the longest such string."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def could_stop(text: str, stops: list[str]) -> int:
    """Returns the length of the longest end of `text` that begins a stop string."""
    return max(
        (n for n in range(len(text) + 1) for stop in stops if n < len(stop) and text.endswith(stop[:n])), default=0
    )


@given(pieces=st.lists(letters, max_size=8), stops=stop_lists)
def test_pieces_stop_where_a_search_of_the_whole_text_would(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    text, matched = "", None
    for piece in pieces:
        delivered, matched = matcher.push(piece)
        text += delivered
    assert (text + matcher.flush(), matched) == naive("".join(pieces), stops)


@given(pieces=st.lists(letters, max_size=8), stops=stop_lists)
def test_only_text_that_could_become_a_stop_string_is_held_back(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    text = ""
    for piece in pieces:
        _, matched = matcher.push(piece)
        if matched is not None:
            assert matcher.pending == 0
            return
        text += piece
        assert matcher.pending == could_stop(text, stops)


def test_the_stop_string_that_ends_first_wins_over_a_longer_one_begun_before() -> None:
    assert StopMatcher(["abcd", "bc"]).push("xabcd") == ("xa", "bc")


def test_text_after_a_match_is_dropped() -> None:
    matcher = StopMatcher(["end"])
    assert matcher.push("the e") == ("the ", None)
    assert matcher.push("nd of it") == ("", "end")
    assert matcher.push("more") == ("", "end")
    assert matcher.flush() == ""


@pytest.mark.parametrize(
    "stops", [[""], ["a", ""], ["a" * (MAX_STOP_LENGTH + 1)], ["a"] * (MAX_STOP_STRINGS + 1), "abc", [1]]
)
def test_malformed_stop_strings_are_rejected(stops: list[str]) -> None:
    with pytest.raises(InvalidRequest, match=r"allowed|expected"):
        StopMatcher(stops)


@given(pieces=st.lists(letters, max_size=8), stops=stop_lists)
def test_the_match_is_remembered(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    for piece in pieces:
        matcher.push(piece)
    assert matcher.matched == naive("".join(pieces), stops)[1]


def test_the_automaton_of_a_long_stop_string_can_be_shown() -> None:
    assert "_State" in repr(_automaton(["a" * MAX_STOP_LENGTH]))
