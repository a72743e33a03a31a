"""The tokenizer inside a GGUF file.

The keys and token types are those of the GGUF specification (ggml, docs/gguf.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, cast

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from tenuto.base.errors import ModelError
from tenuto.formats.gguf_file import GgufFile
from tenuto.text.blanks import Blanks
from tenuto.text.fill import fill_tokens
from tenuto.text.pre_tokenizers import PreTokenizer, pre_tokenizer
from tenuto.text.sentencepiece import CONTROL, UNKNOWN, USER_DEFINED, sentencepiece, with_blanks
from tenuto.text.tokenizer import Tokenizer


def tokenizer_from_gguf(file: GgufFile) -> Tokenizer:
    """Builds the tokenizer that the file's `tokenizer.*` keys describe. Raises `ModelError` if it is damaged or of an
    unsupported kind."""
    path, meta = file.path, file.metadata
    architecture, name = meta.get("general.architecture"), meta.get("tokenizer.ggml.pre")
    try:
        kind, tokens, types = (meta[f"tokenizer.ggml.{key}"] for key in ("model", "tokens", "token_type"))
        blanks, opens, found = Blanks(), True, tokens  # `found`: the tokens as they stand in text
        if kind == "llama":
            prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
            blanks, found = Blanks(opens=prefix, control=prefix), with_blanks(tokens, types)
            make = partial(sentencepiece, tokens, types, meta["tokenizer.ggml.scores"])
        else:
            pre = pre_tokenizer(kind, name, architecture)
            opens = pre.opens
            make = partial(_byte_level, pre, tokens, meta["tokenizer.ggml.merges"])
    except KeyError as error:
        raise ModelError(f"{path} has no metadata key {error}") from None
    except ModelError as error:
        raise ModelError(f"the tokenizer in {path}: {error}") from None
    bos, *ends = (meta.get(f"tokenizer.ggml.{token}_token_id") for token in ("bos", "eos", "eot", "eom"))
    try:
        backend = make()
        backend.add_tokens(_added(found, types, {bos, *ends}, partial(_swallows, architecture=architecture, pre=name)))
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception for a damaged vocabulary
        raise ModelError(f"{path} has a tokenizer that cannot be built: {error}") from None
    return Tokenizer(
        backend,
        bos_id=bos,
        eos_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
        adds_bos=bool(meta.get("tokenizer.ggml.add_bos_token", opens)),
        end_id=ends[0] if meta.get("tokenizer.ggml.add_eos_token") else None,
        fill=fill_tokens(backend.token_to_id, meta, len(tokens)),
        chat_template=meta.get("tokenizer.chat_template", meta.get("tokenizer.chat_template.tool_use")),
        tool_template=meta.get("tokenizer.chat_template.tool_use"),
        blanks=blanks,
    )


def _byte_level(pre: PreTokenizer, tokens: list[str], merges: list[str]) -> tokenizers.Tokenizer:
    """Builds a byte-level tokenizer. `tokens[i]` is the text of token i; `merges` are pairs separated by a space, in
    merge order."""
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    vocabulary = {text: i for i, text in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, cast("Any", pairs), ignore_merges=pre.whole_words))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre.make()
    backend.decoder = decoders.ByteLevel()
    return backend


_NOT_SWALLOWING = ("<unk>", "<s>", "<|endoftext|>")


def _swallows(text: str, architecture: object, pre: object) -> tuple[bool, bool]:
    """Whether the control token `text` swallows white space on its left, and on its right. GGUF files do not record it.
    Returns the behaviour in the files published with Phi-3 mini, which has Llama 2's tokenizer, and Phi-4, which has
    GPT-4's (`dbrx`). The control tokens of other models swallow nothing."""
    if architecture == "phi3" and pre == "dbrx":
        return True, True
    return False, architecture == "phi3" and pre in (None, "default") and text not in _NOT_SWALLOWING


def _added(
    tokens: list[str], types: list[int], steering: Collection[int | None], swallows: Callable[[str], tuple[bool, bool]]
) -> list[AddedToken]:
    """Returns the tokens that are matched before text is split into words. The ids in `steering` become control tokens
    whatever their type, so that users' text never encodes to a token that ends a turn."""
    added = []
    for i, (text, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind not in (UNKNOWN, CONTROL, USER_DEFINED) and i not in steering:
            continue
        control = kind != USER_DEFINED or i in steering
        left, right = swallows(text) if control and kind != UNKNOWN else (False, False)
        added.append(AddedToken(text, special=control, normalized=False, lstrip=left, rstrip=right))
    return added
