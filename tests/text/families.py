"""Small tokenizers with the structure of each model family, saved as directories and as GGUF files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.text.scripts import SAMPLES

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPACE = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
BLANKS = ("   ", "    ")
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class Family:
    """`pre` is the value of `tokenizer.ggml.pre` in its GGUF files, and `architecture` their architecture. `special`
    begins with the end token and, if prompts begin with one (`bos`), that token. `letters`: BPE of characters with byte
    fallback, as in SentencePiece. `runs`: runs of blanks are tokens."""

    pre: str
    architecture: str
    special: Sequence[str]
    words: Any = None
    normalizer: Any = None
    letters: bool = False
    prefix: str = ""
    """The part that puts a blank before a text: the normalizer, the pre-tokenizer, or ""."""
    whole_words: bool = False
    bos: bool = False
    plain: Sequence[str] = ()
    """Tokens added as text."""
    left: bool = False
    right: bool = False
    """Control tokens absorb white space beside them."""
    runs: bool = False


def split(pattern: str, *, removed: bool = False) -> Any:
    behavior = "removed" if removed else "isolated"
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior=behavior, invert=removed),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


GPT_2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT_2])
THINKING = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TURNS = ("<|end_of_text|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
INST = ("</s>", "<s>", "[INST]", "[/INST]")
FAMILIES = {
    "GPT-2": Family("gpt-2", "gpt2", ("<|endoftext|>",), GPT_2, plain=BLANKS),  # as in Phi-2
    "SmolLM2": Family("smollm", "llama", CHATML, DIGITS),
    "Granite 3": Family("refact", "granite", ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"), DIGITS),
    "Llama 3": Family("llama-bpe", "llama", TURNS, split(LLAMA_3), whole_words=True, bos=True),
    "SmolLM3": Family("smaug-bpe", "smollm3", CHATML, split(LLAMA_3), plain=THINKING),
    "Qwen": Family("qwen2", "qwen3", CHATML, split(QWEN_2), normalizers.NFC(), plain=THINKING),
    "Phi-4": Family(
        "dbrx", "phi3", (*CHATML, "<|im_sep|>"), split(LLAMA_3, removed=True), left=True, right=True
    ),
    "Mistral Nemo": Family("tekken", "llama", INST, split(TEKKEN), whole_words=True, bos=True),
    "gpt-oss": Family(
        "gpt-4o", "gpt-oss", ("<|return|>", "<|startoftext|>", "<|start|>", "<|message|>", "<|end|>"), split(O200K)
    ),
    "Llama 2": Family("default", "llama", INST, letters=True, prefix="normalizer", bos=True),
    "Mistral 7B": Family("default", "llama", INST, letters=True, prefix="first", bos=True),
    "Phi-3": Family(
        "default", "phi3", ("<|end|>", "<s>", "<|user|>", "<|assistant|>"),
        letters=True, prefix="normalizer", right=True,
    ),
    "Gemma": Family(
        "default", "gemma3", ("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        pre_tokenizers.Split(" ", behavior="merged_with_previous"), letters=True, bos=True, runs=True,
    ),
}  # fmt: skip


def write_directory(family: Family, path: Path) -> Path:
    """Writes a directory as transformers does."""
    backend = _with_letters(family) if family.letters else _with_bytes(family)
    for text in family.special:
        swallows = text not in ("<s>", "<|endoftext|>") or family.left
        backend.add_tokens(
            [AddedToken(text, special=True, normalized=False, lstrip=family.left, rstrip=family.right and swallows)]
        )
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.plain])
    end, opening = family.special[0], family.special[1] if family.bos else None
    if opening is not None:
        ids = [(opening, backend.token_to_id(opening))]
        backend.post_processor = processors.TemplateProcessing(f"{opening} $A", special_tokens=ids)
    path.mkdir()
    backend.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "bos_token": opening}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def _with_bytes(family: Family) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=family.whole_words))
    backend.normalizer, backend.pre_tokenizer = family.normalizer, family.words
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, min_frequency=1, show_progress=False)
    backend.train_from_iterator(SAMPLES, trainer)
    return backend


def _with_letters(family: Family) -> tokenizers.Tokenizer:
    """Merges every pair of tokens that forms a token: more frequent ones first, and runs of blanks before all others
    or, where they are not tokens, last."""
    control = ["<unk>", *family.special]
    runs = [SPACE * length for length in range(2, 9)]
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")  # blanks only begin words
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=[*control, *BYTES, *runs], max_token_length=8, show_progress=False
    )
    trained.train_from_iterator(SAMPLES, trainer)
    found = trained.get_vocab()
    ranked = sorted(found.keys() - {*control, *BYTES, *runs}, key=found.__getitem__)
    products = [*reversed(runs), *ranked] if family.runs else [*ranked, *runs]
    merges = [
        (text[:cut], text[cut:])
        for text in products
        for cut in range(len(text) - 1, 0, -1)
        if text[:cut] in found and text[cut:] in found and not {text[:cut], text[cut:]} & {*control, *BYTES}
    ]
    backend = tokenizers.Tokenizer(
        models.BPE(found, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True, dropout=None)
    )
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    blanks = normalizers.Replace(" ", SPACE)
    if family.prefix == "first":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    elif family.prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), blanks])
    else:
        backend.normalizer, backend.pre_tokenizer = blanks, family.words
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if family.prefix else steps)
    backend.add_tokens([AddedToken("<unk>", special=True, normalized=False)])
    if family.runs:
        backend.add_tokens([AddedToken(run, special=False, normalized=False) for run in runs])
    return backend


def write_gguf(family: Family, directory: Path, path: Path) -> Path:
    """Writes a directory's tokenizer as llama.cpp's converter does."""
    published = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    added = {token["id"]: token for token in published["added_tokens"]}
    ids = {i: text for text, i in published["model"]["vocab"].items()} | {i: t["content"] for i, t in added.items()}
    tokens, types, scores = list[str](), list[int](), list[float]()
    for i in range(len(ids)):
        text = ids[i]
        kind = 2 if text == "<unk>" else 6 if text in BYTES else 1
        if i in added and kind == 1:
            kind = 3 if added[i]["special"] else 4
        run = text.strip(SPACE) == "" and len(text) > 1
        tokens.append(text.replace(SPACE, " ") if kind == 4 else text)
        types.append(kind)
        scores.append(-1e9 if run or kind != 1 else -float(i))
    writer = gguf.GGUFWriter(path, family.architecture)
    writer.add_tokenizer_model("llama" if family.letters else "gpt2")
    writer.add_tokenizer_pre(family.pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if family.letters:
        writer.add_token_scores(scores)
        writer.add_add_space_prefix(bool(family.prefix))
    else:
        writer.add_token_merges([" ".join(pair) for pair in published["model"]["merges"]])
    writer.add_eos_token_id(tokens.index(family.special[0]))
    writer.add_bos_token_id(tokens.index(family.special[min(1, len(family.special) - 1)]))
    writer.add_add_bos_token(family.bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
