from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tenuto.base.errors import InvalidRequest
from tenuto.text.patterns import MAX_MATCH_LENGTH, MAX_PATTERN_LENGTH, MAX_SIZE, MAX_STOP_PATTERNS, stop_patterns
from tenuto.text.stops import StopMatcher

atoms = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\x61", r"\Qab\E", "(?i:A)"])
expressions = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.tuples(inner, inner).map("({0[0]}|{0[1]})".format),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{1,}", "+?"])).map("(?:{0[0]}){0[1]}".format),
    ),
    max_leaves=5,
).filter(lambda pattern: not oracle(pattern).search(""))
pieces_of_text = st.lists(st.text("ab", max_size=4), max_size=5)
LONGEST = 5
ENDINGS = [""] + ["".join(letters) for n in range(1, LONGEST + 1) for letters in itertools.product("ab", repeat=n)]


def oracle(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace(r"\Qab\E", "ab"))


def first_match(pattern: str, text: str) -> tuple[int, int] | None:
    """Returns start and end of the match that ends first, found by searching every prefix of the text."""
    for end in range(1, len(text) + 1):
        if found := oracle(pattern).search(text[:end]):
            return found.start(), end
    return None


@given(pattern=expressions, pieces=pieces_of_text)
@settings(max_examples=300)
def test_a_pattern_stops_a_text_at_its_first_match_however_the_text_is_cut(pattern: str, pieces: list[str]) -> None:
    matcher, text = StopMatcher([], [pattern]), "".join(pieces)
    delivered = "".join(matcher.push(piece)[0] for piece in pieces) + matcher.flush()
    found = first_match(pattern, text)
    assert matcher.matched == (pattern if found else None)
    assert delivered == (text[: found[0]] if found else text)


@given(pattern=expressions, pieces=pieces_of_text)
@example(pattern="(?:b){2}a", pieces=["bbb"])
@example(pattern="(?:(?:a|bb)){1,2}b", pieces=["a", "aa"])
@example(pattern="(?:b){0}a", pieces=["b"])
@example(pattern="(?:b){0,1}a", pieces=["bb"])
@example(pattern="(?:b){2,}a", pieces=["bbbb"])
@settings(max_examples=150)
def test_only_text_that_may_become_a_match_is_held_back(pattern: str, pieces: list[str]) -> None:
    assume(stop_patterns([pattern])[0].size <= LONGEST + 1)
    # Each character of a match belongs to one of the parts that `size` counts, and the shortest completion of a match
    # uses none of them twice: after its first character, at most LONGEST more. Each part matches "a" or "b".
    matcher, text = StopMatcher([], [pattern]), ""
    for piece in pieces:
        text += piece
        if matcher.push(piece)[1] is not None:
            return
    begun = [at for at in range(len(text)) if any(oracle(pattern).fullmatch(text[at:] + more) for more in ENDINGS)]
    assert matcher.pending == len(text) - min(begun, default=len(text))


@pytest.mark.parametrize(
    ("patterns", "stops", "text", "delivered", "matched"),
    [
        ([r"[0-9]+"], [], "item 42", "item ", r"[0-9]+"),
        ([r"\n\n+(User|System):"], [], "yes\n\n\nUser: no", "yes", r"\n\n+(User|System):"),
        ([r"(?i)the end|fin\."], [], "it is THE END.", "it is ", r"(?i)the end|fin\."),
        ([r"^b"], [], "abb", "abb", None),  # the rest of the text does not begin a line
        ([r"\bb"], [], "abb b", "abb ", r"\bb"),
        ([r"é+ü"], [], "aéééü", "a", r"é+ü"),
        (["x.*y"], ["b"], "axxbxy", "axx", "b"),
        (["d", "cd"], [], "abcd", "ab", "cd"),
    ],
)
def test_the_match_that_ends_first_wins(
    patterns: list[str], stops: list[str], text: str, delivered: str, matched: str | None
) -> None:
    for size in (1, 2, len(text)):
        matcher = StopMatcher(stops, patterns)
        pieces = [matcher.push(text[at : at + size])[0] for at in range(0, len(text), size)]
        assert ("".join(pieces) + matcher.flush(), matcher.matched) == (delivered, matched)


def test_an_end_anchor_matches_at_the_end_of_the_text_so_far() -> None:
    matcher = StopMatcher([], [r"\.$"])
    assert [matcher.push(piece) for piece in ("a", "b.c")] == [("a", None), ("b", ".")]


def test_a_match_beyond_the_longest_allowed_holds_no_more_text_back() -> None:
    matcher = StopMatcher([], ["a.*z"])
    assert matcher.push("a" * MAX_MATCH_LENGTH) == ("", None)
    assert matcher.push("a" * 10) == ("a" * 10, None)
    assert matcher.push("z") == ("a", "a" * (MAX_MATCH_LENGTH - 1) + "z")


@pytest.mark.parametrize(
    "patterns",
    [
        ["("],
        [r"(a)\1"],
        ["a(?=b)"],
        ["a*"],
        [""],
        [r"\C"],
        ["a" * (MAX_PATTERN_LENGTH + 1)],
        ["a"] * (MAX_STOP_PATTERNS + 1),
        [r"\p{L}{900}"],
        ["\ud800"],
        "a",
        [1],
    ],
)
def test_expressions_not_searchable_in_linear_time_or_matching_nothing_are_refused(patterns: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="allowed") as refused:
        StopMatcher([], patterns)
    assert refused.value.param == "stop_regex"


@pytest.mark.parametrize(
    "patterns",
    [
        [r"(?s)[^\x01].{980}\x{10ffff}$"],
        [r"(?s)[^\x01].{150}\x{10ffff}"] * 2,
        ["x", "[0-9]{2,255}y"],
        [r"((ab?){4}|\Qc\E){20}(de){50}"],
    ],
)
def test_expressions_that_could_be_slow_to_search_are_refused_alone_and_together(patterns: list[str]) -> None:
    with pytest.raises(InvalidRequest, match=f"characters, classes and assertions; allowed: {MAX_SIZE} in all"):
        stop_patterns(patterns)


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        (r"(?s)<.{1,250}>", 252),
        (r"(?i)(user|assistant):\s", 15),
        (r"\pL{3,9}!", 10),
        (r"a*b+?c?[d-f]{2,}", 5),
        (r"\Qa+\E{3}|((b|c){2}){4}$", 21),
    ],
)
def test_an_expressions_size_is_its_parts_times_their_repetitions(pattern: str, size: int) -> None:
    (compiled,) = stop_patterns([pattern])
    assert compiled.size == size


def test_an_expression_that_backtracking_would_never_finish_is_searched_at_once() -> None:
    matcher = StopMatcher([], ["(a|aa)+$b", "(a*)*c", "(a|b)*a(a|b){12}c"])
    for _ in range(200):
        assert matcher.push("ab" * 5)[1] is None
    assert matcher.pending == MAX_MATCH_LENGTH
