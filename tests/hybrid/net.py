"""The small hybrid for training: whole texts at once, with gradients. Its parameters have the names used in files."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tenuto.kernels.mamba2 import scan
from tenuto.models.block import Rotation
from tenuto.models.config import Attention, Mamba2, ModelConfig


class AttentionNet(nn.Module):
    """Grouped-query attention, with or without a window."""

    def __init__(self, shape: Attention, hidden: int) -> None:
        super().__init__()
        self.shape = shape
        width = shape.heads * shape.head_dim
        self.q_proj = nn.Linear(hidden, width, bias=False)
        self.k_proj = nn.Linear(hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [texts, length, hidden] to the same shape."""
        s, (texts, length, _) = self.shape, x.shape
        q, k, v = (one(x).view(texts, length, -1, s.head_dim) for one in (self.q_proj, self.k_proj, self.v_proj))
        places = torch.arange(length)
        if s.rope is not None:
            angles = (places[:, None].float() * torch.from_numpy(s.rope.frequencies()))[:, None]
            rotation = Rotation(angles.cos(), angles.sin())
            q, k = rotation(q), rotation(k)
        distance = places[:, None] - places
        seen = (distance >= 0) & (distance < (s.window or length))
        found = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=seen, enable_gqa=True
        )
        out: torch.Tensor = self.o_proj(found.transpose(1, 2).reshape(texts, length, -1))
        return out


class Mamba2Net(nn.Module):
    """The same as `models.mamba2`, from the zero state."""

    def __init__(self, shape: Mamba2, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.shape = shape
        self.in_proj = nn.Linear(hidden, shape.channels + shape.convolved + shape.heads, bias=False)
        self.conv1d = nn.Conv1d(shape.convolved, shape.convolved, shape.kernel, groups=shape.convolved)
        self.A_log = nn.Parameter(torch.linspace(1, 8, shape.heads).log())
        self.dt_bias = nn.Parameter(torch.linspace(-5, -1, shape.heads))
        self.D = nn.Parameter(torch.ones(shape.heads))
        self.norm = nn.RMSNorm(shape.channels, epsilon)
        self.out_proj = nn.Linear(shape.channels, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [texts, length, hidden] to the same shape."""
        s, (texts, length, _) = self.shape, x.shape
        gate, inputs, steps = torch.split(self.in_proj(x), [s.channels, s.convolved, s.heads], dim=2)
        padded = functional.pad(inputs.transpose(1, 2), (s.kernel - 1, 0))
        convolved = functional.silu(self.conv1d(padded)).transpose(1, 2).float()
        y, b, c = torch.split(convolved, list(s.convolved_parts), dim=2)
        heads, groups = (texts, length, s.heads, -1), (texts, length, s.groups, -1)
        y = y.reshape(heads)
        found, _ = scan(
            y,
            functional.softplus(steps.float() + self.dt_bias),
            -self.A_log.exp(),
            b.reshape(groups),
            c.reshape(groups),
            torch.zeros(texts, s.heads, s.head_dim, s.state),
        )
        found = (found + y * self.D[:, None]).flatten(2)
        out: torch.Tensor = self.out_proj(self.norm(found * functional.silu(gate.float())))
        return out


class MlpNet(nn.Module):
    """A SwiGLU network."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [texts, length, hidden] to the same shape."""
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class LayerNet(nn.Module):
    """A mixer and a network, each after a norm."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        layer = config.layers[number]
        if isinstance(layer.mixer, Attention):
            self.self_attn = AttentionNet(layer.mixer, config.hidden)
        else:
            assert isinstance(layer.mixer, Mamba2)
            self.mamba = Mamba2Net(layer.mixer, config.hidden, config.norm_eps)
        assert layer.feed_forward is not None
        self.mlp = MlpNet(layer.feed_forward.width, config.hidden)
        self.input_layernorm = nn.RMSNorm(config.hidden, config.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden, config.norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [texts, length, hidden] to the same shape."""
        mixer = self.self_attn if hasattr(self, "self_attn") else self.mamba
        x = x + mixer(self.input_layernorm(x))
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DecoderNet(nn.Module):
    """Everything except the output matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(LayerNet(config, i) for i in range(len(config.layers)))
        self.norm = nn.RMSNorm(config.hidden, config.norm_eps)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns [texts, length, hidden] for `tokens`, int64 [texts, length]."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.norm(x)
        return out


class Net(nn.Module):
    """The whole model; embeddings are also the output matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.model = DecoderNet(config)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = (2 * len(config.layers)) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(parameter, std=deep * (0.02 if "embed" in name else parameter.shape[1] ** -0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns logits [texts, length, vocab] of the next tokens for `tokens`, int64 [texts, length]."""
        return functional.linear(self.model(tokens), self.model.embed_tokens.weight)
