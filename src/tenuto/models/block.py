"""Common parts of a decoder's blocks: allocation of weights, activations, norms, and the data of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Protocol

import torch
from gguf import GGMLQuantizationType as Kind
from torch.nn import functional

from tenuto.base.errors import ModelError
from tenuto.kernels.fused import Fused
from tenuto.kernels.linear import Matrix, Stack, Weight
from tenuto.kernels.native.grouped import Grouped
from tenuto.kernels.recurrent import Piece, Slots, convolve
from tenuto.models.quantized_places import QuantizedPlace, QuantizedType, type_of
from tenuto.models.rope import Rope
from tenuto.models.shards import ALONE, Ranks


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Returns `x` times `factor`; `x` itself if that is 1."""
    return x if factor == 1 else x * factor


Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_STEEPNESS, _LIMIT = 1.702, 7.0
"""Constants of gpt-oss's activation."""


def _clamped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
    return gate * (gate * _STEEPNESS).sigmoid() * (up + 1)


GATES: dict[str, Gate] = {
    "silu": lambda gate, up: functional.silu(gate) * up,
    "gelu_tanh": lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
    "clamped": _clamped,
}
"""Activations that combine the gate and up projections, by their names in `config.ACTIVATIONS`."""

UNGATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"relu2": lambda up: functional.relu(up).square()}
"""Activation functions of networks without a gate."""


def activate(
    activation: str, projected: torch.Tensor, gate_scale: float = 1.0, fused: Fused | None = None
) -> torch.Tensor:
    """Applies an activation. `projected` is [tokens, parts * width]: the gate, unless ungated, then the up projection.
    Returns [tokens, width]. `fused`: the device's own kernels, if there are any."""
    if fused is not None:
        return fused.activate(activation, projected, gate_scale)
    if activation in UNGATED:
        return UNGATED[activation](projected)
    gate, up = projected.chunk(2, dim=1)
    return GATES[activation](scaled(gate, gate_scale), up)


class Room:
    """Allocates the tensors of weights, uninitialised: matrices in `dtype`, and vectors that are sensitive to rounding
    in float32. `places` are the tensors into which stored weights are copied, by name (see
    `ModelCheckpoint.weights`); they may be views of larger ones. All methods raise `ModelError`, before they allocate,
    if more than `left` elements are needed."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        left: int,
        fused: Fused | None = None,
        kinds: Mapping[str, Kind | Grouped] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`left` is derived from the size of the model's files, so that a wrong configuration cannot exhaust memory.
        `fused`: the device's own kernels, if there are any. They compute with weights that are stored as `kinds`, by
        name, in their bits, if they can. `ranks`: the processes that compute the model together."""
        self.device = device
        self.dtype = dtype
        self.fused = fused
        self.ranks = ranks
        self.places: dict[str, torch.Tensor | QuantizedPlace] = {}
        self._left = left
        self._kinds = kinds if kinds is not None and fused is not None else {}

    def matrix(self, name: str, *shape: int) -> torch.Tensor:
        """Returns the tensor of a weight in the model's element type."""
        place = self.places[name] = self.empty(shape, self.dtype)
        return place

    def factor(self, name: str, outputs: int, inputs: int) -> Matrix:
        """Returns the matrix of a weight that inputs are multiplied by, for `linear`."""
        return self.one_factor({name: outputs}, inputs)

    def factors(self, outputs: Mapping[str, int], inputs: int) -> Weight:
        """Returns what the same inputs are multiplied by for several weights, like `stacked`: one matrix, or several if
        they differ in type."""
        runs = [dict(run) for _, run in groupby(outputs.items(), lambda item: self._type_of(item[0], inputs))]
        parts = tuple(self.one_factor(run, inputs) for run in runs)
        return parts[0] if len(parts) == 1 else Stack(parts)

    def one_factor(self, outputs: Mapping[str, int], inputs: int) -> Matrix:
        """Returns one matrix of several weights, like `stacked`. If they differ in type they are decoded."""
        total = sum(outputs.values())
        numbers, *others = {self._type_of(name, inputs) for name in outputs}
        if numbers is None or others:
            return self.stacked(outputs, inputs)
        self._take(total * inputs, (total, inputs))
        found = numbers.empty(total, self.device)
        firsts = accumulate(outputs.values(), initial=0)
        self.places |= {
            name: QuantizedPlace(found, first, count)
            for (name, count), first in zip(outputs.items(), firsts, strict=False)
        }
        return found

    def _type_of(self, name: str, inputs: int) -> QuantizedType | None:
        return type_of(self._kinds.get(name), inputs)

    def floats(self, name: str, *shape: int) -> torch.Tensor:
        """Returns the float32 tensor of a weight."""
        place = self.places[name] = self.empty(shape, torch.float32)
        return place

    def stacked(self, outputs: Mapping[str, int], *inputs: int) -> torch.Tensor:
        """Returns the tensor of weights that are computed together, stacked in their order: [sum of outputs, inputs].
        `outputs` maps their names to their numbers of outputs."""
        whole = self.empty((sum(outputs.values()), *inputs), self.dtype)
        self.places |= zip(outputs, torch.split(whole, list(outputs.values())), strict=True)
        return whole

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor without places."""
        self._take(math.prod(shape), shape)
        return torch.empty(shape, device=self.device, dtype=dtype)

    def _take(self, elements: int, shape: tuple[int, ...]) -> None:
        self._left -= elements
        if self._left < 0:
            raise ModelError(f"the model's configuration needs a tensor of shape {list(shape)}; its files hold less")


class Norm:
    """Root mean square normalisation (Zhang and Sennrich, arXiv:1910.07467) of the last dimension, in float32.
    Normalised values are multiplied by `weight`, float32 [width]. Each of `groups` equal parts is normalised
    separately."""

    def __init__(self, name: str, width: int, epsilon: float, room: Room, groups: int = 1) -> None:
        self.weight = room.floats(f"{name}.weight", width)
        self.epsilon = epsilon
        self._groups = groups
        self._fused = room.fused

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `x`, [..., width], normalised, in the element type of `x`."""
        if self._fused is not None:
            return self._fused.rms_norm(x, self.weight, self.epsilon, self._groups)
        if self._groups == 1:
            return functional.rms_norm(x.float(), self.weight.shape, self.weight, self.epsilon).to(x.dtype)
        parts = x.float().view(*x.shape[:-1], self._groups, -1)
        normalised = functional.rms_norm(parts, parts.shape[-1:], None, self.epsilon)
        return (normalised.view(x.shape) * self.weight).to(x.dtype)

    def added(self, x: torch.Tensor, found: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the sum of `x` and `found` times `scale`, both [tokens, width], and the sum normalised."""
        if self._groups == 1 and self._fused is not None:
            return self._fused.add_rms_norm(x, found, scale, self.weight, self.epsilon)
        total = x + scaled(found, scale)
        return total, self(total)


class Residual:
    """The sum of a model's embedding and of the outputs of its layers so far, in the model's element type. The last
    output is added when the sum is next read, so that the device's own kernel can add and normalise at once."""

    def __init__(self, x: torch.Tensor) -> None:
        """`x`: the embedding, [tokens, hidden]."""
        self._x = x
        self._last: torch.Tensor | None = None
        self._scale = 1.0

    def add(self, found: torch.Tensor, scale: float = 1.0) -> None:
        """Adds `found`, [tokens, hidden], times `scale`."""
        self._x, self._last, self._scale = self.sum(), found, scale

    def normed(self, norm: Norm) -> torch.Tensor:
        """Returns the sum, [tokens, hidden], normalised."""
        if self._last is None:
            return norm(self._x)
        self._x, normed = norm.added(self._x, self._last, self._scale)
        self._last = None
        return normed

    def sum(self) -> torch.Tensor:
        """Returns the sum, [tokens, hidden]."""
        if self._last is not None:
            self._x, self._last = self._x + scaled(self._last, self._scale), None
        return self._x


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosine and sine of the angles by which the leading pairs (i, i + pairs) of each token's heads are rotated, both
    [tokens, 1, pairs] in the model's element type."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `x`, [tokens, heads, head_dim], rotated."""
        pairs = self.cos.shape[-1]
        first, second, rest = torch.split(x, [pairs, pairs, x.shape[-1] - 2 * pairs], dim=-1)
        return torch.cat((first * self.cos - second * self.sin, second * self.cos + first * self.sin, rest), dim=-1)


class StepMemory(Protocol):
    """The memory of one step's rows. It maps every token to its row and to the keys, values or state before it."""

    def append(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        norms: Sequence[Norm] | None = None,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        """Normalises each head of `q`, [tokens, heads, head_dim], and `k`, [tokens, kv_heads, head_dim], by their two
        `norms`, if there are any, then rotates them. Stores keys and the values `v`, of the shape of `k`, for `layer`,
        and returns the queries."""

    def attend(
        self, layer: int, q: torch.Tensor, scale: float, sinks: torch.Tensor | None = None, cap: float = 0.0
    ) -> torch.Tensor:
        """Returns the attention output of `layer` for queries that `append` returned, in their shape. Query head `h`
        reads key head `h // (heads // kv_heads)`. Scores are multiplied by `scale` and, unless `cap` is 0, soft-capped
        to it by a hyperbolic tangent. `sinks`, float32 [heads], are the scores of one additional key per head, whose
        value is zero."""

    def slots(self, layer: int) -> Slots | None:
        """Returns where the device's own kernels find and leave the states of `layer`, if they compute this step, in
        which every row has few tokens; otherwise None."""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The rows of the step, grouped by their number of tokens in it, so that each group is one dense tensor."""

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns copies of the convolution's and the recurrent state of `layer` before the rows' first tokens, each
        [rows, ...] with the shapes of `groups.state_parts`."""

    def absorbed(self, layer: int) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """Returns the inputs that lead from the states of `read` to the rows' first tokens: rows of the step, int64
        [n], that absorb equally many, and these inputs, float32 [n, count, inputs]. Other rows absorb none."""

    @property
    def keeping(self) -> torch.Tensor | None:
        """The rows whose inputs are kept, int64 [n]; `None` if no row keeps any."""

    def keep(self, layer: int, inputs: torch.Tensor) -> None:
        """Keeps the inputs of the tokens of the rows `keeping`; `inputs` are those of all tokens, [tokens, inputs]."""

    def write(self, layer: int, convolution: torch.Tensor, recurrent: torch.Tensor) -> None:
        """Stores the states of `layer` after the rows' last tokens, or for the rows `keeping` before their first, for
        the next `read`."""


class Adapted(Protocol):
    """The adapters of a step's tokens."""

    def change(self, projected: torch.Tensor, x: torch.Tensor, parts: Mapping[str, int]) -> None:
        """Adds the changes of adapters to `projected`, [tokens, outputs], in place. `x`: the projections' input,
        [tokens, inputs]. `parts`: the names of the projections and their numbers of outputs, in order."""


@dataclass(frozen=True, slots=True)
class AdaptedTokens:
    """The `Adapted` of one adapter: the tokens of a step, int64 [n], whose rows have it, and its changes by the names
    of weights, float32 [rank, inputs] and [outputs, rank]; see `adapter.LowRank`."""

    tokens: torch.Tensor
    changes: Mapping[str, tuple[torch.Tensor, torch.Tensor]]

    def change(self, projected: torch.Tensor, x: torch.Tensor, parts: Mapping[str, int]) -> None:
        """See `Adapted.change`."""
        begin, own = 0, None
        for name, outputs in parts.items():
            if name in self.changes:
                own = x[self.tokens].float() if own is None else own
                down, up = self.changes[name]
                change = own @ down.t() @ up.t()
                projected[self.tokens, begin : begin + outputs] += change.to(projected.dtype)
            begin += outputs


class Step:
    """The data of one forward pass that layers share."""

    def __init__(
        self,
        memory: StepMemory,
        positions: torch.Tensor,
        dtype: torch.dtype,
        adapted: Sequence[Adapted] = (),
    ) -> None:
        """`positions`, int64 [tokens]: the position of each token in its own sequence. `adapted`: the adapters
        of the step's tokens. Tokens that are in none of them have no adapter."""
        self.memory = memory
        self._adapted = adapted
        self._positions = positions.float()[:, None]
        self._dtype = dtype
        self._rotations: dict[Rope, Rotation] = {}

    def adapt(self, projected: torch.Tensor, x: torch.Tensor, parts: Mapping[str, int]) -> torch.Tensor:
        """Adds the changes of all adapters to `projected` and returns it; see `Adapted.change`."""
        for one in self._adapted:
            one.change(projected, x, parts)
        return projected

    def rotation(self, rope: Rope, frequencies: torch.Tensor) -> Rotation:
        """Returns the rotation of each token, times the rope's magnitude. `frequencies`, float32 [pairs], are those of
        `rope`, on the device."""
        if rope not in self._rotations:
            angles = (self._positions * frequencies)[:, None]
            cos, sin = (part * rope.magnitude for part in (angles.cos(), angles.sin()))
            self._rotations[rope] = Rotation(cos.to(self._dtype), sin.to(self._dtype))
        return self._rotations[rope]


def recur(
    step: Step,
    layer: int,
    inputs: torch.Tensor,
    others: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scan: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    found: torch.Tensor,
) -> None:
    """Computes the convolution and the recurrence of a recurrent layer, and stores the states after them. `inputs` are
    those of the convolution, [tokens, channels], and `others` the scan's other ones, [tokens, n].

    `scan(convolved, others, state)` is called for rows of equal length. It returns their outputs, which are copied to
    `found`, [tokens, ...], and the state after them. `convolved` is the convolution's output after SiLU, [rows, length,
    channels]; `others` is [rows, length, n]; `state` is float32."""
    memory = step.memory
    convolution, state = memory.read(layer)

    def advance(rows: torch.Tensor, inputs: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        out, convolution[rows] = convolve(inputs, convolution[rows], weight, bias)
        given, state[rows] = scan(functional.silu(out), others, state[rows].float())
        return given

    for rows, kept in memory.absorbed(layer):
        advance(rows, kept[..., : inputs.shape[1]].to(inputs.dtype), kept[..., inputs.shape[1] :].to(others.dtype))
    before = (convolution[memory.keeping], state[memory.keeping]) if memory.keeping is not None else None
    for piece in memory.pieces:
        found[piece.tokens] = advance(piece.rows, inputs[piece.tokens], others[piece.tokens])
    if before is not None:
        convolution[memory.keeping], state[memory.keeping] = before
        memory.keep(layer, torch.cat((inputs.float(), others.float()), dim=1))
    memory.write(layer, convolution, state)
