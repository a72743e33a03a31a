"""Llama models in GGUF files: dequantisation, weight names and layout, configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from gguf import GGMLQuantizationType

from tenuto.base.errors import ModelError
from tenuto.formats.gguf_file import GgufFile, GgufTensor
from tenuto.models.config import SUPPORTED, ModelConfig, linear_divisors


def _halves(blocks: torch.Tensor) -> torch.Tensor:
    """Nibbles of uint8 [blocks, 16] as float32 [blocks, 32]: all low ones, then all high ones."""
    return torch.cat((blocks & 0x0F, blocks >> 4), dim=1).float()


def _scale(blocks: torch.Tensor, first: int) -> torch.Tensor:
    """The float16 at bytes `first`, `first + 1` of each block, as float32 [blocks, 1]."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16).float()


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _scale(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _scale(blocks, 0) * (_halves(blocks[:, 2:]) - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _scale(blocks, 0) * _halves(blocks[:, 4:]) + _scale(blocks, 2)


_QUANTISED: dict[GGMLQuantizationType, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    GGMLQuantizationType.Q4_0: (18, _q4_0),
    GGMLQuantizationType.Q4_1: (20, _q4_1),
    GGMLQuantizationType.Q8_0: (34, _q8_0),
}
_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


def dequantize(data: torch.Tensor, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> torch.Tensor:
    """Decode a tensor of GGML type `kind` to float32 of `shape`.

    `data` is uint8 [bytes], the raw little-endian bytes. Equals `gguf.quants.dequantize` bit for bit. Raises
    `ModelError` if the type is not one of F32, F16, BF16, Q8_0, Q4_0, Q4_1. Layout of the blocks: `ggml-common.h`.
    """
    if kind in _PLAIN:
        return data.view(_PLAIN[kind]).float().view(shape)
    if kind not in _QUANTISED:
        names = ", ".join(k.name for k in (*_PLAIN, *_QUANTISED))
        raise ModelError(f"GGUF tensors of type {kind.name} are not supported; supported: {names}")
    size, decode_blocks = _QUANTISED[kind]
    return decode_blocks(data.view(-1, size)).view(shape)


def decode(tensor: GgufTensor) -> torch.Tensor:
    """A tensor of a file as float32 of its shape. Raises `ModelError` as `dequantize`."""
    return dequantize(torch.from_numpy(tensor.data), tensor.kind, tensor.shape)


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

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Checkpoint.weights`; float32."""
        rotated = {"attn_q": self.config.heads, "attn_k": self.config.kv_heads}
        for name, encoded in self._file.tensors.items():
            if name == _ROPE_DIVISORS:
                continue
            tensor = decode(encoded)
            part = name.split(".")[2] if name.startswith("blk.") else ""
            yield _hf_name(name), _halves_layout(tensor, rotated[part]) if part in rotated else tensor


def _hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; an unknown one is kept and refused by whoever loads it."""
    match name.split("."):
        case ["blk", layer, part, kind] if part in _IN_LAYER:
            return f"model.layers.{layer}.{_IN_LAYER[part]}.{kind}"
        case _:
            return _TOP.get(name, name)


def _halves_layout(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo the row order GGUF gives query and key projections of Llama models.

    `tensor` is [heads * head_dim, ...]. GGUF puts a rotary pair in neighbouring rows (2i, 2i + 1), Hugging Face in rows
    (i, i + head_dim / 2). Source: `permute` of `LlamaModel` in llama.cpp's `convert_hf_to_gguf.py`.
    """
    if len(tensor) % (2 * heads):
        raise ModelError(
            f"a projection of {len(tensor)} rows does not divide among {heads} heads; fetch the file again"
        )
    pairs = tensor.view(heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


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
        return tuple(float(divisor) for divisor in decode(file.tensors[_ROPE_DIVISORS]))
    return linear_divisors(head_dim, file.number("llama.rope.scaling.factor") if kind == "linear" else 1.0)
