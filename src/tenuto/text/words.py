"""A tokenizer for the witness executor, which has no model files: its tokens are the 256 bytes and made-up words."""

from __future__ import annotations

import tokenizers
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel as ByteLevelSplit

from tenuto.text.tokenizer import Tokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The ChatML template."""


def witness_tokenizer(vocab_size: int) -> Tokenizer:
    """Returns a tokenizer of `vocab_size` tokens: the 256 bytes, words that no text encodes to, and ChatML's two
    control tokens at the end."""
    letters = sorted(ByteLevelSplit.alphabet())
    space = "\u0120"  # the byte-level alphabet's character for a space
    words = [f"{space}w{number}" for number in range(vocab_size - len(letters) - 2)]
    backend = tokenizers.Tokenizer(BPE({text: i for i, text in enumerate([*letters, *words])}, []))
    backend.pre_tokenizer = ByteLevelSplit(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return Tokenizer(backend)
