"""Mixtures of experts: Shazeer et al., arXiv:1701.06538; shared experts: Dai et al., arXiv:2401.06066."""

from __future__ import annotations

import torch

from tenuto.kernels.linear import linear
from tenuto.models.block import UNGATED, Places, Room, activate, scaled
from tenuto.models.config import Experts, Mlp
from tenuto.models.mlp import MlpBlock


class ExpertsBlock:
    """One layer's experts and router.

    `_inner` is [experts, parts * width, hidden], where the parts are gate (unless ungated) and up projection; `_down`
    is [experts, hidden, width]. `_biases` are those of the router, `_inner` and `_down`."""

    prefix = "mlp."

    def __init__(self, shape: Experts, hidden: int, room: Room) -> None:
        self._shape = shape
        self._parts = ["up_proj"] if shape.activation in UNGATED else ["gate_proj", "up_proj"]
        width = len(self._parts) * shape.width
        self._router = room.matrix(shape.count, hidden)
        self._correction = room.floats(shape.count) if shape.sigmoid else None
        self._biases = (
            (room.matrix(shape.count), room.matrix(shape.count, width), room.matrix(shape.count, hidden))
            if shape.biased
            else None
        )
        self._inner = room.matrix(shape.count, width, hidden)
        self._down = room.matrix(shape.count, hidden, shape.width)
        self._shared = MlpBlock(Mlp(shape.shared, shape.activation), hidden, room) if shape.shared else None
        self._shared_gate = room.matrix(1, hidden) if shape.shared and shape.shared_gate else None

    def places(self) -> Places:
        """Returns the destinations of the weights; see `Places`."""
        parts = {"gate.weight": self._router} | self._expert_places("weight", self._inner, self._down)
        if self._correction is not None:
            parts["gate.correction"] = self._correction
        if self._biases is not None:
            parts |= {"gate.bias": self._biases[0]} | self._expert_places("bias", *self._biases[1:])
        if self._shared is not None:
            parts |= {f"shared_expert.{name}": place for name, place in self._shared.places().items()}
        if self._shared_gate is not None:
            parts["shared_expert_gate.weight"] = self._shared_gate
        return parts

    def _expert_places(self, kind: str, inner: torch.Tensor, down: torch.Tensor) -> dict[str, torch.Tensor]:
        found = {}
        for i, (whole, last) in enumerate(zip(inner, down, strict=True)):
            for name, part in zip(self._parts, whole.chunk(len(self._parts)), strict=True):
                found[f"experts.{i}.{name}.{kind}"] = part
            found[f"experts.{i}.down_proj.{kind}"] = last
        return found

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
        """Returns the output of one expert for `x`, both [tokens, hidden]."""
        inner, outer = (bias[expert] for bias in self._biases[1:]) if self._biases is not None else (None, None)
        activated = activate(self._shape.activation, linear(x, self._inner[expert], inner))
        return linear(activated, self._down[expert], outer)

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the experts chosen for each token, int64, and their weights, both [tokens, chosen]."""
        s, bias = self._shape, self._biases[0] if self._biases is not None else None
        scores = linear(x, self._router, bias).float()
        if self._correction is not None:
            shares = scores.sigmoid()
            chosen = (shares + self._correction).topk(s.chosen, dim=-1).indices
            weights = shares.gather(1, chosen)
            weights = weights / weights.sum(dim=-1, keepdim=True) if s.normalised else weights
        elif s.normalised:
            highest, chosen = scores.topk(s.chosen, dim=-1)
            weights = highest.softmax(dim=-1)
        else:
            weights, chosen = scores.softmax(dim=-1).topk(s.chosen, dim=-1)
        return chosen, scaled(weights, s.scale).to(x.dtype)
