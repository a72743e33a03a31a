"""A vocabulary's tokens for filling in the middle of a text."""

from __future__ import annotations

from tenuto.base.fill import FillTokens
from tenuto.text.fill import NAMES, fill_tokens

QWEN = {"<|fim_prefix|>": 1, "<|fim_suffix|>": 2, "<|fim_middle|>": 3, "<|repo_name|>": 4, "<|file_sep|>": 5}


def test_tokens_are_found_by_their_texts() -> None:
    assert fill_tokens(QWEN.get, {}, 6) == FillTokens(1, 2, 3, 4, 5)
    for role in ("prefix", "suffix", "middle"):
        assert fill_tokens({text: i for text, i in QWEN.items() if text not in NAMES[role]}.get, {}, 6) is None
    assert fill_tokens({text: i for text, i in QWEN.items() if i != 5}.get, {}, 6) == FillTokens(1, 2, 3)


def test_the_keys_of_a_file_come_first_unless_they_name_no_token() -> None:
    keys = {"tokenizer.ggml.fim_pre_token_id": 5, "tokenizer.ggml.suffix_token_id": 0}
    assert fill_tokens(QWEN.get, keys, 6) == FillTokens(5, 0, 3, 4, 5)
    for wrong in (6, -1, "1", None):
        assert fill_tokens(QWEN.get, {"tokenizer.ggml.fim_mid_token_id": wrong}, 6) == FillTokens(1, 2, 3, 4, 5)
