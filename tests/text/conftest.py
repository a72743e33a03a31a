"""A small tokenizer with the control tokens of several chat formats, and the default model's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from tenuto.text.load import load_tokenizer
from tenuto.text.tokenizer import Tokenizer
from tests.present import present

CONTROL = [
    *("<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>"),
    *("[INST]", "[/INST]", "</s>"),
]
MERGES = [("Ċ", "Ċ"), ("Ġ", "Ġ"), ("t", "h"), ("th", "e"), ("Ġ", "the"), ("e", "r"), ("i", "m")]


def byte_tokenizer() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate([*letters, *(left + right for left, right in MERGES)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, MERGES))
    # Like models whose headers end with empty lines: a word's start does not depend on the text after it.
    words = pre_tokenizers.Split(Regex(r"\n+| ?[^\s]+|[^\S\n]+"), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    ends = (present(backend.token_to_id("<|end|>")), present(backend.token_to_id("</s>")))
    return Tokenizer(backend, bos_id=backend.token_to_id("<|begin|>"), eos_ids=ends)


@pytest.fixture(scope="session")
def small() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)
