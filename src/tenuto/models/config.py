"""The shape of a model: facts about all of it, and its layers one by one. Read from its files and checked once."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from tenuto.base.errors import ModelError
from tenuto.base.sampling import MAX_TOKEN_ID
from tenuto.models.rope import Rope

ACTIVATIONS = ("silu", "gelu_tanh", "clamped", "relu2")
UNGATED = ("relu2",)
"""Activations of networks that have no gate: what is projected up is their only input."""


def _check_sizes(shape: object, name: str, *optional: str) -> None:
    """Raise `ModelError` unless all numbers in `shape`, a dataclass, are more than 0, the `optional` ones at least."""
    for one in fields(shape):  # type: ignore[arg-type]
        value = getattr(shape, one.name)
        if type(value) in (int, float) and not (value > 0 or (value == 0 and one.name in optional)):
            least = "at least 0" if one.name in optional else "more than 0"
            raise ModelError(f"the {name}'s {one.name} is {value}; allowed: {least}")


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention in which `heads` query heads share `kv_heads` key and value heads of `head_dim` elements
    (arXiv:2305.13245).

    Scores are multiplied by `scale`, then kept within `cap` by a hyperbolic tangent, unless that is 0; what the layer
    gives is multiplied by `out_scale`. A token attends to `window` tokens, itself included, or with 0 to all before it.
    `bias` is about the projections of queries, keys and values, `out_bias` about that of what is found. With `qk_norm`
    every query and key head is normalised before rotation; with `gated` what a head found is multiplied by the sigmoid
    of a gate, which the query projection computes beside each head's query. `rope` `None`: positions do not count. With
    `sinks` each head has a score of its own for attending to nothing (arXiv:2309.17453).
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
        _check_sizes(self, "model", "window", "cap")
        if self.heads % self.kv_heads:
            raise ModelError(f"{self.heads} query heads cannot share {self.kv_heads} key heads; allowed: a divisor")
        if self.rope is not None and self.rope.rotated > self.head_dim:
            raise ModelError(f"{self.rope.rotated} elements of a head of {self.head_dim} cannot be rotated")


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Mamba-2 (Dao and Gu, arXiv:2405.21060): `heads` heads of `head_dim` channels, each channel with a state of
    `state` elements; `groups` groups of heads share input and output projections of the state. A causal convolution
    over `kernel` tokens precedes it. Time steps are clamped to `least_step` .. `most_step`. `conv_bias` and `proj_bias`
    say whether convolution and the projections in and out have biases. With `normed` what the heads give is normalised,
    after the gate if `gate_first`. What is projected is multiplied: for gate and time steps by `gate_scale` and
    `step_scale`, for what is convolved by `input_scales`, those of inputs and of projections of the state in and out.
    What the layer gives is multiplied by `out_scale`."""

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
        _check_sizes(self, "model", "least_step")
        _check_kernel(self.kernel)
        if self.heads % self.groups:
            raise ModelError(f"{self.heads} Mamba-2 heads cannot form {self.groups} groups; allowed: a divisor")

    @property
    def channels(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Channels of the convolution: inputs, and projections of the state in and out."""
        return sum(self.convolved_parts)

    @property
    def convolved_parts(self) -> tuple[int, int, int]:
        """How many channels there are of each."""
        return self.channels, self.groups * self.state, self.groups * self.state


@dataclass(frozen=True, slots=True)
class Mamba:
    """Mamba (Gu and Dao, arXiv:2312.00752): `channels` channels, each with a state of `state` elements and a time step
    of its own, which is projected from `rank` elements. A causal convolution over `kernel` tokens precedes it.
    `conv_bias` and `proj_bias` say whether convolution and the projections in and out have biases."""

    channels: int
    state: int
    rank: int
    kernel: int
    conv_bias: bool
    proj_bias: bool

    def __post_init__(self) -> None:
        _check_sizes(self, "model")
        _check_kernel(self.kernel)

    @property
    def convolved(self) -> int:
        """Channels of the convolution: all."""
        return self.channels


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """A gated delta net (Yang et al., arXiv:2412.06464): each of `key_heads` query and key heads of `key_dim` elements
    serves as many of the `value_heads` value heads of `value_dim`. A causal convolution over `kernel` tokens precedes
    it."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    def __post_init__(self) -> None:
        _check_sizes(self, "model")
        _check_kernel(self.kernel)
        if self.value_heads % self.key_heads:
            raise ModelError(f"{self.value_heads} value heads cannot share {self.key_heads} key heads")

    @property
    def convolved(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


def _check_kernel(kernel: int) -> None:
    if kernel < 2:
        raise ModelError(f"the model's convolution has a kernel of {kernel}; allowed: at least 2")


Recurrent = Mamba | Mamba2 | GatedDelta
Mixer = Attention | Recurrent
"""How a layer lets tokens see those before."""


@dataclass(frozen=True, slots=True)
class Mlp:
    """A feed-forward network `width` wide, with a gate unless its `activation`, one of `ACTIVATIONS`, is `UNGATED`.
    What is projected for the gate is multiplied by `gate_scale`, and what the network gives by `out_scale`."""

    width: int
    activation: str = "silu"
    gate_scale: float = 1.0
    out_scale: float = 1.0

    def __post_init__(self) -> None:
        _check_sizes(self, "model")


@dataclass(frozen=True, slots=True)
class Experts:
    """Of `count` networks `width` wide, as `Mlp` has them, the `chosen` ones with the highest scores compute a token,
    weighted by their probability among all, or with `normalised` among the chosen. With `sigmoid` a network's weight is
    the sigmoid of its score instead, with `normalised` divided by the sum of those of the chosen, and it is chosen by
    that and a correction of its own. Weights are multiplied by `scale`. `shared`, the width of one that computes every
    token, may be 0: there is none; with `shared_gate` it is multiplied by the sigmoid of a gate. `biased`: scores and
    the networks that are chosen from have biases."""

    count: int
    chosen: int
    width: int
    normalised: bool
    shared: int
    shared_gate: bool
    activation: str = "silu"
    biased: bool = False
    sigmoid: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_sizes(self, "model", "shared")
        if self.chosen > self.count:
            raise ModelError(f"{self.chosen} of {self.count} experts cannot be chosen; allowed: at most all")


@dataclass(frozen=True, slots=True)
class Layer:
    """A mixer and then a feed-forward network, each after a norm and added to what came in; there may be only one of
    them. A mixer `beside` the first sees the same, and both are added. With `post_norms`, as in Gemma, what each gives
    is normalised too before it is added."""

    mixer: Mixer | None
    feed_forward: Mlp | Experts | None
    post_norms: bool = False
    beside: Mixer | None = None

    def __post_init__(self) -> None:
        if (self.beside is not None and self.mixer is None) or not (self.mixer or self.feed_forward):
            raise ModelError("a layer of the model has neither a mixer nor a feed-forward network")

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """One, two or none."""
        return tuple(mixer for mixer in (self.mixer, self.beside) if mixer is not None)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder.

    `vocab` is the number of rows of the embedding, which may exceed what the tokenizer knows. Embeddings are multiplied
    by `embedding_scale`, what layers add by `residual_scale`, and logits by `logit_scale`; then they are kept within
    `logit_cap` by a hyperbolic tangent, unless that is 0. `norm_eps` is that of all norms. With `tied` the embedding is
    the output matrix too. Recurrent states have `state_dtype`, convolutions the model's. `eos` lists the tokens that
    end a turn. `dtype` is the element type the files store or decode to.
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

    def __post_init__(self) -> None:
        _check_sizes(self, "model", "bos", "logit_cap")
        if not self.layers:
            raise ModelError("the model has no layers; allowed: at least 1")
        if not self.mixers:
            raise ModelError("the model has no layer in which tokens see those before; allowed: at least 1")
        for token in (*self.eos, *((self.bos,) if self.bos is not None else ())):
            if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
                raise ModelError(f"the model names the token {token!r}; allowed: ids from 0 to {MAX_TOKEN_ID}")

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixers of all layers; what keeps their memory knows them by their numbers here."""
        return tuple(mixer for layer in self.layers for mixer in layer.mixers)

    def ropes(self) -> bytes:
        """How all layers rotate keys: those of models that differ in this are of no use to each other."""
        ropes = [mixer.rope for mixer in self.mixers if isinstance(mixer, Attention) and mixer.rope is not None]
        return b"".join(rope.frequencies().tobytes() + str(rope.magnitude).encode() for rope in ropes)

    def within(self, context: int) -> ModelConfig:
        """The same model where no session has more than `context` tokens; see `Rope.within`."""

        def one(mixer: Mixer | None) -> Mixer | None:
            if not isinstance(mixer, Attention) or mixer.rope is None:
                return mixer
            return replace(mixer, rope=mixer.rope.within(context))

        layers = (replace(layer, mixer=one(layer.mixer), beside=one(layer.beside)) for layer in self.layers)
        return replace(self, layers=tuple(layers))
