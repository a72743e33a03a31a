"""gpt-oss (arXiv:2508.10925): layers with and without a window, attention sinks, and experts in MXFP4."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from tenuto.base.errors import ModelError
from tenuto.models.config import Attention, Experts, Layer, ModelConfig
from tenuto.models.families.family import Family, Named, split_layer
from tenuto.models.settings import Settings
from tenuto.models.weights import BYTES, StoredWeight

_KINDS = ("sliding_attention", "full_attention")
_THETA = 150_000.0
_FOURS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of 4 bits: a sign, two bits of exponent, one of mantissa."""
_SCALE_BIAS = 127


def _read(settings: Settings, eos: tuple[int, ...]) -> ModelConfig:
    settings.only({"hidden_act": ("silu",), "swiglu_alpha": (None, 1.702), "swiglu_limit": (None, 7.0)})
    heads, head_dim = settings.get("num_attention_heads", int), settings.head_dim()
    rope = settings.rope(head_dim, theta=_THETA)
    made = {
        kind: Attention(
            heads,
            settings.get("num_key_value_heads", int, heads),
            head_dim,
            rope,
            scale=head_dim**-0.5,
            window=window,
            bias=settings.get("attention_bias", bool, default=True),
            out_bias=settings.get("attention_bias", bool, default=True),
            sinks=True,
        )
        for kind, window in zip(_KINDS, (settings.get("sliding_window", int), 0), strict=True)
    }
    experts = Experts(
        settings.get("num_local_experts", int),
        settings.get("num_experts_per_tok", int),
        settings.get("intermediate_size", int),
        normalised=True,
        shared=0,
        shared_gate=False,
        activation="clamped",
        biased=True,
    )
    default = [_KINDS[i % 2] for i in range(settings.get("num_hidden_layers", int))]
    kinds = settings.kinds("layer_types", default, _KINDS)
    return ModelConfig(tuple(Layer(made[kind], experts) for kind in kinds), **settings.facts(eos))


def _translate(_: ModelConfig, stored: Iterable[Named]) -> Iterator[Named]:
    """Blocks wait for their scales, and scales for their blocks."""
    waiting: dict[str, dict[str, StoredWeight]] = {}
    for name, weight in stored:
        whole, part = name[:-7], name[-6:]
        if not name.endswith(("_blocks", "_scales")):
            yield from _translate_one(name, weight)
            continue
        parts = waiting.setdefault(whole, {})
        parts[part] = weight
        if len(parts) == 2:
            del waiting[whole]
            yield from _experts(whole, mxfp4(whole, **parts))
    if waiting:
        raise ModelError(f"the model's files have only blocks or only scales of {min(waiting)!r}; fetch them again")


def mxfp4(name: str, blocks: StoredWeight, scales: StoredWeight) -> torch.Tensor:
    """Weights of the OCP microscaling format MXFP4 as bfloat16, which has them exactly: [..., 32 * blocks].

    `blocks` is uint8 [..., blocks, 16], two values a byte, the first in the low bits; `scales` uint8 [..., blocks], the
    exponents of 2 that each block is multiplied by, plus 127. Raises `ModelError` if they do not fit each other.
    """
    if blocks.shape != (*scales.shape, 16) or {blocks.kind, scales.kind} != {BYTES}:
        raise ModelError(f"the blocks of {name!r} are of shape {list(blocks.shape)}, their scales {list(scales.shape)}")
    fours, exponents = (weight.read().view(weight.shape) for weight in (blocks, scales))
    values = torch.tensor(_FOURS, dtype=torch.bfloat16)
    pairs = torch.stack((values[(fours & 15).int()], values[(fours >> 4).int()]), dim=-1)
    return torch.ldexp(pairs.flatten(-2), (exponents.int() - _SCALE_BIAS)[..., None]).to(torch.bfloat16).flatten(-2)


def _translate_one(name: str, weight: StoredWeight) -> Iterator[Named]:
    layer, part = split_layer(name)
    if part.startswith("mlp.router."):
        yield f"{layer}mlp.gate.{part.removeprefix('mlp.router.')}", weight
    elif part in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
        yield from _experts(name, weight.decode().mT)
    elif part in ("mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"):
        yield from _experts(name.removesuffix("_bias"), weight.decode(), "bias")
    else:
        yield name, weight


def _experts(name: str, tensor: torch.Tensor, kind: str = "weight") -> Iterator[Named]:
    """The weights or biases of all experts, [experts, outputs, ...], one by one; the outputs of gates and projections
    up alternate."""
    prefix, _, part = name.rpartition(".")
    for i, expert in enumerate(tensor):
        if part == "gate_up_proj":
            yield f"{prefix}.{i}.gate_proj.{kind}", StoredWeight.of(expert[0::2])
            yield f"{prefix}.{i}.up_proj.{kind}", StoredWeight.of(expert[1::2])
        else:
            yield f"{prefix}.{i}.{part}.{kind}", StoredWeight.of(expert)


FAMILY = Family("gpt-oss", ("GptOssForCausalLM",), _read, _translate, quantized=("mxfp4",))
