"""The forward pass of Llama-architecture models over a flat batch of tokens.

Architecture: Touvron et al., arXiv:2302.13971; grouped queries: Ainslie et al., arXiv:2305.13245.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from tenuto.base.errors import ModelError
from tenuto.kernels.linear import linear
from tenuto.models.config import ModelConfig
from tenuto.models.rope import frequencies
from tenuto.models.weights import StoredWeight, without_place, wrong_shape


class Attention(Protocol):
    """Attention of one step. It knows which sequence every token belongs to and where its earlier keys are."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store `k` and `v` ([tokens, kv_heads, head_dim]) of `layer` and return what `q` ([tokens, heads, head_dim])
        attends to, same shape as `q`. Query head `h` reads key head `h // (heads // kv_heads)`."""
        ...


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one layer. `qkv` is [(heads + 2 kv_heads) * head_dim, hidden]: queries, keys, values, one product
    instead of three; `gate_up` is [2 ffn, hidden]."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Llama:
    """A Llama model's weights on one device. Stateless between calls: keys and values live with the caller."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, StoredWeight]],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`weights` are named and laid out as `Checkpoint.weights` says. Raises `ModelError` if one is missing, of a
        wrong shape, or unknown."""
        self.config = config
        self.device = device
        self.dtype = dtype
        c = config
        self._embedding = self._empty(c.vocab, c.hidden)
        self._head = self._embedding if c.tied else self._empty(c.vocab, c.hidden)
        self._norm = self._empty(c.hidden)
        self._layers = [self._empty_layer() for _ in range(c.layers)]
        self._fill(weights)
        self._frequencies = frequencies(c).to(device)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype)

    def _empty_layer(self) -> _Layer:
        c = self.config
        qkv = (c.heads + 2 * c.kv_heads) * c.head_dim
        return _Layer(
            input_norm=self._empty(c.hidden),
            qkv=self._empty(qkv, c.hidden),
            qkv_bias=self._empty(qkv) if c.attention_bias else None,
            output=self._empty(c.hidden, c.heads * c.head_dim),
            output_bias=self._empty(c.hidden) if c.attention_bias else None,
            post_norm=self._empty(c.hidden),
            gate_up=self._empty(2 * c.ffn, c.hidden),
            down=self._empty(c.hidden, c.ffn),
        )

    def _places(self) -> dict[str, torch.Tensor]:
        """Where each named weight goes: views of the tensors above."""
        c = self.config
        rows = [c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim]
        places = {"model.embed_tokens.weight": self._embedding, "model.norm.weight": self._norm}
        if not c.tied:
            places["lm_head.weight"] = self._head
        for i, layer in enumerate(self._layers):
            parts = {
                "input_layernorm.weight": layer.input_norm,
                "self_attn.o_proj.weight": layer.output,
                "post_attention_layernorm.weight": layer.post_norm,
                "mlp.down_proj.weight": layer.down,
            }
            parts |= zip(
                (f"mlp.{name}_proj.weight" for name in ("gate", "up")), torch.split(layer.gate_up, c.ffn), strict=True
            )
            parts |= zip((f"self_attn.{name}_proj.weight" for name in "qkv"), torch.split(layer.qkv, rows), strict=True)
            if layer.qkv_bias is not None and layer.output_bias is not None:
                parts |= zip(
                    (f"self_attn.{name}_proj.bias" for name in "qkv"), torch.split(layer.qkv_bias, rows), strict=True
                )
                parts["self_attn.o_proj.bias"] = layer.output_bias
            places |= {f"model.layers.{i}.{name}": tensor for name, tensor in parts.items()}
        return places

    def _fill(self, weights: Iterable[tuple[str, StoredWeight]]) -> None:
        places = self._places()
        for name, weight in weights:
            place = places.pop(name, None)
            if place is None:
                raise without_place(name)
            if place.shape != weight.shape:
                raise wrong_shape(name, weight.shape, place.shape)
            place.copy_(weight.decode())
        if places:
            raise ModelError(f"the model's files lack {len(places)} tensors, among them {min(places)!r}")

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, outputs: torch.Tensor, attend: Attention
    ) -> torch.Tensor:
        """Logits of the tokens that follow.

        `tokens` and `positions` are int64 [tokens]: ids, and the place of each in its own sequence. `outputs`, int64
        [outputs], says after which of them logits are wanted; only those are computed. Returns float32
        [outputs, vocab].
        """
        c = self.config
        cos, sin = self._rotation(positions)
        x = functional.embedding(tokens, self._embedding)
        for i, layer in enumerate(self._layers):
            h = functional.rms_norm(x, (c.hidden,), layer.input_norm, c.norm_eps)
            qkv = linear(h, layer.qkv, layer.qkv_bias).view(-1, c.heads + 2 * c.kv_heads, c.head_dim)
            qk, v = torch.split(qkv, [c.heads + c.kv_heads, c.kv_heads], dim=1)
            q, k = torch.split(_rotate(qk, cos, sin), [c.heads, c.kv_heads], dim=1)
            attended = attend(i, q, k, v).reshape(-1, c.heads * c.head_dim)
            x = x + linear(attended, layer.output, layer.output_bias)
            h = functional.rms_norm(x, (c.hidden,), layer.post_norm, c.norm_eps)
            gate, up = linear(h, layer.gate_up).chunk(2, dim=1)
            x = x + linear(functional.silu(gate) * up, layer.down)
        last = functional.rms_norm(x.index_select(0, outputs), (c.hidden,), self._norm, c.norm_eps)
        return linear(last, self._head).float()

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of each token's rotary angles, in the model's dtype, [tokens, 1, head_dim / 2]."""
        angles = (positions.float()[:, None] * self._frequencies)[:, None]
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of `x`, [tokens, heads, head_dim], by their token's angles."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
