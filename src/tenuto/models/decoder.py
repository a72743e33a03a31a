"""The forward pass of decoders over a flat batch of tokens."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

import torch
from torch.nn import functional

from tenuto.base.errors import ModelError
from tenuto.kernels.fused import Fused
from tenuto.kernels.linear import linear
from tenuto.models.attention import AttentionBlock
from tenuto.models.block import Adapted, Norm, Residual, Room, Step, StepMemory
from tenuto.models.config import (
    PREDICTOR,
    Attention,
    Experts,
    GatedDelta,
    Layer,
    Mamba,
    Mamba2,
    Mixer,
    Mlp,
    ModelConfig,
)
from tenuto.models.experts import ExpertsBlock
from tenuto.models.gated_delta import GatedDeltaBlock
from tenuto.models.mamba import MambaBlock
from tenuto.models.mamba2 import Mamba2Block
from tenuto.models.mlp import MlpBlock
from tenuto.models.quantized_places import QuantizedPlace
from tenuto.models.shards import ALONE, Ranks
from tenuto.models.tensors import tensor_of
from tenuto.models.weights import StoredWeight, without_place, wrong_shape

_SPARE = 2**20


MixerBlock = Callable[[torch.Tensor, int, Step], torch.Tensor]
"""`block(x, layer, step)` returns the output, [tokens, hidden], of the model's mixer number `layer` for `x`, [tokens,
hidden]."""


def _mixer(shape: Mixer, hidden: int, epsilon: float, name: str, room: Room) -> MixerBlock:
    match shape:
        case Attention():
            return AttentionBlock(shape, hidden, epsilon, name, room)
        case Mamba():
            return MambaBlock(shape, hidden, name, room)
        case Mamba2():
            return Mamba2Block(shape, hidden, epsilon, name, room)
        case GatedDelta():
            return GatedDeltaBlock(shape, hidden, epsilon, name, room)


def _feed_forward(shape: Mlp | Experts, hidden: int, name: str, room: Room) -> MlpBlock | ExpertsBlock:
    match shape:
        case Mlp():
            return MlpBlock(shape, hidden, f"{name}mlp.", room)
        case Experts():
            return ExpertsBlock(shape, hidden, f"{name}mlp.", room)


class _LayerBlock:
    """One layer. `first` is the number of its first mixer in the model."""

    def __init__(self, layer: Layer, first: int, config: ModelConfig, name: str, room: Room) -> None:
        """The names of its weights begin with `name`."""
        hidden, epsilon = config.hidden, config.norm_eps
        self._first = first
        self._scale = config.residual_scale
        self._mixers = [_mixer(mixer, hidden, epsilon, name, room) for mixer in layer.mixers]
        self._feed_forward = _feed_forward(layer.feed_forward, hidden, name, room) if layer.feed_forward else None
        norms = ["input_layernorm"] * bool(self._mixers) + ["post_attention_layernorm"] * bool(layer.feed_forward)
        if layer.post_norms:
            norms += ["mixer_post_norm", "mlp_post_norm"]
        self._norms = {norm: Norm(name + norm, hidden, epsilon, room) for norm in norms}

    def __call__(self, stream: Residual, step: Step) -> None:
        """Adds the layer's outputs to `stream`."""
        if self._mixers:
            seen = stream.normed(self._norms["input_layernorm"])
            first, *beside = (mixer(seen, self._first + i, step) for i, mixer in enumerate(self._mixers))
            self._add(stream, sum(beside, start=first), "mixer_post_norm")
        if self._feed_forward is not None:
            seen = stream.normed(self._norms["post_attention_layernorm"])
            self._add(stream, self._feed_forward(seen, step), "mlp_post_norm")

    def _add(self, stream: Residual, found: torch.Tensor, norm: str) -> None:
        stream.add(self._norms[norm](found) if norm in self._norms else found, self._scale)


class _Predictor:
    """A head for multi-token prediction (DeepSeek-V3, arXiv:2412.19437). The embedding of a token and the model's
    output at the position before it are normalised and projected together, embedding first, and go through layers and a
    norm."""

    def __init__(self, config: ModelConfig, room: Room) -> None:
        hidden, epsilon = config.hidden, config.norm_eps
        self._norms = [Norm(f"{PREDICTOR}pre_fc_norm_{of}", hidden, epsilon, room) for of in ("embedding", "hidden")]
        self._join = room.factor(f"{PREDICTOR}fc.weight", hidden, 2 * hidden)
        self._layers = _layers(config, config.predictor, f"{PREDICTOR}layers.", room, config.layers)
        self._norm = Norm(f"{PREDICTOR}norm", hidden, epsilon, room)

    def __call__(self, embedded: torch.Tensor, normed: torch.Tensor, step: Step) -> torch.Tensor:
        """`embedded`, `normed` and the result are [tokens, hidden]."""
        joined = torch.cat([norm(x) for norm, x in zip(self._norms, (embedded, normed), strict=True)], dim=1)
        stream = Residual(linear(joined, self._join))
        for layer in self._layers:
            layer(stream, step)
        return stream.normed(self._norm)


def _layers(
    config: ModelConfig, layers: Sequence[Layer], name: str, room: Room, before: Sequence[Layer] = ()
) -> list[_LayerBlock]:
    """Returns blocks of `layers`, which come after the mixers of the layers `before`. The names of their weights begin
    with `name`."""
    firsts = accumulate((len(layer.mixers) for layer in layers), initial=sum(len(layer.mixers) for layer in before))
    return [
        _LayerBlock(layer, first, config, f"{name}{i}.", room)
        for i, (layer, first) in enumerate(zip(layers, firsts, strict=False))
    ]


class Decoder:
    """A model with its weights on one device. It keeps no state between calls; the caller owns the layers' memory."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, StoredWeight]] | None,
        device: torch.device,
        dtype: torch.dtype,
        fused: Fused | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`weights` have the names and layout of `ModelCheckpoint.weights`; `None` stands for random ones, made on the
        device, for measurements. `fused`: the device's own kernels, if there are any. `ranks`: the processes that
        compute the model together; config and weights are those of this one's part. Raises `ModelError` if a weight is
        missing, unknown or of the wrong shape."""
        self.config = config
        self.device = device
        self.dtype = dtype
        stored = dict(weights) if weights is not None else None
        held = sum(math.prod(weight.shape) for weight in stored.values()) if stored is not None else sys.maxsize
        kinds = {name: weight.kind for name, weight in (stored or {}).items() if weight.order is None}
        # spare, so that a slightly wrong shape is reported by name
        room = Room(device, dtype, 2 * held + _SPARE, fused, kinds, ranks)
        self._ranks = ranks
        size = -(-config.vocab // ranks.size), config.hidden
        self._embedding = room.matrix("model.embed_tokens.weight", *size)
        self._head = self._embedding if config.tied else room.factor("lm_head.weight", *size)
        self._norm = Norm("model.norm", config.hidden, config.norm_eps, room)
        self._layers = _layers(config, config.layers, "model.layers.", room)
        self._predictor = _Predictor(config, room) if config.predictor else None
        if stored is None:
            _randomise(room.places)
        else:
            _fill(room.places, stored)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        outputs: torch.Tensor,
        memory: StepMemory,
    ) -> torch.Tensor:
        """Returns the `logits` after the tokens at `outputs`; see `hidden`."""
        return self.logits(self.hidden(tokens, positions, memory), outputs)

    def hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        memory: StepMemory,
        adapted: Sequence[Adapted] = (),
    ) -> torch.Tensor:
        """Computes the output of the last layer, [tokens, hidden], before the last norm. `tokens` and `positions` are
        int64 [tokens]: ids, and positions within each token's own sequence. `adapted`: see `Step`."""
        step, stream = Step(memory, positions, self.dtype, adapted), Residual(self._embedded(tokens))
        for layer in self._layers:
            layer(stream, step)
        return stream.sum()

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        c, x = self.config, self._looked_up(tokens)
        if c.embedding_scale == 1:
            return x
        return x * torch.tensor(c.embedding_scale, dtype=self.dtype)  # the factor is rounded first, as in the reference

    def _looked_up(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns rows of the embedding, of which each rank has some."""
        if self._ranks.size == 1:
            return functional.embedding(tokens, self._embedding)
        own = tokens - self._ranks.rank * len(self._embedding)
        here = (own >= 0) & (own < len(self._embedding))
        found = functional.embedding(own.clamp(0, len(self._embedding) - 1), self._embedding)
        return self._ranks.sum(found * here[:, None])

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the output of the last norm for `hidden`, [tokens, hidden]."""
        return self._norm(hidden)

    def predicted(
        self, tokens: torch.Tensor, normed: torch.Tensor, positions: torch.Tensor, memory: StepMemory
    ) -> torch.Tensor:
        """Computes the head for multi-token prediction. `normed`, [tokens, hidden], are outputs of the last norm, or of
        this function, at `positions`, int64 [tokens], and `tokens`, int64 [tokens], the ids that follow there. Returns
        the normed output, [tokens, hidden], from which `projected` makes the logits of the ids after these."""
        assert self._predictor is not None  # the caller asks only models that have one
        return self._predictor(self._embedded(tokens), normed, Step(memory, positions, self.dtype))

    def logits(self, hidden: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        """Returns the logits of next tokens, float32 [outputs, vocab]. `outputs`, int64 [outputs], are the indices in
        `hidden` of the tokens after which they are wanted."""
        return self.projected(self._norm(hidden.index_select(0, outputs)))

    def projected(self, normed: torch.Tensor) -> torch.Tensor:
        """Returns the logits, float32 [tokens, vocab], of normed outputs, [tokens, hidden]."""
        c = self.config
        logits = self._ranks.join(linear(normed, self._head).float())[:, : c.vocab]
        if c.logit_scale != 1:
            logits *= c.logit_scale
        return (logits / c.logit_cap).tanh_().mul_(c.logit_cap) if c.logit_cap else logits


def _randomise(places: Mapping[str, torch.Tensor | QuantizedPlace]) -> None:
    """Sets all weights to random numbers: those of matrices so small that outputs stay finite, others around 1."""
    for place in places.values():
        assert isinstance(place, torch.Tensor)  # others have a stored type
        if place.dim() > 1:
            place.normal_(std=place.shape[-1] ** -0.5)
        else:
            place.uniform_(0.5, 1.5)


def _fill(places: dict[str, torch.Tensor | QuantizedPlace], weights: Mapping[str, StoredWeight]) -> None:
    """Copies all weights to their places, which it takes out of `places`."""
    for name, weight in weights.items():
        place = places.pop(name, None)
        if place is None:
            raise without_place(name)
        if place.shape != weight.shape:
            raise wrong_shape(name, weight.shape, place.shape)
        if isinstance(place, QuantizedPlace):
            place.fill(weight)
        else:
            place.copy_(tensor_of(weight))
    if places:
        raise ModelError(f"the model's files lack {len(places)} tensors, among them {min(places)!r}")
