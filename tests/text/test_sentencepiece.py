"""Tokenizers like Gemma's, in directories and in GGUF files, read text as transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from tenuto.base.errors import ModelError
from tenuto.base.turns import Message
from tenuto.text.blanks import Before
from tenuto.text.chat import ChatTemplate
from tenuto.text.decoder import IncrementalDecoder
from tenuto.text.load import load_tokenizer
from tenuto.text.tokenizer import Tokenizer

CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
BLANKS = ["\u2581" * count for count in range(2, 6)]
ALPHABET = " eainotrsh\n<>x_0ü漢"

texts = st.text() | st.text(alphabet=ALPHABET)


@pytest.fixture(scope="module")
def vocabulary() -> list[str]:
    """Returns control tokens, bytes, runs of blanks, and then merged tokens, the most frequent first."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[*CONTROL, *BYTES, *BLANKS], show_progress=False)
    backend.train_from_iterator([Path(__file__).read_text()], trainer)
    found = backend.get_vocab()
    return sorted(found, key=found.__getitem__)


@pytest.fixture(scope="module")
def directory(vocabulary: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a directory as published: pairs are ranked by their result; blanks are merged before all others, the
    longest runs first."""
    from transformers import GemmaTokenizer  # noqa: PLC0415 - slow to import

    made_first = sorted(BLANKS, key=len, reverse=True)
    products = made_first + [text for text in vocabulary if text not in (*CONTROL, *BYTES, *BLANKS)]
    rank = {text: i for i, text in enumerate(products)}
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


def write_gguf(path: Path, vocabulary: list[str], *, prefix: bool = False, architecture: str = "gemma3") -> Path:
    """Writes a file as llama.cpp's converter does: runs of blanks are user-defined tokens, written literally."""
    kinds = {**dict.fromkeys(CONTROL, 3), "<unk>": 2, **dict.fromkeys(BYTES, 6), **dict.fromkeys(BLANKS, 4)}
    writer = gguf.GGUFWriter(path, architecture)
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
    """Except for runs of invalid UTF-8, which transformers omits."""
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


PREPEND = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
STRIP = decoders.Sequence(
    [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
KINDS = {
    "normalizer": (PREPEND, None),
    "always": (None, pre_tokenizers.Metaspace(prepend_scheme="always", split=False)),
    "first": (None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "never": (None, pre_tokenizers.Metaspace(prepend_scheme="never", split=False)),
}


@pytest.fixture(scope="module", params=KINDS)
def with_blanks(
    request: pytest.FixtureRequest, directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """Returns our tokenizer and theirs, which put blanks before texts."""
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.normalizer, backend.pre_tokenizer = KINDS[request.param]
    backend.decoder = STRIP
    path = tmp_path_factory.mktemp(request.param)
    backend.save(str(path / "tokenizer.json"))
    return load_tokenizer(path), backend


marked = st.lists(texts | st.sampled_from(["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>\n"]), max_size=6)


@given(parts=marked, cut=st.integers(0, 6))
@example(parts=["<bos>", "[INST] a", "b [/INST]", "<eos>", " c"], cut=4)
@example(parts=["a", " b"], cut=1)
def test_blanks_are_put_before_texts_as_in_transformers_wherever_a_history_is_cut(
    with_blanks: tuple[Tokenizer, tokenizers.Tokenizer], parts: list[str], cut: int
) -> None:
    """The cuts are beside control tokens, where additions to a history begin."""
    ours, theirs = with_blanks
    text = "".join(parts)
    expected = theirs.encode(text, add_special_tokens=False).ids
    assert ours.encode(text, special=True, before=Before.NOTHING) == expected
    first, rest = "".join(parts[:cut]), "".join(parts[cut:])
    found = ours.encode(first, special=True, before=Before.NOTHING)
    if found and ours.before(found[-1]) is Before.CONTROL:
        assert found + ours.encode(rest, special=True, before=ours.before(found[-1])) == expected


def test_a_continued_text_gets_no_blank(vocabulary: list[str], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", vocabulary, prefix=True))
    bos, eos = CONTROL.index("<bos>"), CONTROL.index("<eos>")
    opened = tokenizer.encode("a <eos>b", special=True, before=tokenizer.before(None))
    assert [tokenizer.written_bytes(token) for token in opened if token == eos] == [b"<eos>"]
    assert tokenizer.decode(opened, special=True) == " a <eos> b"
    assert tokenizer.decode(tokenizer.encode("a", before=tokenizer.before(bos))) == " a"
    assert tokenizer.decode(tokenizer.encode("a", before=tokenizer.before(opened[0]))) == "a"
    assert tokenizer.decode(tokenizer.encode("a")) == "a"
    without = load_tokenizer(write_gguf(tmp_path / "n.gguf", vocabulary))
    assert without.decode(without.encode("a", before=without.before(None))) == "a"


TEMPLATE = (
    "<bos>{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
)


def test_turns_of_a_model_with_blanks_add_up_to_the_whole_conversation(
    with_blanks: tuple[Tokenizer, tokenizers.Tokenizer],
) -> None:
    ours, theirs = with_blanks
    chat = ChatTemplate(TEMPLATE, ours)
    tokens, earlier = chat.opening([Message("user", " the text")])
    for ended, question in ((True, "and more"), (False, " for x")):
        tokens += ours.encode("an answer")
        tokens += [CONTROL.index("<end_of_turn>")] * ended
        added, earlier = chat.delta(earlier, [Message("user", question)], last_token=tokens[-1])
        tokens += added
    whole = (
        "<bos><start_of_turn>user\n the text<end_of_turn>\n<start_of_turn>assistant\nan answer<end_of_turn>\n"
        "<start_of_turn>user\nand more<end_of_turn>\n<start_of_turn>assistant\nan answer<end_of_turn>\n"
        "<start_of_turn>user\n for x<end_of_turn>\n<start_of_turn>assistant\n"
    )
    assert tokens == theirs.encode(whole, add_special_tokens=False).ids


def test_control_tokens_of_phi3_absorb_the_white_space_after_them(vocabulary: list[str], tmp_path: Path) -> None:
    made = {}
    for architecture in ("phi3", "llama"):
        path = write_gguf(tmp_path / f"{architecture}.gguf", vocabulary, prefix=True, architecture=architecture)
        tokenizer = load_tokenizer(path)
        made[architecture] = tokenizer.decode(tokenizer.encode("<eos>\n a", special=True), special=True)
    assert made == {"phi3": "<eos> a", "llama": "<eos> \n a"}


def test_tokenizers_with_other_decoders_are_refused(directory: Path, tmp_path: Path) -> None:
    whole = json.loads((directory / "tokenizer.json").read_text())
    whole["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(ModelError, match="decodes with Sequence; supported: byte-level BPE"):
        load_tokenizer(tmp_path)
