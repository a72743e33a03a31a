"""What the blocks of a decoder have in common: room for weights, norms, and what a step hands them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from tenuto.base.errors import ModelError
from tenuto.kernels.recurrent import Piece
from tenuto.models.rope import Rope


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    """`x` times `factor`, which is mostly 1."""
    return x if factor == 1 else x * factor


Places = Mapping[str, torch.Tensor]
"""Where a block's weights go, by their names in the block: views of its tensors."""

Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_STEEPNESS, _LIMIT = 1.702, 7.0
"""Of gpt-oss."""


def _clamped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
    return gate * (gate * _STEEPNESS).sigmoid() * (up + 1)


GATES: dict[str, Gate] = {
    "silu": lambda gate, up: functional.silu(gate) * up,
    "gelu_tanh": lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
    "clamped": _clamped,
}
"""What is made of a gate and what it gates, by the names in `config.ACTIVATIONS`."""

UNGATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"relu2": lambda up: functional.relu(up).square()}
"""What is made of the only input of a network without a gate."""


def activate(activation: str, projected: torch.Tensor, gate_scale: float = 1.0) -> torch.Tensor:
    """What comes out, [tokens, width], of what has been projected: gates, if there are any, and beside them what they
    gate, [tokens, parts * width]."""
    if activation in UNGATED:
        return UNGATED[activation](projected)
    gate, up = projected.chunk(2, dim=1)
    return GATES[activation](scaled(gate, gate_scale), up)


@dataclass(slots=True)
class Room:
    """Where weights are kept: matrices in `dtype`, and vectors whose rounding would be felt everywhere in float32.
    `left`: how many more elements may be allocated, by what the model's files hold. All methods raise `ModelError`,
    before they allocate anything, if a configuration describes more than that."""

    device: torch.device
    dtype: torch.dtype
    left: int

    def matrix(self, *shape: int) -> torch.Tensor:
        """An uninitialised tensor in the model's element type."""
        return self._empty(shape, self.dtype)

    def floats(self, *shape: int) -> torch.Tensor:
        """An uninitialised tensor of float32."""
        return self._empty(shape, torch.float32)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.left -= math.prod(shape)
        if self.left < 0:
            raise ModelError(f"the model's configuration needs a tensor of shape {list(shape)}; its files hold less")
        return torch.empty(shape, device=self.device, dtype=dtype)


class Norm:
    """Root mean square normalisation (Zhang and Sennrich, arXiv:1910.07467) of the last dimension, in float32.
    `weight`, float32 [width], is what normalised values are multiplied by. Each of `groups` equal parts is normalised
    by itself."""

    def __init__(self, width: int, epsilon: float, room: Room, groups: int = 1) -> None:
        self.weight = room.floats(width)
        self._epsilon = epsilon
        self._groups = groups

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width], in the element type of `x`."""
        if self._groups == 1:
            return functional.rms_norm(x.float(), self.weight.shape, self.weight, self._epsilon).to(x.dtype)
        parts = x.float().view(*x.shape[:-1], self._groups, -1)
        normalised = functional.rms_norm(parts, parts.shape[-1:], None, self._epsilon)
        return (normalised.view(x.shape) * self.weight).to(x.dtype)


class StepMemory(Protocol):
    """The memory of one step's rows. It knows which row every token belongs to and where its past is."""

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        sinks: torch.Tensor | None = None,
        cap: float = 0.0,
    ) -> torch.Tensor:
        """Store `k` and `v` ([tokens, kv_heads, head_dim]) of `layer` and return what `q` ([tokens, heads, head_dim])
        attends to, same shape as `q`. Query head `h` reads key head `h // (heads // kv_heads)`. Scores are multiplied
        by `scale`, then kept within `cap` by a hyperbolic tangent, unless that is 0. `sinks`, float32 [heads], are
        scores of a key that each head has besides, whose value is zero."""
        ...

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All rows of the step, those with equally many tokens together."""
        ...

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The convolution's and the recurrent state of `layer` before the rows' first tokens, [rows, ...] as
        `groups.state_parts` says. They are copies."""
        ...

    def write(self, layer: int, convolution: torch.Tensor, recurrent: torch.Tensor) -> None:
        """Store what `read` gives next time: the states after the rows' last tokens."""
        ...


class Step:
    """One forward pass, as its layers see it."""

    def __init__(self, memory: StepMemory, positions: torch.Tensor, dtype: torch.dtype) -> None:
        """`positions` int64 [tokens]: the place of each token in its own sequence."""
        self.memory = memory
        self._positions = positions.float()[:, None]
        self._dtype = dtype
        self._rotations: dict[Rope, tuple[torch.Tensor, torch.Tensor]] = {}

    def rotation(self, rope: Rope, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of each token's angles, times the magnitude, in the model's element type, [tokens, 1, pairs].
        `frequencies`, float32 [pairs], are those of `rope`, on the device."""
        if rope not in self._rotations:
            angles = (self._positions * frequencies)[:, None]
            cos, sin = (part * rope.magnitude for part in (angles.cos(), angles.sin()))
            self._rotations[rope] = cos.to(self._dtype), sin.to(self._dtype)
        return self._rotations[rope]
