from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from tenuto.base.errors import ModelError
from tenuto.text.load import load_tokenizer
from tenuto.text.pre_tokenizers import PRE_TOKENIZERS

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def write_gguf(
    path: Path,
    *,
    model: str = "gpt2",
    pre: str | None = "gpt-2",
    add_bos: bool | None = None,
    architecture: str = "llama",
    eos: str = "<|end|>",
) -> Path:
    tokens = [*LETTERS, "ab", "12", "ĠĠ", "Ġ1", "<|end|>", "<tool>"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 2) + [3, 4])
    writer.add_token_merges(["a b", "Ġ 1", "1 2", "Ġ Ġ"])
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_eos_token_id(tokens.index(eos))
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_directory(path: Path, **config: Any) -> Path:
    backend = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(LETTERS)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>", "<|eot|>")])
    backend.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
    backend.enable_truncation(2)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_a_gguf_tokenizer_matches_its_file(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf"))
    assert [tokenizer.token_bytes(t) for t in tokenizer.encode("ab 12<|end|>")[:3]] == [b"ab", b" 1", b"2"]
    assert tokenizer.encode("<|end|>", special=True) == list(tokenizer.eos_ids) == [tokenizer.bos_id]
    assert len(tokenizer.encode("<tool>")) == 1
    assert tokenizer.chat_template == "{{ messages }}"
    assert not tokenizer.adds_bos


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", [b"a", b"  ", b" 1", b"2", b"e", b"\xcc", b"\x81"]),
        ("smollm", [b"a", b"  ", b" ", b"1", b"2", b"e", b"\xcc", b"\x81"]),
        ("llama-bpe", [b"a", b"  ", b" ", b"12", b"e", b"\xcc", b"\x81"]),
        ("refact", [b"a", b"  ", b" ", b"1", b"2", b"e", b"\xcc", b"\x81"]),
        ("dbrx", [b"a", b"  ", b" ", b"12", b"e", b"\xcc", b"\x81"]),
        ("qwen2", [b"a", b"  ", b" ", b"1", b"2", b"\xc3", b"\xa9"]),
        ("tekken", [b"a", b"  ", b" ", b"1", b"2", b"e", b"\xcc", b"\x81"]),
        ("gpt-4o", [b"a", b"  ", b" ", b"12", b"e", b"\xcc", b"\x81"]),
    ],
)
def test_words_are_split_as_in_the_models_training(tmp_path: Path, pre: str | None, pieces: list[bytes]) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", pre=pre))
    got = [tokenizer.token_bytes(t) for t in tokenizer.encode("a   12e\u0301")]
    assert got == pieces


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("llama-bpe", "It'sMyLord's 1234/\n", ["It", "'s", "MyLord", "'s", " ", "123", "4", "/\n"]),
        ("tekken", "It'sMyLord's 1234/\n", ["It", "'s", "My", "Lord", "'s", " ", "1", "2", "3", "4", "/\n"]),
        ("gpt-4o", "It'sMyLord's 1234/\n", ["It's", "My", "Lord's", " ", "123", "4", "/\n"]),
    ],
)
def test_patterns_split_words_as_published(pre: str, text: str, words: list[str]) -> None:
    cut = PRE_TOKENIZERS[pre].make().pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in cut] == words


@pytest.mark.parametrize(
    ("pre", "add_bos", "expected"), [("llama-bpe", None, True), ("tekken", None, True), ("gpt-2", True, True)]
)
def test_whether_prompts_start_with_bos_comes_from_the_file(
    tmp_path: Path, pre: str, add_bos: bool | None, expected: bool
) -> None:
    assert load_tokenizer(write_gguf(tmp_path / "m.gguf", pre=pre, add_bos=add_bos)).adds_bos is expected


@pytest.mark.parametrize(
    ("model", "pre", "reason"),
    [
        ("bert", "default", "'bert'; supported: 'gpt2' and 'llama'"),
        ("gpt2", "nonesuch", "'nonesuch' is not known; supported: dbrx, "),
        ("gpt2", "default", "does not say how text is cut into words"),
        ("gpt2", None, "does not say how text is cut into words"),
    ],
)
def test_unsupported_kinds_are_named(tmp_path: Path, model: str, pre: str | None, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        load_tokenizer(write_gguf(tmp_path / "m.gguf", model=model, pre=pre))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])  # examples write new files
@given(data=st.data())
def test_a_damaged_gguf_tokenizer_is_read_or_refused_but_never_crashes(tmp_path: Path, data: st.DataObject) -> None:
    whole = bytearray(write_gguf(tmp_path / "m.gguf").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(whole[: data.draw(st.integers(0, len(whole)) | st.just(len(whole)))])
    with suppress(ModelError):
        load_tokenizer(damaged)


@pytest.mark.parametrize("damage", [b"a \x01", b"\x01 b", b"a_b"], ids=["right", "left", "no pair"])
def test_a_merge_of_tokens_missing_from_the_vocabulary_is_refused(tmp_path: Path, damage: bytes) -> None:
    whole = write_gguf(tmp_path / "m.gguf").read_bytes()
    assert whole.count(b"a b") == 1
    (tmp_path / "damaged.gguf").write_bytes(whole.replace(b"a b", damage))
    with pytest.raises(ModelError, match="cannot be built"):
        load_tokenizer(tmp_path / "damaged.gguf")


def test_a_directory_tokenizer_matches_its_files(tmp_path: Path) -> None:
    write_directory(tmp_path, bos_token="<s>", eos_token={"content": "</s>"}, chat_template="{{ config }}")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [258, 257]}')
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.adds_bos) == (256, (257, 258), True)
    assert tokenizer.chat_template == "{{ config }}"
    assert len(tokenizer.encode("long enough")) == 11


def test_the_template_file_wins_and_a_list_gives_the_default_and_the_tool_template(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    both = load_tokenizer(write_directory(tmp_path, chat_template=several))
    assert (both.chat_template, both.tool_template) == ("d", "t")
    alone = load_tokenizer(write_directory(tmp_path, chat_template=several[:1]))
    assert (alone.chat_template, alone.tool_template) == ("t", "t")
    with pytest.raises(ModelError, match="expected text or a list of objects"):
        load_tokenizer(write_directory(tmp_path, chat_template=[1]))
    (tmp_path / "chat_template.json").write_text('{"chat_template": "j"}')
    assert load_tokenizer(tmp_path).chat_template == "j"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_tokenizer(tmp_path).chat_template == "file"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("beside")
    assert load_tokenizer(tmp_path).tool_template == "beside"


def test_a_directory_needs_only_tokenizer_json(tmp_path: Path) -> None:
    (write_directory(tmp_path) / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.adds_bos, tokenizer.chat_template) == (None, (), False, None)


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("tokenizer.json", "{", "cannot be read"),
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("tokenizer_config.json", "[]", "expected an object"),
        ("chat_template.json", '{"chat_template": 1}', "chat template"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, file: str, content: str, reason: str) -> None:
    (write_directory(tmp_path) / file).write_text(content)
    with pytest.raises(ModelError, match=f"(?s){reason}"):
        load_tokenizer(tmp_path)


def test_a_path_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no model"):
        load_tokenizer(tmp_path / "nothing")
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_tokens_described_only_in_the_configuration_are_added(tmp_path: Path) -> None:
    described = {"content": "<tool>", "special": True, "normalized": False, "rstrip": True}
    moved = {"content": "<moved>", "special": True}
    write_directory(
        tmp_path,
        added_tokens_decoder={"259": described, "7": moved},
        additional_special_tokens=["<|eot|>", {"content": "nowhere"}],
    )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("<tool> \n", special=True) == [259]
    assert set(tokenizer.control_ids) == {"<s>", "</s>", "<|eot|>", "<tool>"}


@pytest.mark.parametrize(
    "described", [{"x": {"content": "a"}}, {"5": {"content": 5}}, {"5": 7}, {"5": "content"}], ids=str
)
def test_malformed_descriptions_of_tokens_are_refused(tmp_path: Path, described: dict[str, Any]) -> None:
    write_directory(tmp_path, added_tokens_decoder=described)
    with pytest.raises(ModelError, match="added_tokens_decoder"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("told", [False, True])
def test_the_configuration_decides_whether_prompts_begin_with_bos(tmp_path: Path, told: bool) -> None:
    assert load_tokenizer(write_directory(tmp_path, bos_token="<s>", add_bos_token=told)).adds_bos is told


def test_the_end_of_a_text_to_embed_comes_from_the_post_processor_or_the_configuration(tmp_path: Path) -> None:
    directory = write_directory(tmp_path, bos_token="<s>", eos_token="</s>")
    assert load_tokenizer(directory).end_id is None
    file = str(directory / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(file)
    ids = {text: backend.token_to_id(text) for text in ("<s>", "</s>")}
    for template, end in (("<s> $A", None), ("<s> $A </s>", ids["</s>"]), ("$A <s>", ids["<s>"])):
        backend.post_processor = tokenizers.processors.TemplateProcessing(template, special_tokens=list(ids.items()))
        backend.save(file)
        assert load_tokenizer(directory).end_id == end
    plain = tmp_path / "plain"
    plain.mkdir()
    write_directory(plain, eos_token="</s>", add_eos_token=True)
    assert load_tokenizer(plain).end_id == ids["</s>"]


def test_no_text_becomes_an_end_token_no_matter_how_the_files_mark_it(tmp_path: Path) -> None:
    directory = write_directory(tmp_path)
    saved = directory / "tokenizer.json"
    saved.write_text(
        saved.read_text().replace('"special":true', '"special":false').replace('"special": true', '"special": false')
    )
    (directory / "generation_config.json").write_text('{"eos_token_id": 258}')
    tokenizer = load_tokenizer(directory)
    assert set(tokenizer.control_ids) == {"<|eot|>"}
    assert 258 not in tokenizer.encode("<|eot|>")
    file = load_tokenizer(write_gguf(tmp_path / "m.gguf", eos="<tool>"))
    assert file.eos_ids[0] not in file.encode("<tool>")
    assert file.encode("<tool>", special=True) == list(file.eos_ids)


def test_a_file_without_a_pre_tokenizer_uses_that_of_its_architecture(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", pre=None, architecture="qwen2")
    assert load_tokenizer(path).encode("e\u0301") == load_tokenizer(write_gguf(path, pre="qwen2")).encode("e\u0301")
