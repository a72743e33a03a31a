"""Models in GGUF files: translates names and layout of their weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from tenuto.base.errors import ModelError
from tenuto.formats.gguf_file import GgufFile
from tenuto.models.adapter import Translation
from tenuto.models.config import Attention
from tenuto.models.families import gemma2, gemma3, granite3, llama, phi3, qwen, smollm3
from tenuto.models.families.family import unchanged
from tenuto.models.families.gguf_family import NOT_WEIGHTS, GgufFamily, GgufSettings
from tenuto.models.hf import FAMILIES as IN_DIRECTORIES
from tenuto.models.weights import Bytes, StoredWeight, stored_in

FAMILIES = (
    llama.GGUF_FAMILY,
    *qwen.GGUF_FAMILIES,
    smollm3.GGUF_FAMILY,
    phi3.GGUF_FAMILY,
    *granite3.GGUF_FAMILIES,
    gemma2.GGUF_FAMILY,
    gemma3.GGUF_FAMILY,
)
SUPPORTED = ", ".join(family.name for family in FAMILIES)

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class GgufCheckpoint:
    """A `ModelCheckpoint` in a GGUF file, given as its path or as the open file."""

    def __init__(self, file: Path | GgufFile) -> None:
        self._file = file if isinstance(file, GgufFile) else GgufFile(file)
        self._family = _family(self._file)
        if self._file.metadata.get(f"{self._family.architecture}.attention.causal") is False:
            raise ModelError(f"{self._file.path} has an encoder, which sees later tokens; supported: decoders")
        self.config = self._family.read(GgufSettings(self._file, self._family.architecture))

    def weights(self) -> Iterator[tuple[str, StoredWeight]]:
        """See `ModelCheckpoint.weights`."""
        return self._family.translate(self.config, self._tensors())

    @property
    def translation(self) -> Translation:
        """See `ModelCheckpoint.translation`."""
        families = (family for family in IN_DIRECTORIES if family.name == self._family.name)
        return partial(next((family.translate for family in families), unchanged), self.config)

    def _tensors(self) -> Iterator[tuple[str, StoredWeight]]:
        """Yields all weights under our names, before the family's translation."""
        for name, encoded in self._file.tensors.items():
            if name in NOT_WEIGHTS:
                continue
            stored = stored_in(encoded)
            if self._family.interleaved and (heads := self._rotated_heads(name)):
                stored = _halves_layout(stored, heads)
            yield self._our_name(name), stored

    def _our_name(self, name: str) -> str:
        """Returns our name of a GGUF tensor. Unknown names are kept; loading rejects them."""
        match name.split("."):
            case ["blk", layer, part, kind] if part in self._family.names:
                return f"model.layers.{layer}.{self._family.names[part]}.{kind}"
            case _:
                return _TOP.get(name, name)

    def _rotated_heads(self, name: str) -> int:
        """Returns the number of heads in a query or key projection; 0 for tensors that are not rotated."""
        match name.split("."), self.config.layers[0].mixer:
            case ["blk", _, "attn_q", _], Attention(heads=heads):
                return heads
            case ["blk", _, "attn_k", _], Attention(kv_heads=heads):
                return heads
        return 0


def _halves_layout(stored: StoredWeight, heads: int) -> StoredWeight:
    """Restores the row order of the query and key projections of Llama models.

    GGUF files store a rotary pair in adjacent rows (2i, 2i + 1), Hugging Face in rows (i, i + head_dim / 2). Source:
    `permute` of `LlamaModel` in llama.cpp's `convert_hf_to_gguf.py`.
    """
    rows = stored.shape[0]
    if rows % (2 * heads):
        raise ModelError(f"a projection of {rows} rows does not divide among {heads} heads; fetch the file again")

    def read() -> Bytes:
        data = stored.read()
        return data.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(data.shape)

    return replace(stored, read=read)


def _family(file: GgufFile) -> GgufFamily:
    """Returns the family of the file's architecture. Raises `ModelError` if it is not supported."""
    architecture = file.metadata.get("general.architecture")
    for family in FAMILIES:
        if family.architecture == architecture:
            return family
    raise ModelError(f"{file.path} is of architecture {architecture!r}; supported: {SUPPORTED}")
