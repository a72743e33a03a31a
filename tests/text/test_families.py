"""Tokenizers of all families, from directories and from GGUF files, read and write text as transformers does."""

from __future__ import annotations

import unicodedata
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tenuto.text.blanks import Before
from tenuto.text.decoder import IncrementalDecoder
from tenuto.text.load import load_tokenizer
from tenuto.text.tokenizer import Tokenizer
from tests.text.families import FAMILIES, SPACE, Family, write_directory, write_gguf
from tests.text.scripts import SAMPLES, texts


class Loaded(NamedTuple):
    family: Family
    ours: list[Tokenizer]
    """From the directory, and from the GGUF file unless blanks precede only the first text, which a file cannot say."""
    theirs: Any


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import

    family = FAMILIES[request.param]
    path = tmp_path_factory.mktemp("family")
    directory = write_directory(family, path / "directory")
    places = [directory] if family.prefix == "first" else [directory, write_gguf(family, directory, path / "m.gguf")]
    return Loaded(family, [load_tokenizer(place) for place in places], AutoTokenizer.from_pretrained(directory))


def check_text(loaded: Loaded, text: str) -> None:
    expected = loaded.theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
    for ours in loaded.ours:
        ids = ours.encode(text, before=Before.NOTHING)
        assert ids == expected
        assert not any(map(ours.control_text, ids))
        decoder = IncrementalDecoder(ours)
        streamed = "".join([*(decoder.push([token]) for token in ids), decoder.flush()])
        assert streamed == ours.decode(ids)
        kept = as_kept(loaded.family, text)
        assert streamed in ((kept, f" {kept}") if loaded.family.prefix else (kept,))
        assert ours.least_tokens(text) <= len(ids)


def as_kept(family: Family, text: str) -> str:
    """Returns the part of a text that a family's tokens keep."""
    if family.normalizer is not None:
        return unicodedata.normalize("NFC", text)
    return text.replace(SPACE, " ") if family.letters else text


@pytest.mark.parametrize("text", SAMPLES)
def test_every_script_is_read_as_transformers_reads_it(loaded: Loaded, text: str) -> None:
    check_text(loaded, text)


@settings(max_examples=60)
@given(text=texts)
@example(text="")
@example(text=" ")
@example(text="x" + " " * 20 + "y" + " " * 9)
def test_any_text_is_read_as_transformers_reads_it_and_comes_back(loaded: Loaded, text: str) -> None:
    check_text(loaded, text)


@settings(max_examples=40)
@given(data=st.data())
def test_markup_is_read_as_transformers_reads_it(loaded: Loaded, data: st.DataObject) -> None:
    """Control tokens beside texts, some of which absorb white space or follow a blank."""
    control = st.sampled_from([*loaded.family.special, *loaded.family.plain])
    beside = st.sampled_from([" ", "\n", " a", "\x1f", "\x85", "\u3000"])
    text = "".join(data.draw(st.lists(texts | control | beside, max_size=6)))
    expected = loaded.theirs.encode(text, add_special_tokens=False)
    for ours in loaded.ours:
        assert ours.encode(text, special=True, before=Before.NOTHING) == expected


@settings(max_examples=40)
@given(data=st.data())
def test_any_tokens_decode_alike_at_once_and_one_by_one(loaded: Loaded, data: st.DataObject) -> None:
    """Also bytes that are not characters, and tokens that begin or end inside a character."""
    ids = data.draw(st.lists(st.integers(0, loaded.ours[0].vocab_size - 1), max_size=12))
    for ours in loaded.ours:
        decoder = IncrementalDecoder(ours)
        written = "".join([*(decoder.push([token]) for token in ids), decoder.flush()])
        assert written == ours.decode(ids)
        if not loaded.family.letters:
            theirs = loaded.theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            assert written == theirs


def test_a_directory_and_a_file_agree_on_control_tokens(loaded: Loaded) -> None:
    directory = loaded.ours[0]
    for ours in loaded.ours:
        assert ours.eos_ids == (loaded.theirs.eos_token_id,)
        assert ours.control_ids.keys() == directory.control_ids.keys()
        assert ours.fingerprint == directory.fingerprint
        assert ours.adds_bos == loaded.family.bos
        assert not loaded.family.bos or loaded.theirs.encode("a")[0] == ours.bos_id
