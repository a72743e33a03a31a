"""Which layers share a memory group, and what a unit of it holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tenuto.base.groups import GroupSpec, Kind, MemorySpec
from tenuto.kernels.elements import Element, StatePart
from tenuto.models.config import Attention, GatedDelta, Mamba, Mamba2, ModelConfig, Recurrent


@dataclass(frozen=True, slots=True)
class PageShape:
    """What layers with pages keep: keys and values of `kv_heads` heads of `head_dim` elements, of the last `window`
    tokens, or with 0 of all. `in_bytes`, elements are what bytes are multiplied with: one for every 32 dimensions of a
    key, begun or whole, and one for a value, an even number together."""

    window: int
    kv_heads: int
    head_dim: int
    element: Element
    in_bytes: bool = False

    def unit_bytes(self, page_size: int) -> int:
        """The size of one layer's part of a page of `page_size` token slots."""
        if self.in_bytes:
            each = self.head_dim + ((self.head_dim + 31) // 32 + 2) // 2 * self.element.size
        else:
            each = self.head_dim * self.element.size
        return 2 * page_size * self.kv_heads * each


@dataclass(frozen=True, slots=True)
class StateShape:
    """What recurrent layers keep: the last inputs of the convolution, and the recurrent state."""

    parts: tuple[StatePart, StatePart]

    @property
    def unit_bytes(self) -> int:
        """The size of one layer's part of a state slot."""
        return sum(math.prod(part.shape) * part.element.size for part in self.parts)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that keep the same, by the numbers of their mixers in the model."""

    shape: PageShape | StateShape
    layers: tuple[int, ...]

    def spec(self, slots: int) -> GroupSpec:
        """The group as the engine knows it; a unit is a page, of `slots` token slots, or a state slot, of all its
        layers."""
        if isinstance(self.shape, StateShape):
            return GroupSpec(Kind.STATE, len(self.layers) * self.shape.unit_bytes)
        kind = Kind.SLIDING if self.shape.window else Kind.FULL
        return GroupSpec(kind, len(self.layers) * self.shape.unit_bytes(slots), self.shape.window)


def layer_groups(
    config: ModelConfig,
    element: Element,
    convolutions: Element | None = None,
    *,
    in_bytes: bool = False,
    wide: frozenset[int] = frozenset(),
) -> tuple[LayerGroup, ...]:
    """The groups of a model whose keys and values have elements of type `element`, or are `in_bytes` except those of
    the mixers in `wide`, in the order of their first layers. Elements of convolutions' states are of type
    `convolutions`, if that is given."""
    found: dict[PageShape | StateShape, list[int]] = {}
    for i, mixer in enumerate(config.mixers):
        match mixer:
            case Attention() as a:
                as_bytes = in_bytes and i not in wide
                shape: PageShape | StateShape = PageShape(a.window, a.kv_heads, a.head_dim, element, as_bytes)
            case recurrent:
                shape = StateShape(state_parts(recurrent, convolutions or element, Element(config.state_dtype)))
        found.setdefault(shape, []).append(i)
    return tuple(LayerGroup(shape, tuple(layers)) for shape, layers in found.items())


def state_parts(mixer: Recurrent, convolution: Element, state: Element) -> tuple[StatePart, StatePart]:
    """Of one layer: the inputs that precede the next token's in the convolution, [channels, kernel - 1], and the
    recurrent state: [channels, state] of Mamba, [heads, head_dim, state] of Mamba-2, and [value_heads, key_dim,
    value_dim] of a gated delta net."""
    match mixer:
        case Mamba() as m:
            recurrent: tuple[int, ...] = (m.channels, m.state)
        case Mamba2() as m2:
            recurrent = (m2.heads, m2.head_dim, m2.state)
        case GatedDelta() as g:
            recurrent = (g.value_heads, g.key_dim, g.value_dim)
    return StatePart((mixer.convolved, mixer.kernel - 1), convolution), StatePart(recurrent, state)


def memory_spec(groups: tuple[LayerGroup, ...], page_size: int, slots: int | None = None) -> MemorySpec:
    """All groups as the engine knows them. A page has room for `slots` tokens, `page_size` if that is not given."""
    return MemorySpec(page_size, tuple(group.spec(slots or page_size) for group in groups))
