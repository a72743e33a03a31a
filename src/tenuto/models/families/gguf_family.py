"""Common parts of model families: their models in GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tenuto.base.errors import ModelError
from tenuto.formats.gguf_file import GgufFile
from tenuto.models.config import Attention, ModelConfig
from tenuto.models.families.family import Named, Translate, unchanged
from tenuto.models.rope import Rope, linear_divisors, yarn_divisors, yarn_magnitude
from tenuto.models.weights import StoredWeight, stored_in, wrong_shape

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
"""Names of a layer's weights in GGUF files, and our names for them."""
EXPERT_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
ROPE_DIVISORS = "rope_freqs.weight"
SHORT_DIVISORS, LONG_DIVISORS = "rope_factors_short.weight", "rope_factors_long.weight"
NOT_WEIGHTS = (ROPE_DIVISORS, SHORT_DIVISORS, LONG_DIVISORS)
"""Tensors that belong to the configuration: divisors of rope frequencies."""
_LONGEST_HEAD = 2**16
_ROPES = ("none", "linear", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """GGUF files of one `architecture`. `read` builds a configuration. `names` maps the names of a layer's weights, and
    `translate` turns the renamed weights into those of `ModelCheckpoint.weights`. `interleaved`: the rotary pairs of
    queries and keys are adjacent rows."""

    name: str
    architecture: str
    read: Callable[[GgufFile], ModelConfig]
    names: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)
    translate: Translate = unchanged
    interleaved: bool = False


def unstacked_experts(_: ModelConfig, name: str, weight: StoredWeight) -> Iterator[Named]:
    """Splits a tensor of all experts' matrices: `mlp.experts.up_proj.weight` becomes `mlp.experts.0.up_proj.weight` and
    so on. Other tensors are unchanged."""
    before, stacked, after = name.partition(".experts.")
    if not stacked or len(weight.shape) != 3:
        yield name, weight
        return
    for i, expert in enumerate(weight.each()):
        yield f"{before}.experts.{i}.{after}", expert


def layer_count(file: GgufFile, architecture: str) -> int:
    """Returns the number of layers. Raises `ModelError` if it exceeds the number of tensors."""
    count: int = file.integer(f"{architecture}.block_count")
    if not 0 < count <= len(file.tensors):
        raise ModelError(f"{file.path} has {architecture}.block_count {count}, but {len(file.tensors)} tensors")
    return count


def head_dim(file: GgufFile, architecture: str, *, partly: bool = False) -> int:
    """Returns the number of elements of an attention head. Raises `ModelError` if it is out of range, if values have
    another size, or, unless heads may be rotated `partly`, if not all elements are rotated."""
    heads = file.integer(f"{architecture}.attention.head_count")
    default = file.integer(f"{architecture}.embedding_length") // max(heads, 1)
    found: int = file.integer(f"{architecture}.attention.key_length", default)
    if not 0 < found <= _LONGEST_HEAD:
        raise ModelError(f"{file.path} has attention heads of {found}; allowed: 1 to {_LONGEST_HEAD}")
    for key in ("attention.value_length", *([] if partly else ["rope.dimension_count"])):
        if file.integer(f"{architecture}.{key}", found) != found:
            value = file.metadata[f"{architecture}.{key}"]
            raise ModelError(f"{file.path} has {architecture}.{key} {value}; supported: the head size, {found}")
    return found


def attention(file: GgufFile, architecture: str, rope: Rope | None, **more: Any) -> Attention:
    """Reads the attention settings whose keys most architectures share; `more` are further fields of `Attention`.
    Biases are used if the file has them."""
    heads, size = file.integer(f"{architecture}.attention.head_count"), head_dim(file, architecture, partly=True)
    usual = {
        "scale": size**-0.5,
        "bias": "blk.0.attn_q.bias" in file.tensors,
        "out_bias": "blk.0.attn_output.bias" in file.tensors,
    }
    kv_heads = file.integer(f"{architecture}.attention.head_count_kv", heads)
    return Attention(heads, kv_heads, size, rope, **(usual | more))


def window(file: GgufFile, architecture: str, default: int = 0) -> int:
    """Returns the number of tokens that a token attends to, itself included. 0 means all tokens, and is also returned
    if the window covers the longest context. `default` replaces a missing value."""
    found: int = file.integer(f"{architecture}.attention.sliding_window", default)
    return found if found < _longest(file, architecture) else 0


def rope(file: GgufFile, architecture: str, rotated: int, theta: float = 10000.0) -> Rope:
    """Reads the rope; `theta` is a default. Files hold llama3 scaling as one divisor per frequency, LongRoPE as two
    (short and long contexts), linear scaling and YaRN as parameters. Raises `ModelError` for other kinds of scaling."""
    scaling = f"{architecture}.rope.scaling"
    theta = file.number(f"{architecture}.rope.freq_base", theta)
    original = file.integer(f"{scaling}.original_context_length", file.integer(f"{architecture}.context_length"))
    stretch = file.number(f"{scaling}.attn_factor", 1.0)
    unsaid = "linear" if f"{scaling}.factor" in file.metadata else "none"
    kind, known = file.metadata.get(f"{scaling}.type") or unsaid, ROPE_DIVISORS in file.tensors
    if kind not in _ROPES or (kind == "yarn" and known):
        beside = f" and {ROPE_DIVISORS}" * known
        raise ModelError(f"{file.path} has rope scaling {kind!r}{beside}; supported: {', '.join(_ROPES)}")
    if kind == "longrope" or LONG_DIVISORS in file.tensors:
        short, long = (_divisors(file, name, rotated) for name in (SHORT_DIVISORS, LONG_DIVISORS))
        return Rope(theta, short, stretch, long, original)
    if kind == "yarn":
        return _yarn(file, scaling, theta, rotated, original, stretch)
    factor = file.number(f"{scaling}.factor") if kind == "linear" else 1.0
    own = _divisors(file, ROPE_DIVISORS, rotated) if known else linear_divisors(rotated, 1.0)
    return Rope(theta, tuple(divisor * factor for divisor in own))


def _yarn(file: GgufFile, scaling: str, theta: float, rotated: int, original: int, stretch: float) -> Rope:
    for key, usual in (("yarn_log_multiplier", 0.0), ("yarn_ext_factor", 1.0)):
        if (value := file.number(f"{scaling}.{key}", usual)) != usual:
            raise ModelError(f"{file.path} has {scaling}.{key} {value}; supported: {usual}")
    factor = file.number(f"{scaling}.factor")
    fast, slow = file.number(f"{scaling}.yarn_beta_fast", 32.0), file.number(f"{scaling}.yarn_beta_slow", 1.0)
    divisors = yarn_divisors(rotated, theta, factor, original, fast, slow, whole=True)
    return Rope(theta, divisors, stretch * yarn_magnitude(factor))


def _divisors(file: GgufFile, name: str, rotated: int) -> tuple[float, ...]:
    found = stored_in(file.tensor(name))
    if found.shape != (rotated // 2,):
        raise wrong_shape(name, found.shape, (rotated // 2,))
    return tuple(float(divisor) for divisor in found.decode())


def _longest(file: GgufFile, architecture: str) -> int:
    """Returns the longest context, including an extension by YaRN."""
    made_for, scaling = file.integer(f"{architecture}.context_length"), f"{architecture}.rope.scaling"
    original = file.integer(f"{scaling}.original_context_length", 0)
    if not original or file.metadata.get(f"{scaling}.type") != "yarn":
        return made_for
    return max(made_for, int(original * file.number(f"{scaling}.factor")))


def facts(file: GgufFile, architecture: str) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` whose keys are the same in all architectures."""
    ends = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    eos = {file.integer(key) for key in ends if file.metadata.get(key) is not None}
    return {
        "hidden": file.integer(f"{architecture}.embedding_length"),
        "vocab": file.tensor("token_embd.weight").shape[0],
        "norm_eps": file.number(f"{architecture}.attention.layer_norm_rms_epsilon"),
        "tied": "output.weight" not in file.tensors,
        "max_context": _longest(file, architecture),
        "eos": tuple(sorted(eos)),
        "bos": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "dtype": "float32",
    }
