"""Llama models in GGUF files: weight names and layout, configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from tenuto.base.errors import ModelError
from tenuto.formats.gguf_file import GgufFile, GgufTensor
from tenuto.models.config import SUPPORTED, ModelConfig, linear_divisors
from tenuto.models.weights import StoredWeight


def _decode(tensor: GgufTensor) -> torch.Tensor:
    return _stored(tensor).decode()


def _stored(tensor: GgufTensor) -> StoredWeight:
    rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    return StoredWeight(tensor.kind, tensor.shape, lambda: torch.from_numpy(tensor.data()).view(rows, -1))


_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_DIVISORS = "rope_freqs.weight"


class GgufCheckpoint:
    """A Llama model in one GGUF file."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        self.config = _config(self._file)

    def weights(self) -> Iterator[tuple[str, StoredWeight]]:
        """See `Checkpoint.weights`."""
        rotated = {"attn_q": self.config.heads, "attn_k": self.config.kv_heads}
        for name, encoded in self._file.tensors.items():
            if name == _ROPE_DIVISORS:
                continue
            stored = _stored(encoded)
            part = name.split(".")[2] if name.startswith("blk.") else ""
            if part in rotated:
                stored = _halves_layout(stored, rotated[part])
            yield _hf_name(name), stored


def _hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; an unknown one is kept and refused by whoever loads it."""
    match name.split("."):
        case ["blk", layer, part, kind] if part in _IN_LAYER:
            return f"model.layers.{layer}.{_IN_LAYER[part]}.{kind}"
        case _:
            return _TOP.get(name, name)


def _halves_layout(stored: StoredWeight, heads: int) -> StoredWeight:
    """Undo the row order GGUF gives query and key projections of Llama models.

    GGUF puts a rotary pair in neighbouring rows (2i, 2i + 1), Hugging Face in rows (i, i + head_dim / 2). Source:
    `permute` of `LlamaModel` in llama.cpp's `convert_hf_to_gguf.py`.
    """
    rows = stored.shape[0]
    if rows % (2 * heads):
        raise ModelError(f"a projection of {rows} rows does not divide among {heads} heads; fetch the file again")

    def read() -> torch.Tensor:
        data = stored.read()
        return data.view(heads, rows // heads // 2, 2, -1).transpose(1, 2).reshape(data.shape)

    return replace(stored, read=read)


def _config(file: GgufFile) -> ModelConfig:
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelError(f"{file.path} is of architecture {architecture!r}; supported: {SUPPORTED}")
    if file.number("llama.expert_count", 0):
        raise ModelError(f"{file.path} is a mixture of experts; supported: {SUPPORTED}")
    hidden, heads = file.number("llama.embedding_length"), file.number("llama.attention.head_count")
    head_dim = file.number("llama.attention.key_length", hidden // max(heads, 1))
    for key in ("llama.rope.dimension_count", "llama.attention.value_length"):
        if file.number(key, head_dim) != head_dim:
            raise ModelError(f"{file.path} has {key} {file.metadata[key]}; supported: the head size, {head_dim}")
    eos = (file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return ModelConfig(
        layers=file.number("llama.block_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=file.number("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn=file.number("llama.feed_forward_length"),
        vocab=file.tensor("token_embd.weight").shape[0],
        rope_theta=file.number("llama.rope.freq_base", 10000.0),
        rope_divisors=_rope_divisors(file, head_dim),
        norm_eps=file.number("llama.attention.layer_norm_rms_epsilon"),
        tied="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        max_context=file.number("llama.context_length"),
        eos=tuple(sorted({token for token in eos if token is not None})),
        bos=file.metadata.get("tokenizer.ggml.bos_token_id"),
        dtype="float32",
    )


def _rope_divisors(file: GgufFile, head_dim: int) -> tuple[float, ...]:
    """Converters write the llama3 rule as one divisor a frequency, the linear rule as a factor."""
    kind = file.metadata.get("llama.rope.scaling.type") or "none"
    if kind not in ("none", "linear"):
        raise ModelError(f"{file.path} has rope scaling {kind!r}; supported: none, linear, llama3")
    if _ROPE_DIVISORS in file.tensors:
        return tuple(float(divisor) for divisor in _decode(file.tensors[_ROPE_DIVISORS]))
    return linear_divisors(head_dim, file.number("llama.rope.scaling.factor") if kind == "linear" else 1.0)
