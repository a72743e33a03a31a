"""What a family says of its models in Hugging Face directories."""

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
"""Makes of a model's tensors, as they are stored, weights under the names and in the layout of `Checkpoint.weights`. A
name it does not know it leaves."""


def each(translate: Callable[[ModelConfig, str, StoredWeight], Iterator[Named]]) -> Translate:
    """A translation in which every tensor becomes none, one or more weights, whatever the others are."""

    def all_of(config: ModelConfig, stored: Iterable[Named]) -> Iterator[Named]:
        for name, weight in stored:
            yield from translate(config, name, weight)

    return all_of


def unchanged(_: ModelConfig, stored: Iterable[Named]) -> Iterator[Named]:
    """Weights that are stored as `Checkpoint.weights` says."""
    yield from stored


@dataclass(frozen=True, slots=True)
class Family:
    """Models whose `config.json` names one of `architectures`.

    `read` makes a configuration from it and from the tokens that end a turn. `quantized` lists the methods by which
    their weights may be quantized.
    """

    name: str
    architectures: tuple[str, ...]
    read: Callable[[Settings, tuple[int, ...]], ModelConfig]
    translate: Translate = unchanged
    quantized: tuple[str, ...] = ()


def attention(settings: Settings, rope: Rope | None, *, head_dim: int | None = None, **more: Any) -> Attention:
    """What most families say of their heads in the same words; `more` are further fields."""
    heads, size = settings.get("num_attention_heads", int), head_dim or settings.head_dim()
    kv_heads = settings.get("num_key_value_heads", int, heads)
    return Attention(heads, kv_heads, size, rope, **({"scale": size**-0.5} | more))


def renamed(name: str, names: Mapping[str, str]) -> str:
    """`name` with its part after `model.layers.N.`, or without a layer all of it, beginning as `names` says."""
    head, part = split_layer(name)
    for old, new in names.items():
        if part.startswith(old):
            return head + new + part.removeprefix(old)
    return name


def split_layer(name: str) -> tuple[str, str]:
    """`model.layers.N.` and what follows it; the first is empty for weights of no layer."""
    match name.split(".", 3):
        case ["model", "layers", number, part]:
            return f"model.layers.{number}.", part
        case _:
            return "", name


def plus_one(weight: StoredWeight) -> StoredWeight:
    """A norm's weight that is stored as its difference from 1, float32."""
    return StoredWeight.of(weight.decode() + np.float32(1), Kind.F32)


def split(name: str, weight: StoredWeight, parts: Mapping[str, int]) -> Iterator[Named]:
    """A matrix whose outputs are those of several, one after the other: each of the `parts` by its name, with as many
    outputs. Raises `ModelError` if they are not all outputs there are."""
    total, first = sum(parts.values()), 0
    if len(weight.shape) != 2 or weight.shape[0] != total:
        raise wrong_shape(name, weight.shape, (total, *weight.shape[1:2]))
    for part, count in parts.items():
        yield part, weight.select(slice(first, first + count))
        first += count


def halves(name: str, weight: StoredWeight, first: str, second: str) -> Iterator[Named]:
    """A weight of [2 width, ...] as two: its rows above and below the middle, `name` followed by `first` and
    `second`."""
    middle = weight.shape[0] // 2
    yield name + first, weight.select(slice(middle))
    yield name + second, weight.select(slice(middle, None))
