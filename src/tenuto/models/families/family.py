"""Common parts of model families: their models in Hugging Face directories."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Kind

from tenuto.models.config import Attention, ModelConfig
from tenuto.models.rope import Rope
from tenuto.models.settings import Settings
from tenuto.models.weights import StoredWeight, wrong_shape

Named = tuple[str, StoredWeight]
Translate = Callable[[ModelConfig, Iterable[Named]], Iterator[Named]]
"""Translates a model's stored tensors to the names and layout of `ModelCheckpoint.weights`. Tensors with unknown names
are passed on; loading rejects them."""


def each(translate: Callable[[ModelConfig, str, StoredWeight], Iterator[Named]]) -> Translate:
    """Returns a translation that maps each tensor, independently of the others, to any number of weights."""

    def all_of(config: ModelConfig, stored: Iterable[Named]) -> Iterator[Named]:
        for name, weight in stored:
            yield from translate(config, name, weight)

    return all_of


def unchanged(_: ModelConfig, stored: Iterable[Named]) -> Iterator[Named]:
    """A translation for files that already have the names and layout of `ModelCheckpoint.weights`."""
    yield from stored


@dataclass(frozen=True, slots=True)
class Family:
    """Models whose `config.json` names one of `architectures`.

    `read` builds a configuration from `config.json` and the ids of the tokens that end a turn. `quantized` lists the
    supported quantization methods.
    """

    name: str
    architectures: tuple[str, ...]
    read: Callable[[Settings, tuple[int, ...]], ModelConfig]
    translate: Translate = unchanged
    quantized: tuple[str, ...] = ()


KINDS = ("sliding_attention", "full_attention")
"""Names of layers with and without a window in `layer_types`."""


def attention(settings: Settings, rope: Rope | None, *, head_dim: int | None = None, **more: Any) -> Attention:
    """Reads the attention settings whose keys most families share; `more` are other fields of `Attention`, or replace
    these."""
    heads, size = settings.get("num_attention_heads", int), head_dim or settings.head_dim()
    kv_heads = settings.get("num_key_value_heads", int, heads)
    biased = settings.get("attention_bias", bool, default=False)
    scale = max(size, 1) ** -0.5  # `Attention` rejects smaller sizes
    return Attention(heads, kv_heads, size, rope, **({"scale": scale, "bias": biased, "out_bias": biased} | more))


def by_kind(settings: Settings, rope: Rope, window: int, **more: Any) -> dict[str, Attention]:
    """Returns the attention of layers with and without a window, by their names in `KINDS`. `more`: see `attention`."""
    return {kind: attention(settings, rope, window=size, **more) for kind, size in zip(KINDS, (window, 0), strict=True)}


def replaced(name: str, prefixes: Mapping[str, str]) -> str:
    """Returns `name` with the first of the `prefixes` that it has replaced by what that maps to."""
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def renamed(name: str, names: Mapping[str, str]) -> str:
    """Returns `name` with a prefix replaced according to `names`; in a layer, it is the prefix after
    `model.layers.N.`."""
    head, part = split_layer(name)
    return head + replaced(part, names)


def renaming(names: Mapping[str, str]) -> Translate:
    """Returns a translation that renames each weight like `renamed`."""
    return each(lambda _, name, weight: iter([(renamed(name, names), weight)]))


def split_layer(name: str) -> tuple[str, str]:
    """Splits `name` after `model.layers.N.`; the first part is empty for weights outside the layers."""
    match name.split(".", 3):
        case ["model", "layers", number, part]:
            return f"model.layers.{number}.", part
        case _:
            return "", name


def plus_one(weight: StoredWeight) -> StoredWeight:
    """Returns a norm's weight, float32, from its stored difference from 1."""
    return StoredWeight.of(weight.decode() + np.float32(1), Kind.F32)


def split(name: str, weight: StoredWeight, parts: Mapping[str, int]) -> Iterator[Named]:
    """Splits a matrix by its outputs. `parts` maps each part's name to its number of outputs, in order. Raises
    `ModelError` unless they add up to all outputs."""
    total, first = sum(parts.values()), 0
    if len(weight.shape) != 2 or weight.shape[0] != total:
        raise wrong_shape(name, weight.shape, (total, *weight.shape[1:2]))
    for part, count in parts.items():
        yield part, weight.select(slice(first, first + count))
        first += count


def halves(name: str, weight: StoredWeight, first: str, second: str) -> Iterator[Named]:
    """Splits a weight, [2 * width, ...], into its first and second half of rows, named `name + first` and `name +
    second`."""
    middle = weight.shape[0] // 2
    yield name + first, weight.select(slice(middle))
    yield name + second, weight.select(slice(middle, None))
