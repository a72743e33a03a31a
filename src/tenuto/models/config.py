"""The shape of a model: settings of the whole model and of each layer, read from its files and checked once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from tenuto.base.errors import ModelError
from tenuto.base.sampling import MAX_TOKEN_ID
from tenuto.models.rope import Rope

ACTIVATIONS = ("silu", "gelu_tanh", "clamped", "relu2")  # in the order of `Activation` in the kernels' `interface.h`
UNGATED = ("relu2",)
"""Activations of networks without a gate; their only input is the up projection."""
PREDICTOR = "mtp."
"""What the names of the weights of `ModelConfig.predictor` begin with."""


def _check_sizes(shape: object, *optional: str) -> None:
    """Raises `ModelError` unless all numbers in `shape`, a dataclass, are positive; `optional` ones may be 0."""
    for one in fields(shape):  # type: ignore[arg-type]
        value = getattr(shape, one.name)
        if type(value) in (int, float) and not (value > 0 or (value == 0 and one.name in optional)):
            least = "at least 0" if one.name in optional else "more than 0"
            raise ModelError(f"the model's {one.name} is {value}; allowed: {least}")


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention in which `heads` query heads share `kv_heads` key and value heads of `head_dim` elements
    (arXiv:2305.13245).

    Scores are multiplied by `scale` and, unless `cap` is 0, soft-capped to `cap` by a hyperbolic tangent; the layer's
    output is multiplied by `out_scale`. A token attends to the last `window` tokens including itself (0: to all).
    `bias`: the query, key and value projections have biases; `out_bias`: the output projection has one. `qk_norm`:
    query and key heads are normalised before rotation. `gated`: a head's output is multiplied by the sigmoid of a gate,
    which the query projection computes next to the head's query. `rope` is None in layers that ignore positions.
    `sinks`: each head has a learned score for attending to nothing (arXiv:2309.17453).
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    scale: float
    window: int = 0
    bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    gated: bool = False
    sinks: bool = False
    cap: float = 0.0
    out_scale: float = 1.0

    def __post_init__(self) -> None:
        _check_sizes(self, "window", "cap")
        if self.heads % self.kv_heads:
            raise ModelError(f"{self.heads} query heads cannot share {self.kv_heads} key heads; allowed: a divisor")
        if self.rope is not None and self.rope.rotated > self.head_dim:
            raise ModelError(f"{self.rope.rotated} elements of a head of {self.head_dim} cannot be rotated")


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Mamba-2 (Dao and Gu, arXiv:2405.21060): `heads` heads of `head_dim` channels, each channel with a state of
    `state` elements; the heads of each of `groups` groups share B and C, the state's input and output projections. A
    causal convolution over `kernel` tokens comes first. Time steps are clamped to `least_step` .. `most_step`.

    `conv_bias`, `proj_bias`: the convolution, or both projections, have biases. `normed`: the heads' output is
    normalised, after gating if `gate_first`. `gate_scale` and `step_scale` multiply the projected gate and time steps,
    `input_scales` the projected inputs, B and C, and `out_scale` the layer's output."""

    heads: int
    head_dim: int
    state: int
    groups: int
    kernel: int
    conv_bias: bool
    proj_bias: bool
    least_step: float = 0.0
    most_step: float = float("inf")
    normed: bool = True
    gate_first: bool = True
    gate_scale: float = 1.0
    step_scale: float = 1.0
    input_scales: tuple[float, float, float] = (1.0, 1.0, 1.0)
    out_scale: float = 1.0

    def __post_init__(self) -> None:
        _check_sizes(self, "least_step")
        _check_kernel(self.kernel)
        if self.heads % self.groups:
            raise ModelError(f"{self.heads} Mamba-2 heads cannot form {self.groups} groups; allowed: a divisor")

    @property
    def channels(self) -> int:
        """Number of channels of all heads."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Number of channels of the convolution: inputs, B and C."""
        return sum(self.convolved_parts)

    @property
    def convolved_parts(self) -> tuple[int, int, int]:
        """Numbers of convolved channels: inputs, B, C."""
        return self.channels, self.groups * self.state, self.groups * self.state


@dataclass(frozen=True, slots=True)
class Mamba:
    """Mamba (Gu and Dao, arXiv:2312.00752): `channels` channels, each with a state of `state` elements and its own time
    step, projected from `rank` elements. A causal convolution over `kernel` tokens comes first. `conv_bias`,
    `proj_bias`: the convolution, or both projections, have biases."""

    channels: int
    state: int
    rank: int
    kernel: int
    conv_bias: bool
    proj_bias: bool

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_kernel(self.kernel)

    @property
    def convolved(self) -> int:
        """Number of channels of the convolution, here all `channels`."""
        return self.channels


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """A gated delta net (Yang et al., arXiv:2412.06464): `key_heads` query and key heads of `key_dim` elements, each
    serving an equal share of the `value_heads` value heads of `value_dim` elements. A causal convolution over `kernel`
    tokens comes first."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_kernel(self.kernel)
        if self.value_heads % self.key_heads:
            raise ModelError(f"{self.value_heads} value heads cannot share {self.key_heads} key heads")

    @property
    def convolved(self) -> int:
        """Number of channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


def _check_kernel(kernel: int) -> None:
    if kernel < 2:
        raise ModelError(f"the model's convolution has a kernel of {kernel}; allowed: at least 2")


Recurrent = Mamba | Mamba2 | GatedDelta
Mixer = Attention | Recurrent
"""The part of a layer through which tokens see earlier ones."""


@dataclass(frozen=True, slots=True)
class Mlp:
    """A feed-forward network of inner width `width`, gated unless its `activation`, one of `ACTIVATIONS`, is in
    `UNGATED`. `gate_scale` multiplies the projected gate, and `out_scale` the output."""

    width: int
    activation: str = "silu"
    gate_scale: float = 1.0
    out_scale: float = 1.0

    def __post_init__(self) -> None:
        _check_sizes(self)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts. For each token, the `chosen` of `count` networks of width `width` (see `Mlp`) with the
    highest router scores are computed, and their outputs added with weights.

    A weight is the softmax of the scores over all networks, or with `normalised` over the chosen ones. With `sigmoid`
    it is the sigmoid of the score, with `normalised` divided by the sum over the chosen networks; networks are then
    chosen by the sigmoid plus a learned correction. `scale` multiplies all weights.

    `shared`: width of a network that computes every token (0: none); with `shared_gate` its output is multiplied by the
    sigmoid of a gate. `biased`: the router and the networks it chooses from have biases."""

    count: int
    chosen: int
    width: int
    normalised: bool
    shared: int = 0
    shared_gate: bool = False
    activation: str = "silu"
    biased: bool = False
    sigmoid: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_sizes(self, "shared")
        if self.chosen > self.count:
            raise ModelError(f"{self.chosen} of {self.count} experts cannot be chosen; allowed: at most all")


@dataclass(frozen=True, slots=True)
class Layer:
    """A mixer and then a feed-forward network, either of which may be missing; each has a norm before it and a residual
    connection around it. A mixer `beside` the first has the same input, and their outputs are added. With `post_norms`,
    as in Gemma, outputs are normalised before the residual is added."""

    mixer: Mixer | None
    feed_forward: Mlp | Experts | None
    post_norms: bool = False
    beside: Mixer | None = None

    def __post_init__(self) -> None:
        if (self.beside is not None and self.mixer is None) or not (self.mixer or self.feed_forward):
            raise ModelError("a layer of the model has neither a mixer nor a feed-forward network")

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The layer's zero, one or two mixers."""
        return tuple(mixer for mixer in (self.mixer, self.beside) if mixer is not None)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of a decoder.

    `vocab` is the number of rows of the embedding, which may exceed the tokenizer's vocabulary. Embeddings are
    multiplied by `embedding_scale`, the layers' residual additions by `residual_scale`, and logits by `logit_scale`.
    Unless `logit_cap` is 0, logits are then soft-capped to it by a hyperbolic tangent. `norm_eps` is the epsilon of all
    norms. `tied`: the embedding is also the output matrix. `headless`: it only stands in for a matrix that the files do
    not have, so that logits mean nothing. `predictor`: the layers of a head for multi-token prediction (DeepSeek-V3,
    arXiv:2412.19437), all with attention or without a mixer; empty without one. Recurrent states have type
    `state_dtype`, states of convolutions the model's type. `eos` lists the tokens that end a turn. `dtype` is the
    element type that the files store or decode to.
    """

    layers: tuple[Layer, ...]
    hidden: int
    vocab: int
    norm_eps: float
    tied: bool
    max_context: int
    eos: tuple[int, ...]
    bos: int | None
    dtype: str
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    state_dtype: str = "float32"
    headless: bool = False
    predictor: tuple[Layer, ...] = ()

    def __post_init__(self) -> None:
        _check_sizes(self, "bos", "logit_cap")
        if not self.layers:
            raise ModelError("the model has no layers; allowed: at least 1")
        if any(not isinstance(mixer, Attention) for layer in self.predictor for mixer in layer.mixers):
            raise ModelError("the model's head for multi-token prediction has a recurrent layer; allowed: attention")
        if not self.mixers:
            raise ModelError("the model has no layer with attention or recurrence; allowed: at least 1")
        for token in (*self.eos, *((self.bos,) if self.bos is not None else ())):
            if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
                raise ModelError(f"the model names the token {token!r}; allowed: ids from 0 to {MAX_TOKEN_ID}")

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixers of all layers in order, those of `predictor` last. Elsewhere a mixer's number, or a memory group's
        `layers`, is an index into this."""
        return tuple(mixer for _, layer in self.named_layers() for mixer in layer.mixers)

    def named_layers(self) -> Iterator[tuple[str, Layer]]:
        """Yields all layers, those of `predictor` last, each with what the names of its weights begin with."""
        yield from ((f"model.layers.{i}.", layer) for i, layer in enumerate(self.layers))
        yield from ((f"{PREDICTOR}layers.{i}.", layer) for i, layer in enumerate(self.predictor))

    def ropes(self) -> bytes:
        """Returns bytes that encode the ropes of all layers; models in which they differ cannot share cached keys."""
        ropes = [mixer.rope for mixer in self.mixers if isinstance(mixer, Attention) and mixer.rope is not None]
        return b"".join(rope.frequencies().tobytes() + str(rope.magnitude).encode() for rope in ropes)

    def within(self, context: int) -> ModelConfig:
        """Returns the configuration for sessions of at most `context` tokens; see `Rope.within`."""

        def one(mixer: Mixer | None) -> Mixer | None:
            if not isinstance(mixer, Attention) or mixer.rope is None:
                return mixer
            return replace(mixer, rope=mixer.rope.within(context))

        def each(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
            return tuple(replace(layer, mixer=one(layer.mixer), beside=one(layer.beside)) for layer in layers)

        return replace(self, layers=each(self.layers), predictor=each(self.predictor))
