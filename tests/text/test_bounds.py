"""Lower bounds for the tokens of a text: with every tokenizer, a text has at least that many tokens."""

from __future__ import annotations

import sys
import unicodedata
from typing import Any, Literal

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from tenuto.base.errors import ContextExceeded
from tenuto.base.turns import Message
from tenuto.text.bounds import _SHRINKS
from tenuto.text.chat import ChatTemplate
from tenuto.text.room import Room
from tenuto.text.template import Template
from tenuto.text.tokenizer import Tokenizer
from tenuto.text.words import CHAT_TEMPLATE, witness_tokenizer

EVERY_CHARACTER = [
    letter for letter in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(letter) not in ("Cn", "Co", "Cs")
]
"""All assigned characters; the others are normalized to themselves."""


def size(text: str) -> int:
    return len(text.encode())


def room(tokens: int) -> Room:
    return Room(history=0, allowed=tokens, limit=tokens)


def made(
    normalizer: Any = None, pre_tokenizer: Any = None, letters: list[str] | None = None, added: AddedToken | None = None
) -> Tokenizer:
    """Makes a tokenizer with one token for each byte, and one of two characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if letters is None else letters
    backend = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate([*alphabet, "aa"])}, [("a", "a")]))
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = bytes_of if pre_tokenizer is None else pre_tokenizers.Sequence([pre_tokenizer, bytes_of])
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    if added is not None:
        backend.add_tokens([added])
    return Tokenizer(backend)


Form = Literal["NFC", "NFD", "NFKC", "NFKD"]


def worst(form: Form) -> float:
    """Returns the factor by which normalizing can shorten a text, the worst over all characters it may produce."""
    decompose: Literal["NFD", "NFKD"] = "NFKD" if "K" in form else "NFD"
    longest: dict[str, int] = {}  # the longest writing of each character of a decomposition, in bytes
    for letter in EVERY_CHARACTER:
        parts = unicodedata.normalize(decompose, letter)
        for part in parts:
            longest[part] = max(longest.get(part, 0), -(-size(letter) // len(parts)))
    return max(
        sum(longest[part] for part in unicodedata.normalize(decompose, letter)) / size(letter)
        for letter in EVERY_CHARACTER
        if unicodedata.normalize(form, letter) == letter
    )


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_normalizing_shrinks_no_text_beyond_the_assumed_bound(form: Form) -> None:
    assert worst(form) <= _SHRINKS[form]


def test_lowercasing_shrinks_no_character_beyond_the_assumed_bound() -> None:
    lower = normalizers.Lowercase()
    assert max(size(letter) / size(lower.normalize_str(letter)) for letter in EVERY_CHARACTER) <= _SHRINKS["Lowercase"]


@given(text=st.text() | st.text(alphabet="aa \u212a\u0301\u1112\u1161\u11ab<|im_end>"))
@example(text=" " * 500)
@example(text="\u212a" * 500)
@pytest.mark.parametrize(
    "normalizer", [None, normalizers.NFC(), normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])]
)
def test_a_text_has_at_least_the_estimated_number_of_tokens(normalizer: Any, text: str) -> None:
    tokenizer = made(normalizer)
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))


@given(text=st.text() | st.text(alphabet=" a<|im_end>e"))
@example(text="<|im_end|>" * 9)
@example(text=" " * 5000)
@example(text="\x04\U00080000" * 1000)
def test_a_text_of_the_default_model_has_at_least_the_estimated_number_of_tokens(smollm2: Tokenizer, text: str) -> None:
    for special in (False, True):
        assert smollm2.least_tokens(text) <= len(smollm2.encode(text, special=special))


@pytest.mark.parametrize(
    "tokenizer",
    [
        made(normalizers.Strip()),
        made(normalizers.Replace("a", "")),
        made(normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])),
        made(pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
        made(pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
        made(normalizers.NFC(), letters=["a", "b"]),
        made(added=AddedToken("<pad>", lstrip=True)),
    ],
    ids=["strip", "replace", "accents", "white space", "split", "missing bytes", "swallowing token"],
)
def test_tokenizers_that_may_drop_text_have_no_lower_bound(tokenizer: Tokenizer) -> None:
    text = " " * 100_000
    assert tokenizer.least_tokens(text) == 0


def test_a_pre_tokenizer_that_only_splits_bounds_a_token() -> None:
    cutting = pre_tokenizers.Split(" ", "isolated")
    assert made(pre_tokenizer=cutting).least_tokens("a" * 1000) == 500
    assert made(normalizers.NFC(), cutting).least_tokens("a" * 1000) == 125


@given(text=st.text() | st.text(alphabet="ab\x04\x06é\U00080000"))
@example(text="\x04" * 1000)
@example(text="a\x04a" * 1000)
def test_characters_missing_from_the_vocabulary_are_not_counted(text: str) -> None:
    tokenizer = made(letters=[letter for letter in sorted(pre_tokenizers.ByteLevel.alphabet()) if letter not in "bĄĆÃ"])
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))
    assert tokenizer.least_tokens("a\x04" * 1000) == 500


def test_the_default_models_tokens_are_bounded(smollm2: Tokenizer) -> None:
    assert smollm2.least_tokens("a" * 81_000) == 1000
    assert smollm2.least_tokens("\x04" * 81_000) == len(smollm2.encode("\x04" * 81_000)) == 0


@given(
    text=st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "<|im_", "<", "x", "é", "\U000f0000"])).map("".join)
)
def test_user_text_is_kept_apart_from_markup_wherever_a_window_ends(text: str) -> None:
    whole = ChatTemplate(CHAT_TEMPLATE, witness_tokenizer(1000)).opening([Message("user", text)])
    with pytest.MonkeyPatch.context() as patch:
        for module in ("guard", "bounds"):
            patch.setattr(f"tenuto.text.{module}.WINDOW", 3)
        template = ChatTemplate(CHAT_TEMPLATE, witness_tokenizer(1000))
        assert template.opening([Message("user", text)]) == whole
        least = -(-size(text) // 12)
        assert template.opening([Message("user", text)], room=room(len(whole.tokens))) == whole
        with pytest.raises(ContextExceeded):
            template.opening([Message("user", text)], room=room(least - 1))


def test_texts_that_cannot_fit_are_refused_before_they_are_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(CHAT_TEMPLATE, witness_tokenizer(1000))
    opened = template.opening([Message("user", "x")], room=room(50))
    monkeypatch.setattr(Template, "render", lambda *_, **__: pytest.fail("a text that cannot fit was rendered"))
    for long in ([Message("user", "x" * 10_000)], [Message("user", "x" * 100)] * 100):
        with pytest.raises(ContextExceeded):
            template.opening(long, room=room(50))
        with pytest.raises(ContextExceeded):
            template.delta(opened.conversation, long, last_token=5, room=room(50))


def test_text_that_a_template_trims_is_not_counted() -> None:
    trimming = CHAT_TEMPLATE.replace("message.content", "message.content | trim")
    template = ChatTemplate(trimming, witness_tokenizer(1000))
    assert len(template.opening([Message("user", " " * 100_000 + "x")], room=room(50)).tokens) < 50
