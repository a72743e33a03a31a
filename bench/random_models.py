"""Models with random weights, made where they are used."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Kind

from tenuto.kernels.native.formats import PanelFormat
from tenuto.kernels.native.grouped import Grouped
from tenuto.models.adapter import Adapter, LowRank, projections
from tenuto.models.config import Attention, Experts, Layer, Mixer, Mlp, ModelConfig
from tenuto.models.rope import Rope
from tenuto.models.weights import FLOATS, Bytes, Floats, StoredWeight, bfloat16_bits


def model(
    layers: int,
    hidden: int,
    mixers: Sequence[Mixer],
    width: int | Experts,
    vocab: int,
    context: int,
    *,
    tied: bool = False,
) -> ModelConfig:
    """Returns the shape of a model whose layers have `mixers` in turn, and a network of this `width`, or experts."""
    network = Mlp(width) if isinstance(width, int) else width
    each = tuple(Layer(mixers[i % len(mixers)], network) for i in range(layers))
    return ModelConfig(each, hidden, vocab, 1e-5, tied=tied, max_context=context, eos=(0,), bos=None, dtype="bfloat16")


def attention(heads: int, kv_heads: int, head_dim: int, **more: Any) -> Attention:
    """Returns the shape of a layer that rotates all of a head; `more`: fields of `Attention`."""
    return Attention(heads, kv_heads, head_dim, Rope(500_000.0, (1.0,) * (head_dim // 2)), head_dim**-0.5, **more)


ONE = model(16, 2048, [attention(32, 8, 64)], 8192, 128_256, 131_072, tied=True)
"""The shape of a model of 1.2 billion parameters (that of Llama 3.2)."""
EIGHT = model(32, 4096, [attention(32, 8, 128)], 14_336, 128_256, 131_072)
"""The shape of a model of 8 billion parameters (that of Llama 3.1)."""

TYPES: dict[str, Grouped | Kind] = {
    "int4": Grouped(PanelFormat.INT4, 128, halves=True),
    "int4 with zeros": Grouped(PanelFormat.INT4, 128),
    "int8": Grouped(PanelFormat.INT8, 4096, halves=True),
    "fp8": Grouped(PanelFormat.FP8, 128),
    "mxfp4": Kind.MXFP4,
}
"""Types of quantized weights, by their names in a report."""


def stored(config: ModelConfig, kind: Grouped | Kind | None, seed: int = 0) -> Iterator[tuple[str, StoredWeight]]:
    """Yields random weights of a model that has attention and a gated network, or such experts, in every layer, the
    same for the same seed. Matrices of layers but routers are of type `kind`; other weights, or all, are bfloat16.
    Values of large ones repeat."""
    draw = np.random.default_rng(seed)

    def plain(*shape: int) -> StoredWeight:
        some = draw.normal(size=2**20) * shape[-1] ** -0.5 if len(shape) > 1 else draw.uniform(0.5, 1.5, shape)
        return StoredWeight.of(np.resize(bfloat16_bits(some.astype(np.float32)), shape), FLOATS["BF16"])

    for name in ("model.embed_tokens.weight", "lm_head.weight")[: 1 if config.tied else 2]:
        yield name, plain(config.vocab, config.hidden)
    yield "model.norm.weight", plain(config.hidden)
    for i, layer in enumerate(config.layers):
        a, m, first = layer.mixer, layer.feed_forward, f"model.layers.{i}."
        assert isinstance(a, Attention)
        assert m is not None
        width, kv_width = a.heads * a.head_dim, a.kv_heads * a.head_dim
        projected = zip("qkv", (width, kv_width, kv_width), strict=True)
        shapes = {f"self_attn.{part}_proj": (n, config.hidden) for part, n in projected}
        shapes["self_attn.o_proj"] = config.hidden, width
        networks = ["mlp"] if isinstance(m, Mlp) else [f"mlp.experts.{number}" for number in range(m.count)]
        for network in networks:
            shapes |= {f"{network}.{part}_proj": (m.width, config.hidden) for part in ("gate", "up")}
            shapes[f"{network}.down_proj"] = config.hidden, m.width
        if isinstance(m, Experts):
            yield f"{first}mlp.gate.weight", plain(m.count, config.hidden)
        for part, (outputs, inputs) in shapes.items():
            made = plain(outputs, inputs) if kind is None else random_matrix(draw, kind, outputs, inputs)
            yield f"{first}{part}.weight", made
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{first}{norm}.weight", plain(config.hidden)


def random_adapter(config: ModelConfig, rank: int, seed: int, *, without: str = "") -> Adapter:
    """Returns an adapter that changes all projections but those whose names end with `without`, if that is given."""
    draw = np.random.default_rng(seed)

    def random(*shape: int) -> Floats:
        return draw.normal(size=shape).astype(np.float32) * np.float32(shape[1] ** -0.5)

    changes = {
        name: LowRank(random(rank, inputs), random(outputs, rank), 1.0)
        for name, (outputs, inputs) in projections(config).items()
        if not without or not name.endswith(without)
    }
    return Adapter(changes, str(seed))


def random_matrix(draw: np.random.Generator, kind: Grouped | Kind, outputs: int, inputs: int) -> StoredWeight:
    """Returns a random matrix whose weights are about the root of the number of inputs below 1. `kind` is one of
    `TYPES`."""
    few = min(outputs, 64)
    if not isinstance(kind, Grouped):
        assert kind is Kind.MXFP4
        blocks = draw.integers(0, 256, (few, inputs // 32, 17), dtype=np.uint8)
        middle = 125 - round(math.log2(inputs) / 2)  # numbers of E2M1 are about 3
        blocks[..., 0] = draw.integers(middle - 1, middle + 2, blocks.shape[:2])
        return _repeated(kind, outputs, inputs, blocks.reshape(few, -1))
    groups = -(-inputs // kind.group)
    data = draw.integers(0, 256, (few, inputs // 32 * kind.numbers.quant_bytes), dtype=np.uint8)
    spread = {PanelFormat.INT4: 4.6, PanelFormat.INT8: 74.0, PanelFormat.FP8: 0.5}[kind.numbers]
    scales = (draw.uniform(0.5, 1.5, (few, groups)) / spread * inputs**-0.5).astype(np.float16).astype(np.float32)
    minima = []
    if kind.numbers is PanelFormat.FP8:
        data &= 0xBF  # below 2
    else:
        minima = [scales * np.float32(-8 if kind.numbers is PanelFormat.INT4 else -128)]
    whole = np.concatenate([data, *(each.view(np.uint8) for each in (scales, *minima))], axis=1)
    return _repeated(kind, outputs, inputs, whole)


def _repeated(kind: Grouped | Kind, outputs: int, inputs: int, rows: Bytes) -> StoredWeight:
    """Returns a matrix that has the same few rows again and again."""
    return StoredWeight(kind, (outputs, inputs), lambda: np.resize(rows, (outputs, rows.shape[1])))
