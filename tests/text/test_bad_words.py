"""The constraint of `bad_words`, compared with its definition, and the tokens of words."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.base.tools.grammar import Grammar
from tenuto.text.bad_words import WithoutWords, spellings
from tenuto.text.grammars import GrammarCompiler
from tenuto.text.words import witness_tokenizer

VOCAB = 40
ALL = np.array([0xFFFFFFFF, 0xFF], np.uint32)
TOKENS = st.integers(0, 4)
SEQUENCES = st.lists(st.lists(TOKENS, min_size=1, max_size=4).map(tuple), max_size=6)


def allowed(matcher: WithoutWords) -> set[int]:
    words = np.zeros_like(ALL)
    matcher.fill(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def completing(sequences: list[tuple[int, ...]], output: list[int]) -> set[int]:
    """Returns the tokens with which the output would end with one of the sequences."""
    return {token for token in range(VOCAB) for bad in sequences if (*output, token)[-len(bad) :] == bad}


@given(SEQUENCES, st.lists(TOKENS, max_size=30))
def test_a_token_is_refused_exactly_where_it_would_complete_a_sequence(
    sequences: list[tuple[int, ...]], tokens: list[int]
) -> None:
    matcher, output = WithoutWords(sequences, ALL), list[int]()
    for token in tokens:
        bad = completing(sequences, output)
        assert allowed(matcher) == set(range(VOCAB)) - bad
        ahead = matcher.copy()
        assert ahead.consume(token) is (token not in bad)
        assert bool(ahead.failure) is (token in bad)
        if token not in bad:
            assert matcher.consume(token)
            output.append(token)


def test_words_are_refused_within_a_grammar() -> None:
    tokenizer = witness_tokenizer(300)
    compiler = GrammarCompiler(tokenizer, 300, (299,))
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")

    def following(text: str, *words: str) -> set[int]:
        constraint = compiler.constraint(Grammar("regex", "[abc]{3}"), words)
        for token in tokenizer.encode(text):
            assert not constraint.push(token)
        masks = constraint.masks(())
        assert masks is not None
        return set(np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little")).tolist())

    assert following("") == {a, b, c}
    assert following("", "a") == {b, c}
    assert following("a", "ab") == {a, c}
    assert following("b", "ab") == {a, b, c}
    assert following("ba", "ab", "bac", "c") == {a}


def test_without_any_token_left_the_turn_fails() -> None:
    constraint = GrammarCompiler(witness_tokenizer(300), 300, (299,)).constraint(Grammar("regex", "a"), ["a"])
    assert constraint.masks(()) is None
    assert not constraint.push(0)
    assert constraint.failure


@pytest.mark.parametrize(("word", "texts"), [("ab", ["ab", " ab"]), (" ab", [" ab"]), ("é", ["é", " é"])])
def test_words_are_spelled_with_and_without_a_blank(word: str, texts: list[str]) -> None:
    tokenizer = witness_tokenizer(300)
    assert spellings([word, word], tokenizer) == [tuple(tokenizer.encode(text)) for text in texts]
