"""The shape of a model, read from its files and checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from tenuto.base.errors import ModelError

SUPPORTED = "Llama architecture (also Mistral without a sliding window)"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-architecture decoder.

    `heads` query heads share `kv_heads` key and value heads of `head_dim` elements. `vocab` is the number of rows of
    the embedding, which may exceed what the tokenizer knows. Rotary frequency `i` of `head_dim / 2` is
    `rope_theta ** (-2 i / head_dim) / rope_divisors[i]` radians a token (Su et al., arXiv:2104.09864); every supported
    kind of rope scaling is a set of such divisors. `attention_bias` is about all four attention projections.
    `eos` lists the tokens that end a turn. `dtype` is the element type the files store or decode to.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rope_theta: float
    rope_divisors: tuple[float, ...] = field(repr=False)
    norm_eps: float
    tied: bool
    attention_bias: bool
    max_context: int
    eos: tuple[int, ...]
    bos: int | None
    dtype: str

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if type(value) in (int, float) and value <= 0 and one.name != "bos":
                raise ModelError(f"the model's {one.name} is {value}; allowed: more than 0")
        if self.heads % self.kv_heads:
            raise ModelError(f"{self.heads} query heads cannot share {self.kv_heads} key heads; allowed: a divisor")
        if self.head_dim % 2:
            raise ModelError(f"the model's head_dim is {self.head_dim}; rotary embedding needs an even number")
        if len(self.rope_divisors) != self.head_dim // 2:
            raise ModelError(
                f"{len(self.rope_divisors)} rope divisors for head_dim {self.head_dim}; allowed: one a pair"
            )


def linear_divisors(head_dim: int, factor: float) -> tuple[float, ...]:
    """Divisors that slow every frequency by `factor` (position interpolation, arXiv:2306.15595); 1.0 is no scaling."""
    return (float(factor),) * (head_dim // 2)


def llama3_divisors(
    head_dim: int, theta: float, factor: float, low_factor: float, high_factor: float, original_context: int
) -> tuple[float, ...]:
    """Divisors of the Llama 3.1 rope scaling.

    Waves longer than `original_context / low_factor` tokens are slowed by `factor`, those shorter than
    `original_context / high_factor` are kept, and frequencies between are interpolated linearly in the number of
    turns they make within the original context. Source: `apply_scaling` in Meta's `llama-models`.
    """
    divisors = []
    for i in range(head_dim // 2):
        turns = original_context * theta ** (-2 * i / head_dim) / (2 * math.pi)
        kept = min(max((turns - low_factor) / (high_factor - low_factor), 0.0), 1.0)
        divisors.append(1 / ((1 - kept) / factor + kept))
    return tuple(divisors)
