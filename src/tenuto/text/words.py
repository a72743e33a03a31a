"""A tokenizer without a model's files, for the witness: every byte is a token, and so are some made-up words."""

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
"""ChatML, the common form."""


def witness_tokenizer(vocab_size: int) -> Tokenizer:
    """`vocab_size` tokens: 256 bytes, words that no text is encoded to, and last the two control tokens of ChatML."""
    letters = sorted(ByteLevelSplit.alphabet())
    space = "\u0120"  # how the byte-level alphabet writes a blank
    words = [f"{space}w{number}" for number in range(vocab_size - len(letters) - 2)]
    backend = tokenizers.Tokenizer(BPE({text: i for i, text in enumerate([*letters, *words])}, []))
    backend.pre_tokenizer = ByteLevelSplit(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return Tokenizer(backend)
