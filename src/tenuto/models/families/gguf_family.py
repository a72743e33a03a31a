"""Common parts of model families: their models in GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tenuto.base.errors import ModelError
from tenuto.formats.gguf_file import GgufFile
from tenuto.models.config import Attention, Experts, ModelConfig
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
_SCALING = "rope.scaling"
_ROPES = ("none", "linear", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """GGUF files of one `architecture`. `read` builds a configuration. `names` maps the names of a layer's weights, and
    `translate` turns the renamed weights into those of `ModelCheckpoint.weights`. `interleaved`: the rotary pairs of
    queries and keys are adjacent rows."""

    name: str
    architecture: str
    read: Callable[[GgufSettings], ModelConfig]
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


class GgufSettings:
    """The metadata of one `architecture` in a GGUF file. Keys are given without the architecture's name. All methods
    raise `ModelError` for values that are missing or malformed."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self._architecture = architecture

    def number(self, key: str, default: float | None = None) -> Any:
        """See `GgufFile.number`."""
        return self.file.number(f"{self._architecture}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        """See `GgufFile.integer`."""
        return self.file.integer(f"{self._architecture}.{key}", default)

    def layer_count(self) -> int:
        """Returns the number of layers. Raises `ModelError` if it exceeds the number of tensors."""
        count, most = self.integer("block_count"), len(self.file.tensors)
        if not 0 < count <= most:
            raise ModelError(f"{self.file.path} has {self._architecture}.block_count {count}, but {most} tensors")
        return count

    def head_dim(self, *, partly: bool = False) -> int:
        """Returns the number of elements of an attention head. Raises `ModelError` if it is out of range, if values
        have another size, or, unless heads may be rotated `partly`, if not all elements are rotated."""
        heads = self.integer("attention.head_count")
        found = self.integer("attention.key_length", self.integer("embedding_length") // max(heads, 1))
        if not 0 < found <= _LONGEST_HEAD:
            raise ModelError(f"{self.file.path} has attention heads of {found}; allowed: 1 to {_LONGEST_HEAD}")
        for key in ("attention.value_length", *([] if partly else ["rope.dimension_count"])):
            if (value := self.integer(key, found)) != found:
                named = f"{self._architecture}.{key} {value}"
                raise ModelError(f"{self.file.path} has {named}; supported: the head size, {found}")
        return found

    def attention(self, rope: Rope | None, **more: Any) -> Attention:
        """Reads the attention settings whose keys most architectures share; `more` are other fields of `Attention`, or
        replace these. Biases are used if the file has them."""
        heads, size = self.integer("attention.head_count"), self.head_dim(partly=True)
        usual = {
            "scale": size**-0.5,
            "bias": "blk.0.attn_q.bias" in self.file.tensors,
            "out_bias": "blk.0.attn_output.bias" in self.file.tensors,
        }
        return Attention(heads, self.integer("attention.head_count_kv", heads), size, rope, **(usual | more))

    def experts(self, width: str) -> Experts:
        """Reads the settings of experts; `width` is the key of theirs. Files do not record how experts are weighted;
        like llama.cpp, we normalise weights over the chosen ones."""
        count, chosen = self.integer("expert_count"), self.integer("expert_used_count")
        return Experts(count, chosen, self.integer(width), normalised=True)

    def window(self, default: int = 0) -> int:
        """Returns the number of tokens that a token attends to, itself included. 0 means all tokens, and is also
        returned if the window covers the longest context. `default` replaces a missing value."""
        found = self.integer("attention.sliding_window", default)
        return found if found < self._longest() else 0

    def rope(self, rotated: int, theta: float = 10000.0) -> Rope:
        """Reads the rope; `theta` is a default. Files hold llama3 scaling as one divisor per frequency, LongRoPE as two
        (short and long contexts), linear scaling and YaRN as parameters. Raises `ModelError` for other kinds of
        scaling."""
        theta = self.number("rope.freq_base", theta)
        original = self.integer(f"{_SCALING}.original_context_length", self.integer("context_length"))
        stretch, known = self.number(f"{_SCALING}.attn_factor", 1.0), ROPE_DIVISORS in self.file.tensors
        kind = self._scaling()
        if kind not in _ROPES or (kind == "yarn" and known):
            beside = f" and {ROPE_DIVISORS}" * known
            raise ModelError(f"{self.file.path} has rope scaling {kind!r}{beside}; supported: {', '.join(_ROPES)}")
        if kind == "longrope" or LONG_DIVISORS in self.file.tensors:
            short, long = (self._divisors(name, rotated) for name in (SHORT_DIVISORS, LONG_DIVISORS))
            return Rope(theta, short, stretch, long, original)
        if kind == "yarn":
            return self._yarn(theta, rotated, original, stretch)
        factor = self.number(f"{_SCALING}.factor") if kind == "linear" else 1.0
        own = self._divisors(ROPE_DIVISORS, rotated) if known else linear_divisors(rotated, 1.0)
        return Rope(theta, tuple(divisor * factor for divisor in own))

    def _scaling(self) -> object:
        """Returns the kind of rope scaling."""
        metadata, scaling = self.file.metadata, f"{self._architecture}.{_SCALING}"
        return metadata.get(f"{scaling}.type") or ("linear" if f"{scaling}.factor" in metadata else "none")

    def _yarn(self, theta: float, rotated: int, original: int, stretch: float) -> Rope:
        for key, usual in ((f"{_SCALING}.yarn_log_multiplier", 0.0), (f"{_SCALING}.yarn_ext_factor", 1.0)):
            if (value := self.number(key, usual)) != usual:
                raise ModelError(f"{self.file.path} has {self._architecture}.{key} {value}; supported: {usual}")
        factor = self.number(f"{_SCALING}.factor")
        fast, slow = self.number(f"{_SCALING}.yarn_beta_fast", 32.0), self.number(f"{_SCALING}.yarn_beta_slow", 1.0)
        divisors = yarn_divisors(rotated, theta, factor, original, fast, slow, whole=True)
        return Rope(theta, divisors, stretch * yarn_magnitude(factor))

    def _divisors(self, name: str, rotated: int) -> tuple[float, ...]:
        found = stored_in(self.file.tensor(name))
        if found.shape != (rotated // 2,):
            raise wrong_shape(name, found.shape, (rotated // 2,))
        return tuple(float(divisor) for divisor in found.decode())

    def _longest(self) -> int:
        """Returns the longest context, including an extension by YaRN."""
        made_for, original = self.integer("context_length"), self.integer(f"{_SCALING}.original_context_length", 0)
        if not original or self._scaling() != "yarn":
            return made_for
        return max(made_for, int(original * self.number(f"{_SCALING}.factor")))

    def facts(self) -> dict[str, Any]:
        """Returns the fields of `ModelConfig` whose keys are the same in all architectures."""
        file = self.file
        ends = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
        eos = {file.integer(key) for key in ends if file.metadata.get(key) is not None}
        return {
            "hidden": self.integer("embedding_length"),
            "vocab": file.tensor("token_embd.weight").shape[0],
            "norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            "tied": "output.weight" not in file.tensors,
            "max_context": self._longest(),
            "eos": tuple(sorted(eos)),
            "bos": file.metadata.get("tokenizer.ggml.bos_token_id"),
            "dtype": "float32",
        }
