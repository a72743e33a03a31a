"""Mixtures of experts: Shazeer et al., arXiv:1701.06538; shared experts: Dai et al., arXiv:2401.06066."""

from __future__ import annotations

import torch

from tenuto.kernels.linear import linear
from tenuto.models.block import GATES, Places, Room
from tenuto.models.config import Experts, Mlp
from tenuto.models.mlp import MlpBlock


class ExpertsBlock:
    """The weights of one layer's experts: `gate_up` is [experts, 2 width, hidden], `down` [experts, hidden, width], and
    the biases are the router's and theirs."""

    prefix = "mlp."

    def __init__(self, shape: Experts, hidden: int, room: Room) -> None:
        self._shape = shape
        self._gated = GATES[shape.activation]
        self._router = room.matrix(shape.count, hidden)
        self._biases = (
            (room.matrix(shape.count), room.matrix(shape.count, 2 * shape.width), room.matrix(shape.count, hidden))
            if shape.biased
            else None
        )
        self._gate_up = room.matrix(shape.count, 2 * shape.width, hidden)
        self._down = room.matrix(shape.count, hidden, shape.width)
        self._shared = MlpBlock(Mlp(shape.shared, shape.activation), hidden, room) if shape.shared else None
        self._shared_gate = room.matrix(1, hidden) if shape.shared and shape.shared_gate else None

    def places(self) -> Places:
        """See `Places`."""
        parts = {"gate.weight": self._router}
        for i, (gate_up, down) in enumerate(zip(self._gate_up, self._down, strict=True)):
            gate, up = gate_up.chunk(2)
            parts |= {f"experts.{i}.gate_proj.weight": gate, f"experts.{i}.up_proj.weight": up}
            parts[f"experts.{i}.down_proj.weight"] = down
        if self._biases is not None:
            parts["gate.bias"] = self._biases[0]
            for i, (gate_up, down) in enumerate(zip(*self._biases[1:], strict=True)):
                gate, up = gate_up.chunk(2)
                parts |= {f"experts.{i}.gate_proj.bias": gate, f"experts.{i}.up_proj.bias": up}
                parts[f"experts.{i}.down_proj.bias"] = down
        if self._shared is not None:
            parts |= {f"shared_expert.{name}": place for name, place in self._shared.places().items()}
        if self._shared_gate is not None:
            parts["shared_expert_gate.weight"] = self._shared_gate
        return parts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` and the result are [tokens, hidden]."""
        chosen, weights = self._route(x)
        result = torch.zeros_like(x)
        for expert in torch.unique(chosen).tolist():
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            result.index_add_(0, tokens, self._compute(expert, x[tokens]) * weights[tokens, places, None])
        if self._shared is None:
            return result
        shared = self._shared(x)
        if self._shared_gate is not None:
            shared = shared * linear(x, self._shared_gate).sigmoid()
        return result + shared

    def _compute(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """What one of the experts makes of `x`, both [tokens, hidden]."""
        inner, outer = (bias[expert] for bias in self._biases[1:]) if self._biases is not None else (None, None)
        gate, up = linear(x, self._gate_up[expert], inner).chunk(2, dim=1)
        return linear(self._gated(gate, up), self._down[expert], outer)

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token, int64, and their weights, both [tokens, chosen]."""
        bias = self._biases[0] if self._biases is not None else None
        scores = linear(x, self._router, bias).float()
        if self._shape.normalised:
            highest, chosen = scores.topk(self._shape.chosen, dim=-1)
            weights = highest.softmax(dim=-1)
        else:
            weights, chosen = scores.softmax(dim=-1).topk(self._shape.chosen, dim=-1)
        return chosen, weights.to(x.dtype)
