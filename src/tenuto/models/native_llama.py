"""Llama models as operations of the native kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
from gguf import GGMLQuantizationType as Kind

from tenuto.base.errors import ModelError
from tenuto.kernels.native.blocks import FORMATS
from tenuto.kernels.native.library import Matrix, Model, Op, OpKind, PanelKind
from tenuto.kernels.native.pack import LANES, Arena, pack_floats, pack_quantized
from tenuto.models.config import ModelConfig
from tenuto.models.rope import frequencies
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


def obstacle(config: ModelConfig) -> str | None:
    """Why the native kernels cannot run a model of this shape, if they cannot."""
    sizes = {"head_dim": config.head_dim, "hidden": config.hidden, "ffn": config.ffn}
    odd = [f"{name} {size}" for name, size in sizes.items() if size % LANES]
    if odd:
        return f"its {', '.join(odd)} is no multiple of {LANES}"
    if config.head_dim > MAX_HEAD_DIM:
        return f"its head_dim {config.head_dim} is more than {MAX_HEAD_DIM}"
    return None


class NativeLlama:
    """A model's weights in panels, and the operations of its forward pass. Weights stay as they are stored, or become
    bfloat16 with `plain`; matrices that are multiplied together and differ become float32."""

    def __init__(
        self, config: ModelConfig, weights: Iterable[tuple[str, StoredWeight]], page_size: int, *, plain: bool = False
    ) -> None:
        """`weights` as `Checkpoint.weights` says. Raises `ModelError` if one is missing, of a wrong shape, or
        unknown."""
        self.config = config
        self._plain = plain
        self._arena = Arena()
        self._weights = dict(weights)
        self.ops = _array(self._operations())
        if self._weights:
            raise without_place(min(self._weights))
        widest = max(config.hidden, config.heads * config.head_dim, config.ffn)
        self.model = Model(
            config.hidden,
            widest,
            config.heads,
            config.kv_heads,
            config.head_dim,
            config.layers,
            config.vocab,
            page_size,
            self._arena.floats(frequencies(config).numpy()),
        )

    @property
    def weight_bytes(self) -> int:
        """Memory taken by the weights, in bytes."""
        return self._arena.size

    def _operations(self) -> list[Op]:
        c = self.config
        (embedding,) = self._matrices({"model.embed_tokens.weight": c.vocab}, c.hidden)
        ops = [Op(OpKind.EMBED, first=embedding)]
        for layer in range(c.layers):
            ops += self._layer(layer, f"model.layers.{layer}.")
        head = embedding if c.tied else self._matrices({"lm_head.weight": c.vocab}, c.hidden)[0]
        return [*ops, self._norm(OpKind.SELECT, 0, "model.norm.weight", head), Op(OpKind.LOGITS, first=head)]

    def _layer(self, layer: int, prefix: str) -> list[Op]:
        c = self.config
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
