"""Mixtures of experts: Shazeer et al., arXiv:1701.06538; shared experts: Dai et al., arXiv:2401.06066."""

from __future__ import annotations

import torch

from tenuto.kernels.linear import Matrix, linear
from tenuto.models.block import UNGATED, Room, Step, activate, scaled
from tenuto.models.config import Experts, Mlp
from tenuto.models.mlp import MlpBlock


class ExpertsBlock:
    """One layer's experts and router.

    `_inner` is [experts * parts * width, hidden], where the parts are gate (unless ungated) and up projection; `_down`
    is [experts * hidden, width]. `_biases` are those of the router, `_inner` and `_down`, [experts, ...]."""

    def __init__(self, shape: Experts, hidden: int, name: str, room: Room) -> None:
        """The names of its weights begin with `name`."""
        s, self._shape, self._fused, self._sum = shape, shape, room.fused, room.ranks.sum
        parts = ["up_proj"] if s.activation in UNGATED else ["gate_proj", "up_proj"]
        inner, down = dict.fromkeys(parts, s.width), {"down_proj": hidden}
        self._router = room.matrix(f"{name}gate.weight", s.count, hidden)
        self._correction = room.floats(f"{name}gate.correction", s.count) if s.sigmoid else None

        def of_all(kind: str, outputs: dict[str, int]) -> dict[str, int]:
            """Returns the names of all experts' weights, with their numbers of outputs."""
            return {f"{name}experts.{i}.{part}.{kind}": n for i in range(s.count) for part, n in outputs.items()}

        def biases(outputs: dict[str, int]) -> torch.Tensor:
            return room.stacked(of_all("bias", outputs)).view(s.count, -1)

        self._biases = (room.matrix(f"{name}gate.bias", s.count), biases(inner), biases(down)) if s.biased else None
        self._inner = room.one_factor(of_all("weight", inner), hidden)
        self._down = room.one_factor(of_all("weight", down), s.width)
        shared = Mlp(s.shared, s.activation) if s.shared else None
        self._shared = MlpBlock(shared, hidden, f"{name}shared_expert.", room) if shared else None
        gate = f"{name}shared_expert_gate.weight"
        self._shared_gate = room.matrix(gate, 1, hidden) if shared and s.shared_gate else None

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """`x` and the result are [tokens, hidden]."""
        result = self._sum(self._mix(x, *self._route(x)))
        if self._shared is None:
            return result
        shared = self._shared(x, step)
        if self._shared_gate is not None:
            shared = shared * linear(x, self._shared_gate).sigmoid()
        return result + shared

    def _mix(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the outputs of the `chosen` experts, multiplied by their `weights`."""
        biases = self._biases[1:] if self._biases is not None else None
        if self._fused is not None:
            given = x, chosen, weights, self._inner, self._down, self._shape.count
            return self._fused.mix_experts(*given, biases, self._shape.activation)
        result = torch.zeros_like(x)
        for expert in torch.unique(chosen).tolist():
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            result.index_add_(0, tokens, self._compute(expert, x[tokens]) * weights[tokens, places, None])
        return result

    def _compute(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """Returns the output of one expert for `x`, both [tokens, hidden]."""
        inner, outer = (bias[expert] for bias in self._biases[1:]) if self._biases is not None else (None, None)
        activated = activate(self._shape.activation, linear(x, self._part(self._inner, expert), inner))
        return linear(activated, self._part(self._down, expert), outer)

    def _part(self, matrix: Matrix, expert: int) -> torch.Tensor:
        """Returns the part of a matrix that belongs to one expert."""
        assert isinstance(matrix, torch.Tensor)  # only the device's own kernels compute with quantized ones
        return matrix.view(self._shape.count, -1, matrix.shape[1])[expert]

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
