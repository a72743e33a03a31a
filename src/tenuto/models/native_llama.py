"""Llama models as operations of the native kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from gguf import GGMLQuantizationType as Kind

from tenuto.base.errors import ModelError
from tenuto.kernels.native.blocks import FORMATS
from tenuto.kernels.native.library import Matrix, Model, Op, OpKind, PanelKind
from tenuto.kernels.native.pack import LANES, Arena, pack_floats, pack_quantized
from tenuto.models.config import Attention, Experts, GatedDelta, Layer, Mamba2, Mlp, ModelConfig
from tenuto.models.rope import Rope
from tenuto.models.weights import StoredWeight, without_place, wrong_shape

_PANELS = {Kind.F32: PanelKind.FLOAT32, Kind.F16: PanelKind.FLOAT16, Kind.BF16: PanelKind.PAIRS}
_DTYPES = {
    PanelKind.FLOAT32: (torch.float32, torch.uint32),
    PanelKind.FLOAT16: (torch.float16, torch.uint16),
    PanelKind.PAIRS: (torch.bfloat16, torch.uint16),
}
"""The elements of a panel, and what has their bits."""
_AT_ONCE = 2**20  # weights that are decoded at once
MAX_HEAD_DIM = 1024
"""What `forward.cpp` has room for."""


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """A decoder of `layers` equal layers of Llama's kind; see `Attention`, `Mlp` and `ModelConfig`."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rope: Rope
    norm_eps: float
    tied: bool
    attention_bias: bool

    @classmethod
    def of(cls, config: ModelConfig) -> LlamaShape | None:
        """The shape of a model, or `None` if it is none of this kind."""
        layer = config.layers[0]
        a, mlp = layer.mixer, layer.feed_forward
        if not isinstance(a, Attention) or not isinstance(mlp, Mlp) or a.rope is None:
            return None
        plain = Attention(a.heads, a.kv_heads, a.head_dim, a.rope, a.head_dim**-0.5, bias=a.bias)
        as_llama = replace(config, layers=(Layer(plain, Mlp(mlp.width)),) * len(config.layers))
        scaled = config.embedding_scale != 1 or config.residual_scale != 1 or config.logit_scale != 1
        if (
            config != as_llama
            or a.rope.rotated != a.head_dim
            or a.rope.magnitude != 1
            or scaled
            or config.logit_cap != 0
        ):
            return None
        return cls(
            len(config.layers), config.hidden, a.heads, a.kv_heads, a.head_dim, mlp.width, config.vocab, a.rope,
            config.norm_eps, config.tied, a.bias,
        )  # fmt: skip


def _not_llama(config: ModelConfig) -> str:
    """What a model has that Llama lacks, for people."""
    found = []
    for layer in config.layers:
        match layer.mixer:
            case Mamba2():
                found.append("Mamba-2 layers")
            case GatedDelta():
                found.append("gated delta nets")
            case Attention(window=window) if window:
                found.append("sliding windows")
        if isinstance(layer.feed_forward, Experts):
            found.append("experts")
    return ", ".join(dict.fromkeys(found)) or "norms, scales or heads that Llama has not"


def obstacle(config: ModelConfig) -> str | None:
    """Why the native kernels cannot run a model of this shape, if they cannot."""
    shape = LlamaShape.of(config)
    if shape is None:
        return f"it has {_not_llama(config)}"
    sizes = {"head_dim": shape.head_dim, "hidden": shape.hidden, "ffn": shape.ffn}
    odd = [f"{name} {size}" for name, size in sizes.items() if size % LANES]
    if odd:
        return f"its {', '.join(odd)} is no multiple of {LANES}"
    if shape.head_dim > MAX_HEAD_DIM:
        return f"its head_dim {shape.head_dim} is more than {MAX_HEAD_DIM}"
    return None


class NativeLlama:
    """A model's weights in panels, and the operations of its forward pass. Weights stay as they are stored, or become
    bfloat16 with `plain`; matrices that are multiplied together and differ become float32."""

    def __init__(
        self, config: ModelConfig, weights: Iterable[tuple[str, StoredWeight]], page_size: int, *, plain: bool = False
    ) -> None:
        """`weights` as `Checkpoint.weights` says. Raises `ModelError` if one is missing, of a wrong shape, or
        unknown, or if there is an `obstacle`."""
        shape = LlamaShape.of(config)
        if shape is None:
            raise ModelError(f"the native kernels cannot run this model: {obstacle(config)}")
        self.config, self.shape = config, shape
        self._plain = plain
        self._arena = Arena()
        self._weights = dict(weights)
        self.ops = _array(self._operations())
        if self._weights:
            raise without_place(min(self._weights))
        widest = max(shape.hidden, shape.heads * shape.head_dim, shape.ffn)
        self.model = Model(
            shape.hidden,
            widest,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.layers,
            shape.vocab,
            page_size,
            self._arena.floats(shape.rope.frequencies().numpy()),
        )

    @property
    def weight_bytes(self) -> int:
        """Memory taken by the weights, in bytes."""
        return self._arena.size

    def _operations(self) -> list[Op]:
        c = self.shape
        (embedding,) = self._matrices({"model.embed_tokens.weight": c.vocab}, c.hidden)
        ops = [Op(OpKind.EMBED, first=embedding)]
        for layer in range(c.layers):
            ops += self._layer(layer, f"model.layers.{layer}.")
        head = embedding if c.tied else self._matrices({"lm_head.weight": c.vocab}, c.hidden)[0]
        return [*ops, self._norm(OpKind.SELECT, 0, "model.norm.weight", head), Op(OpKind.LOGITS, first=head)]

    def _layer(self, layer: int, prefix: str) -> list[Op]:
        c = self.shape
        heads = {"q": c.heads, "k": c.kv_heads, "v": c.kv_heads}
        projections = {f"{prefix}self_attn.{name}_proj.weight": n * c.head_dim for name, n in heads.items()}
        q, k, v = self._matrices(projections, c.hidden)
        (output,) = self._matrices({f"{prefix}self_attn.o_proj.weight": c.hidden}, c.heads * c.head_dim)
        if c.attention_bias:
            for name, matrix in zip("qkvo", (q, k, v, output), strict=True):
                matrix.bias = self._vector(f"{prefix}self_attn.{name}_proj.bias", matrix.outputs)
        gate, up = self._matrices({f"{prefix}mlp.{name}_proj.weight": c.ffn for name in ("gate", "up")}, c.hidden)
        (down,) = self._matrices({f"{prefix}mlp.down_proj.weight": c.hidden}, c.ffn)
        return [
            self._norm(OpKind.NORM, layer, f"{prefix}input_layernorm.weight", q),
            Op(OpKind.QKV, layer, first=q, second=k, third=v),
            Op(OpKind.ATTEND, layer, output.kind),
            Op(OpKind.ADD, layer, first=output),
            self._norm(OpKind.NORM, layer, f"{prefix}post_attention_layernorm.weight", gate),
            Op(OpKind.GATED, layer, down.kind, first=gate, second=up),
            Op(OpKind.ADD, layer, first=down),
        ]

    def _norm(self, kind: OpKind, layer: int, name: str, reader: Matrix) -> Op:
        weights = self._vector(name, self.config.hidden)
        return Op(kind, layer, reader.kind, epsilon=self.config.norm_eps, norm=weights)

    def _take(self, name: str, shape: tuple[int, ...]) -> StoredWeight:
        if name not in self._weights:
            raise ModelError(f"the model's files lack the tensor {name!r}")
        stored = self._weights.pop(name)
        if stored.shape != shape:
            raise wrong_shape(name, stored.shape, shape)
        return stored

    def _vector(self, name: str, length: int) -> int:
        """The address of a vector of floats."""
        return self._arena.floats(self._take(name, (length,)).decode().float().numpy())

    def _matrices(self, outputs: dict[str, int], inputs: int) -> list[Matrix]:
        """Matrices that are multiplied with the same input, so that all are quantized or all are of the same floats."""
        stored = [self._take(name, (n, inputs)) for name, n in outputs.items()]
        kinds = {weight.kind for weight in stored}
        if self._plain:
            return [self._floats(weight, PanelKind.PAIRS) for weight in stored]
        if kinds <= FORMATS.keys():
            return [pack_quantized(weight.read().numpy(), weight.kind, self._arena) for weight in stored]
        kind = _PANELS.get(stored[0].kind, PanelKind.FLOAT32) if len(kinds) == 1 else PanelKind.FLOAT32
        return [self._floats(weight, kind) for weight in stored]

    def _floats(self, stored: StoredWeight, kind: PanelKind) -> Matrix:
        dtype, bits = _DTYPES[kind]
        outputs, inputs = stored.shape
        step = max(1, _AT_ONCE // (LANES * inputs)) * LANES
        pieces = (piece.to(dtype) for piece in stored.decode_rows(step))
        return pack_floats((piece.view(bits).numpy() for piece in pieces), outputs, inputs, kind, self._arena)


def _array(ops: list[Op]) -> ctypes.Array[Op]:
    return (Op * len(ops))(*ops)
