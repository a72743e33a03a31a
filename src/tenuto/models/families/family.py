"""What a family says of its models in Hugging Face directories."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from tenuto.models.config import ModelConfig
from tenuto.models.settings import Settings
from tenuto.models.weights import StoredWeight

Named = tuple[str, StoredWeight]


def unchanged(_: ModelConfig, name: str, weight: StoredWeight) -> Iterator[Named]:
    """A weight that is stored as `Checkpoint.weights` says."""
    yield name, weight


@dataclass(frozen=True, slots=True)
class Family:
    """Models whose `config.json` names one of `architectures`.

    `read` makes a configuration from it and from the tokens that end a turn. `translate` makes of a stored weight of
    such a model none, one or more under the names and in the layout of `Checkpoint.weights`; a name it does not know it
    leaves.
    """

    name: str
    architectures: tuple[str, ...]
    read: Callable[[Settings, tuple[int, ...]], ModelConfig]
    translate: Callable[[ModelConfig, str, StoredWeight], Iterator[Named]] = unchanged


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
    return StoredWeight.of(weight.decode().float() + 1)


def halves(name: str, weight: torch.Tensor, first: str, second: str) -> Iterator[Named]:
    """A weight of [2 width, ...] as two: its rows above and below the middle, `name` followed by `first` and
    `second`."""
    for part, tensor in zip((first, second), weight.chunk(2), strict=True):
        yield name + part, StoredWeight.of(tensor)
