"""What a family says of its models in GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tenuto.base.errors import ModelError
from tenuto.formats.gguf_file import GgufFile
from tenuto.models.config import ModelConfig
from tenuto.models.rope import Rope, linear_divisors
from tenuto.models.weights import stored_in

LAYER_NAMES = {
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
"""Weights of a layer in GGUF files, and our names for them."""
ROPE_DIVISORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """Files of one `architecture`. `read` makes a configuration of them; `names` are those of a layer's weights.
    `interleaved`: the rotary pairs of queries and keys are neighbouring rows."""

    name: str
    architecture: str
    read: Callable[[GgufFile], ModelConfig]
    names: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)
    interleaved: bool = False


def head_dim(file: GgufFile, architecture: str) -> int:
    """Elements of an attention head. Raises `ModelError` if values have another number, or not all are rotated."""
    heads = file.number(f"{architecture}.attention.head_count")
    default = file.number(f"{architecture}.embedding_length") // max(heads, 1)
    found: int = file.number(f"{architecture}.attention.key_length", default)
    for key in (f"{architecture}.rope.dimension_count", f"{architecture}.attention.value_length"):
        if file.number(key, found) != found:
            raise ModelError(f"{file.path} has {key} {file.metadata[key]}; supported: the head size, {found}")
    return found


def rope(file: GgufFile, architecture: str, rotated: int, theta: float) -> Rope:
    """Converters write the llama3 rule as one divisor a frequency, the linear rule as a factor. `theta` is what files
    mean that do not say."""
    kind = file.metadata.get(f"{architecture}.rope.scaling.type") or "none"
    if kind not in ("none", "linear"):
        raise ModelError(f"{file.path} has rope scaling {kind!r}; supported: none, linear, llama3")
    if ROPE_DIVISORS in file.tensors:
        divisors = tuple(float(divisor) for divisor in stored_in(file.tensors[ROPE_DIVISORS]).decode())
    else:
        factor = file.number(f"{architecture}.rope.scaling.factor") if kind == "linear" else 1.0
        divisors = linear_divisors(rotated, factor)
    return Rope(file.number(f"{architecture}.rope.freq_base", theta), divisors)


def facts(file: GgufFile, architecture: str) -> dict[str, Any]:
    """What all architectures say of the whole model in the same words, as fields of `ModelConfig`."""
    eos = (file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return {
        "hidden": file.number(f"{architecture}.embedding_length"),
        "vocab": file.tensor("token_embd.weight").shape[0],
        "norm_eps": file.number(f"{architecture}.attention.layer_norm_rms_epsilon"),
        "tied": "output.weight" not in file.tensors,
        "max_context": file.number(f"{architecture}.context_length"),
        "eos": tuple(sorted({token for token in eos if token is not None})),
        "bos": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "dtype": "float32",
    }
