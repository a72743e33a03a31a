"""Division of a model's layers into memory groups, and the contents of a group's units."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tenuto.base.groups import GroupSpec, Kind, MemorySpec
from tenuto.kernels.elements import Element, KVCacheDtype, StatePart
from tenuto.models.config import Attention, GatedDelta, Mamba, Mamba2, ModelConfig, Recurrent


@dataclass(frozen=True, slots=True)
class PageShape:
    """Memory of an attention layer: keys and values of `kv_heads` heads with `head_dim` elements, for the last `window`
    tokens (0: for all). They are stored as `element`, or quantized to `kv_type` with scales of type `element`."""

    window: int
    kv_heads: int
    head_dim: int
    element: Element
    kv_type: KVCacheDtype = KVCacheDtype.AUTO

    def unit_bytes(self, page_size: int) -> int:
        """Returns the size, in bytes, of one layer's part of a page with `page_size` token slots."""
        return page_size * self.kv_heads * self.kv_type.slot_bytes(self.head_dim, self.element)


@dataclass(frozen=True, slots=True)
class StateShape:
    """Memory of a recurrent layer: the last inputs of its convolution, and its recurrent state. `inputs`: the numbers,
    in float32, that are kept of a token that may be rejected; see `inputs_of`."""

    parts: tuple[StatePart, StatePart]
    inputs: int

    @property
    def input_bytes(self) -> int:
        """Size, in bytes, of what one layer keeps of a token that may be rejected."""
        return self.inputs * Element.FLOAT32.size

    @property
    def unit_bytes(self) -> int:
        """Size, in bytes, of one layer's part of a state slot."""
        return sum(math.prod(part.shape) * part.element.size for part in self.parts)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose memory has the same shape. `layers` are indices into `ModelConfig.mixers`."""

    shape: PageShape | StateShape
    layers: tuple[int, ...]

    def spec(self, slots: int) -> GroupSpec:
        """Returns the group's specification for the engine. A unit (a state slot, or a page with room for `slots`
        tokens) holds the memory of all layers of the group."""
        if isinstance(self.shape, StateShape):
            layers = len(self.layers)
            return GroupSpec(
                Kind.STATE, layers * self.shape.unit_bytes, bytes_per_input=layers * self.shape.input_bytes
            )
        kind = Kind.SLIDING if self.shape.window else Kind.FULL
        return GroupSpec(kind, len(self.layers) * self.shape.unit_bytes(slots), self.shape.window)


def layer_groups(
    config: ModelConfig,
    element: Element,
    convolutions: Element | None = None,
    *,
    kv_type: KVCacheDtype = KVCacheDtype.AUTO,
    wide: frozenset[int] = frozenset(),
) -> tuple[LayerGroup, ...]:
    """Returns a model's memory groups in the order of their first layers. Keys and values are quantized to
    `kv_type`, unless that is AUTO or the mixer's number is in `wide`; otherwise they are stored as `element`. States of
    convolutions are stored as `convolutions`, by default `element`."""
    found: dict[PageShape | StateShape, list[int]] = {}
    for i, mixer in enumerate(config.mixers):
        match mixer:
            case Attention() as a:
                own_type = KVCacheDtype.AUTO if i in wide else kv_type
                shape: PageShape | StateShape = PageShape(a.window, a.kv_heads, a.head_dim, element, own_type)
            case recurrent:
                parts = state_parts(recurrent, convolutions or element, Element(config.state_dtype))
                shape = StateShape(parts, inputs_of(recurrent))
        found.setdefault(shape, []).append(i)
    return tuple(LayerGroup(shape, tuple(layers)) for shape, layers in found.items())


def state_parts(mixer: Recurrent, convolution: Element, state: Element) -> tuple[StatePart, StatePart]:
    """Returns the shapes and element types of one layer's state. The convolution keeps its last inputs, [channels,
    kernel - 1]. The recurrent state is [channels, state] for Mamba, [heads, head_dim, state] for Mamba-2, and
    [value_heads, key_dim, value_dim] for a gated delta net."""
    match mixer:
        case Mamba() as m:
            recurrent: tuple[int, ...] = (m.channels, m.state)
        case Mamba2() as m2:
            recurrent = (m2.heads, m2.head_dim, m2.state)
        case GatedDelta() as g:
            recurrent = (g.value_heads, g.key_dim, g.value_dim)
    return StatePart((mixer.convolved, mixer.kernel - 1), convolution), StatePart(recurrent, state)


def inputs_of(mixer: Recurrent) -> int:
    """Returns how many numbers a layer's recurrence reads of a token: the inputs of its convolution, each head's time
    step (Mamba-2), or each head's decay and write strength (gated delta net)."""
    match mixer:
        case Mamba():
            return mixer.convolved
        case Mamba2():
            return mixer.convolved + mixer.heads
        case GatedDelta():
            return mixer.convolved + 2 * mixer.value_heads


def memory_spec(groups: tuple[LayerGroup, ...], page_size: int, slots: int | None = None) -> MemorySpec:
    """Returns the specification of all groups for the engine. Each page holds `page_size` tokens in the space of
    `slots`, by default the same; kernels that work in blocks need more."""
    return MemorySpec(page_size, tuple(group.spec(slots or page_size) for group in groups))
