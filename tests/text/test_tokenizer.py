from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from tenuto.base.errors import InvalidRequest, ModelError
from tenuto.base.turns import Message
from tenuto.text.chat import ChatTemplate
from tenuto.text.tokenizer import Tokenizer

DIVERSE = [
    "",
    "Hello world",
    "  leading, trailing  and\tinner   space \n\n\n x\r\n",
    "1234567890 3.14 1,000,000 v2 ½ ٣",
    "it's I'LL we've DON'T",
    "été naïve Straße Ελλάδα Привет",
    "日本語と中文，한국어。",
    "😀👩‍👩‍👧‍👦🇺🇳 e\u0301",
    "def f(x):\n    return x ** 2  # <b>&amp;</b>",
]


@pytest.fixture(scope="session")
def reference(smollm2_path: Path) -> Any:
    """The default model's tokenizer, read by `transformers` from the same file, but with the pre-tokenizer that SmolLM2
    is published with. The conversion uses GPT-2's instead, which differs where spaces precede a digit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import, and only this needs it

        loaded = AutoTokenizer.from_pretrained(
            str(smollm2_path.parent), gguf_file=smollm2_path.name, local_files_only=True
        )
    digits = pre_tokenizers.Digits(individual_digits=True)
    loaded.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return loaded


@pytest.mark.parametrize("text", DIVERSE)
def test_the_default_model_reads_text_as_transformers_does(smollm2: Tokenizer, reference: Any, text: str) -> None:
    assert smollm2.encode(text) == reference.encode(text, add_special_tokens=False)
    assert smollm2.decode(smollm2.encode(text)) == text


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="<")))  # control tokens
def test_the_default_model_reads_any_text_as_transformers_does(smollm2: Tokenizer, reference: Any, text: str) -> None:
    assert smollm2.encode(text) == reference.encode(text, add_special_tokens=False)


def test_the_default_model_reads_markup_as_transformers_does(smollm2: Tokenizer, reference: Any) -> None:
    text = "<|im_start|>user\nHi <|im_end|>\n<|endoftext|>"
    assert smollm2.encode(text, special=True) == reference.encode(text, add_special_tokens=False)
    assert smollm2.decode(smollm2.encode(text, special=True), special=True) == text


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=40))
def test_the_default_model_renders_chats_as_transformers_does(smollm2: Tokenizer, reference: Any, text: str) -> None:
    assert smollm2.chat_template is not None
    messages = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "b"},
    ]
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    chat = ChatTemplate(smollm2.chat_template, smollm2)
    ours = chat.opening([Message.from_dict(message) for message in messages]).tokens
    assert ours == reference.encode(expected, add_special_tokens=False)


def test_the_default_model_ends_answers_with_its_end_of_turn(smollm2: Tokenizer) -> None:
    assert smollm2.eos_ids == tuple(smollm2.encode("<|im_end|>", special=True))
    assert smollm2.control_text(smollm2.bos_id) == "<|im_start|>"
    assert not smollm2.adds_bos
    assert smollm2.vocab_size == 49152


@given(text=st.text())
def test_encoded_text_decodes_unchanged(small: Tokenizer, text: str) -> None:
    assert small.decode(small.encode(text)) == text


@given(pieces=st.lists(st.one_of(st.text(max_size=5), st.sampled_from(["<|im_end|>", "<|", "</s>", "[INST]"]))))
def test_plain_text_encodes_to_no_control_tokens(small: Tokenizer, pieces: list[str]) -> None:
    text = "".join(pieces)
    assert not any(map(small.control_text, small.encode(text)))
    assert small.decode(small.encode(text)) == text
    assert small.decode(small.encode(text, special=True), special=True) == text


def test_a_token_added_as_text_is_one_token_and_stays_text(small: Tokenizer) -> None:
    (token,) = small.encode("<think>")
    assert small.token_bytes(token) == b"<think>"
    assert not small.control_text(token)


def test_token_bytes_are_raw(small: Tokenizer) -> None:
    assert [small.token_bytes(token) for token in small.encode("é")] == [b"\xc3", b"\xa9"]
    assert small.token_bytes(small.encode("</s>", special=True)[0]) == b""
    assert small.token_bytes(small.vocab_size) == b""


def test_a_lone_surrogate_is_rejected(small: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        small.encode("a\ud800")


def test_a_control_token_may_absorb_the_space_beside_it() -> None:
    backend = byte_level()
    backend.add_tokens([AddedToken("<a>", special=True, lstrip=True), AddedToken("<b>", special=True, rstrip=True)])
    tokenizer = Tokenizer(backend)
    text = "x <a> <b> y"
    assert tokenizer.decode(tokenizer.encode(text, special=True), special=True) == "x<a> <b>y"


def test_a_tokenizer_whose_plain_text_is_a_control_token_is_refused() -> None:
    backend = byte_level("stop")
    backend.add_tokens([AddedToken("stop", special=True, normalized=False)])
    with pytest.raises(ModelError, match="'stop' encodes to one"):
        Tokenizer(backend)


def test_other_kinds_of_tokenizer_are_refused() -> None:
    with pytest.raises(ModelError, match="supported: byte-level BPE"):
        Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))


def byte_level(*words: str) -> tokenizers.Tokenizer:
    vocab = {text: i for i, text in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *words])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend
