"""Tokenizers as Gemma has them, in directories and in GGUF files, read text as transformers does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import models, normalizers, trainers

from tenuto.base.errors import ModelError
from tenuto.text.decoder import IncrementalDecoder
from tenuto.text.load import load_tokenizer
from tenuto.text.tokenizer import Tokenizer

CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
BLANKS = ["\u2581" * count for count in range(2, 6)]
ALPHABET = " eainotrsh\n<>x_0ü漢"

texts = (st.text() | st.text(alphabet=ALPHABET)).map(lambda text: re.sub(" {6,}", " " * 5, text))
"""Longer runs of blanks than there are tokens for are cut from the left in GGUF files, and in pairs elsewhere."""


@pytest.fixture(scope="module")
def vocabulary() -> list[str]:
    """Control tokens, bytes, runs of blanks, and then tokens that were merged, the most frequent first."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[*CONTROL, *BYTES, *BLANKS], show_progress=False)
    backend.train_from_iterator([Path(__file__).read_text()], trainer)
    found = backend.get_vocab()
    return sorted(found, key=found.__getitem__)


@pytest.fixture(scope="module")
def directory(vocabulary: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As transformers saves it: pairs are ranked by what they make, and blanks are merged first of all."""
    from transformers import GemmaTokenizer  # noqa: PLC0415 - slow to import

    rank = {text: i for i, text in enumerate(vocabulary) if text not in (*CONTROL, *BYTES)}
    pairs = [(text[:cut], text[cut:]) for text in rank for cut in range(1, len(text))]
    merges: Any = [pair for pair in pairs if pair[0] in rank and pair[1] in rank]
    path = tmp_path_factory.mktemp("gemma")
    made = GemmaTokenizer(
        {text: i for i, text in enumerate(vocabulary)},
        sorted(merges, key=lambda pair: (rank[pair[0] + pair[1]], -len(pair[0]))),
        extra_special_tokens=["<start_of_turn>", "<end_of_turn>"],
        add_bos_token=True,
    )
    made.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def reference(directory: Path) -> Any:
    from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import

    return AutoTokenizer.from_pretrained(directory)


def write_gguf(path: Path, vocabulary: list[str], *, prefix: bool = False) -> Path:
    """As llama.cpp's converter does: runs of blanks are user-defined tokens, and written as they are."""
    kinds = {**dict.fromkeys(CONTROL, 3), "<unk>": 2, **dict.fromkeys(BYTES, 6), **dict.fromkeys(BLANKS, 4)}
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text.replace("\u2581", " ") if text in BLANKS else text for text in vocabulary])
    writer.add_token_scores([-1000.0 if text in kinds else -float(i) for i, text in enumerate(vocabulary)])
    writer.add_token_types([kinds.get(text, 1) for text in vocabulary])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_add_space_prefix(prefix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module", params=["directory", "GGUF"])
def ours(
    request: pytest.FixtureRequest,
    vocabulary: list[str],
    directory: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Tokenizer:
    if request.param == "directory":
        return load_tokenizer(directory)
    return load_tokenizer(write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", vocabulary))


@given(text=texts)
@example(text="     for  x in   range(3):     ü漢\U0001f600\n\n")
@example(text="<0x41> <bos> <unk>")
def test_text_is_read_as_transformers_reads_it_and_comes_back(ours: Tokenizer, reference: Any, text: str) -> None:
    ids = ours.encode(text)
    assert ids == reference.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert ours.decode(ids) == text
    decoder = IncrementalDecoder(ours)
    assert "".join([*(decoder.push([token]) for token in ids), decoder.flush()]) == text
    assert ours.least_tokens(text) <= len(ids)


@given(ids=st.lists(st.sampled_from([*range(len(CONTROL)), 0x2A + len(CONTROL), *range(263, 700)])))
def test_any_tokens_are_written_as_transformers_writes_them(ours: Tokenizer, reference: Any, ids: list[int]) -> None:
    """But for runs of bytes that are no UTF-8, of which transformers shows nothing."""
    theirs = reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert ours.decode(ids) == theirs


def test_markup_becomes_control_tokens_and_bounds_are_known(ours: Tokenizer) -> None:
    turn = ours.encode("<start_of_turn>user\n<end_of_turn>", special=True)
    assert (turn[0], turn[-1]) == (CONTROL.index("<start_of_turn>"), CONTROL.index("<end_of_turn>"))
    assert ours.bos_id == 2
    assert ours.adds_bos
    assert ours.eos_ids == (1,)
    assert ours.token_bytes(len(CONTROL) + 0xE2) == b"\xe2"
    assert ours.least_tokens("a" * 100_000) > 0


def test_tokenizers_that_put_a_space_before_a_text_are_refused(
    vocabulary: list[str], directory: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="puts a space before each text"):
        load_tokenizer(write_gguf(tmp_path / "m.gguf", vocabulary, prefix=True))
    whole = json.loads((directory / "tokenizer.json").read_text())
    whole["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(ModelError, match="decodes with Sequence; supported: byte-level BPE"):
        load_tokenizer(tmp_path)
