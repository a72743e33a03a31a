"""Rotary frequencies."""

from __future__ import annotations

import torch

from tenuto.models.config import ModelConfig


def frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians a token of each rotary pair, float32 [head_dim / 2]; see `ModelConfig`."""
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float()
    # In float32 and in this order of operations, as the reference the checkpoints were trained with.
    return 1.0 / (config.rope_theta ** (pairs / config.head_dim)) / torch.tensor(config.rope_divisors)
