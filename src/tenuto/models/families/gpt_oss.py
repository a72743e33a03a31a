"""gpt-oss (arXiv:2508.10925): layers with and without a window, attention sinks, and experts in MXFP4."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from gguf import GGMLQuantizationType as Kind

from tenuto.base.errors import ModelError
from tenuto.kernels.native.grouped import in_halves
from tenuto.models.config import Experts, Layer, ModelConfig
from tenuto.models.families.family import KINDS, Family, Named, by_kind, split_layer
from tenuto.models.settings import Settings
from tenuto.models.weights import BYTES, Bytes, StoredWeight

_THETA = 150_000.0
_ALL = slice(None)


def _read(settings: Settings, eos: tuple[int, ...]) -> ModelConfig:
    settings.only({"hidden_act": ("silu",), "swiglu_alpha": (None, 1.702), "swiglu_limit": (None, 7.0)})
    rope, biased = settings.rope(settings.head_dim(), theta=_THETA), settings.get("attention_bias", bool, default=True)
    window = settings.get("sliding_window", int)
    made = by_kind(settings, rope, window, bias=biased, out_bias=biased, sinks=True)
    experts = Experts(
        settings.get("num_local_experts", int),
        settings.get("num_experts_per_tok", int),
        settings.get("intermediate_size", int),
        normalised=True,
        activation="clamped",
        biased=True,
    )
    default = [KINDS[i % 2] for i in range(settings.get("num_hidden_layers", int))]
    kinds = settings.kinds("layer_types", default, KINDS)
    return ModelConfig(tuple(Layer(made[kind], experts) for kind in kinds), **settings.facts(eos))


def _translate(_: ModelConfig, stored: Iterable[Named]) -> Iterator[Named]:
    """Translates all tensors. The blocks and scales of a quantized matrix are separate tensors; the first of the two
    waits for the other."""
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
            _check_mxfp4(whole, **parts)
            yield from _experts(whole, mxfp4, parts["blocks"], parts["scales"])
    if waiting:
        raise ModelError(f"the model's files have only blocks or only scales of {min(waiting)!r}; fetch them again")


def _check_mxfp4(name: str, blocks: StoredWeight, scales: StoredWeight) -> None:
    if blocks.shape != (*scales.shape, 16) or {blocks.kind, scales.kind} != {BYTES}:
        raise ModelError(f"the blocks of {name!r} are of shape {list(blocks.shape)}, their scales {list(scales.shape)}")


def mxfp4(blocks: StoredWeight, scales: StoredWeight, outputs: slice = _ALL) -> StoredWeight:
    """Rearranges selected outputs of a matrix in the OCP microscaling format MXFP4 as GGML's type of that name has
    them, [outputs, 32 * blocks]. No bit changes, and it happens when the weight is read.

    `blocks` is uint8 [all outputs, blocks, 16], two values per byte, the first in the low bits. `scales` is uint8 [all
    outputs, blocks]: each block is multiplied by 2 to the power of its scale minus 127.
    """
    blocks, scales = blocks.select(outputs), scales.select(outputs)
    rows, count = scales.shape

    def read() -> Bytes:
        pairs, exponents = (weight.read().reshape(rows, count, -1) for weight in (blocks, scales))
        values = np.stack((pairs & 15, pairs >> 4), axis=-1).reshape(rows, count, 32)
        return np.concatenate((exponents, in_halves(values)), axis=-1).reshape(rows, -1)

    return StoredWeight(Kind.MXFP4, (rows, 32 * count), read)


def _translate_one(name: str, weight: StoredWeight) -> Iterator[Named]:
    layer, part = split_layer(name)
    if part.startswith("mlp.router."):
        yield f"{layer}mlp.gate.{part.removeprefix('mlp.router.')}", weight
    elif part in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
        yield from _experts(name, _transposed, weight)
    elif part in ("mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"):
        yield from _experts(name.removesuffix("_bias"), StoredWeight.select, weight, kind="bias")
    else:
        yield name, weight


def _transposed(weight: StoredWeight, outputs: slice) -> StoredWeight:
    """Transposes a weight stored as [inputs, outputs] and selects `outputs`; returns [outputs, inputs]."""
    inputs, count = weight.shape[0], len(range(*outputs.indices(weight.shape[1])))
    return StoredWeight(
        weight.kind,
        (count, inputs),
        lambda: StoredWeight.of(weight.elements().T[outputs], weight.kind).read(),
    )


def _experts(
    name: str, outputs_of: Callable[..., StoredWeight], *stored: StoredWeight, kind: str = "weight"
) -> Iterator[Named]:
    """Yields the weights or biases of each expert. The files interleave the outputs of gate and up projections.
    `outputs_of(*parts, outputs)` builds a weight from one expert's part of each `stored` tensor and a slice of
    outputs."""
    prefix, _, part = name.rpartition(".")
    parts = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)} if part == "gate_up_proj" else {part: _ALL}
    for i, expert in enumerate(zip(*(weight.each() for weight in stored), strict=True)):
        for own, outputs in parts.items():
            yield f"{prefix}.{i}.{own}.{kind}", outputs_of(*expert, outputs)


FAMILY = Family("gpt-oss", ("GptOssForCausalLM",), _read, _translate, quantized=("mxfp4",))
