"""A model's parts on several devices, each computed by a process, its rank (Shoeybi et al., arXiv:1909.08053).

A rank has an equal share of the heads of attention, of the inner width of feed-forward networks, and of the
vocabulary. Projections into these have rows of the whole matrix, those out of them columns, and their outputs are
added up over all ranks. All else is the same everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from tenuto.base.errors import ConfigError
from tenuto.models.adapter import Adapter, LowRank
from tenuto.models.config import Attention, Experts, Layer, Mixer, Mlp, ModelConfig
from tenuto.models.weights import FLOATS, Bytes, StoredWeight

_INTO = re.compile(r"\.(?:[qkv]_proj|gate_proj|up_proj)\b|\.sinks$")
_OUT_OF = re.compile(r"\.(?:o_proj|down_proj)(?:\.weight)?$")
_ADDED = re.compile(r"\.(?:o_proj|down_proj)\.bias$")
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


class Ranks(Protocol):
    """The processes that compute a model together. All of them call the same methods in the same order."""

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""

    @property
    def size(self) -> int:
        """The number of processes."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all ranks' `x`, which may be overwritten."""

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """Returns all ranks' `x`, [n, m], side by side: [n, size * m]."""


class Alone:
    """The `Ranks` of a process that computes a model alone."""

    rank, size = 0, 1

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """See `Ranks.sum`."""
        return x

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """See `Ranks.join`."""
        return x


ALONE = Alone()


def shard_config(config: ModelConfig, size: int) -> ModelConfig:
    """Returns the shape of one rank's part of a model; the vocabulary is still the whole one. Raises `ConfigError` if
    it does not divide into `size` parts."""

    def share(number: int, what: str) -> int:
        if number % size:
            raise ConfigError(f"tensor_parallel is {size}, but the model has {what} of {number}; allowed: a divisor")
        return number // size

    def mixer(shape: Mixer | None) -> Mixer | None:
        if shape is None:
            return None
        if not isinstance(shape, Attention):
            raise ConfigError(f"tensor_parallel is {size}, but the model has recurrent layers; allowed for these: 1")
        heads, kv_heads = share(shape.heads, "a number of heads"), share(shape.kv_heads, "a number of KV heads")
        return replace(shape, heads=heads, kv_heads=kv_heads)

    def network(shape: Mlp | Experts | None) -> Mlp | Experts | None:
        if shape is None:
            return None
        width = share(shape.width, "networks with a width")
        if isinstance(shape, Mlp):
            return replace(shape, width=width)
        return replace(shape, width=width, shared=share(shape.shared, "a shared network with a width"))

    def layers(whole: tuple[Layer, ...]) -> tuple[Layer, ...]:
        return tuple(
            replace(each, mixer=mixer(each.mixer), beside=mixer(each.beside), feed_forward=network(each.feed_forward))
            for each in whole
        )

    return replace(config, layers=layers(config.layers), predictor=layers(config.predictor))


def shard_weights(
    weights: Iterable[tuple[str, StoredWeight]], rank: int, size: int
) -> Iterator[tuple[str, StoredWeight]]:
    """Yields one rank's part of a model's weights, with their names. The vocabulary's last part is filled up with
    zeros. Matrices whose columns are divided are decoded if they are quantized."""
    for name, weight in weights:
        yield name, _shard(name, weight, rank, size)


def _shard(name: str, weight: StoredWeight, rank: int, size: int) -> StoredWeight:
    if name in _VOCABULARY:
        each = -(-weight.shape[0] // size)
        own = weight.select(_part(weight.shape[0], rank, each))
        return own if own.shape[0] == each else _filled(own, each)
    if _INTO.search(name):
        return weight.select(_part(weight.shape[0], rank, weight.shape[0] // size))
    if _OUT_OF.search(name):
        return _columns(weight, _part(weight.shape[-1], rank, weight.shape[-1] // size))
    if _ADDED.search(name) and rank:
        return StoredWeight.of(np.zeros(weight.shape, np.float32), Kind.F32)
    return weight


def shard_adapter(adapter: Adapter, rank: int, size: int) -> Adapter:
    """Returns one rank's part of an adapter."""

    def shard(name: str, change: LowRank) -> LowRank:
        if _INTO.search(name):
            return replace(change, up=change.up[_part(len(change.up), rank, len(change.up) // size)])
        if _OUT_OF.search(name):
            inputs = change.down.shape[1]
            return replace(change, down=np.ascontiguousarray(change.down[:, _part(inputs, rank, inputs // size)]))
        return change

    return replace(adapter, changes={name: shard(name, each) for name, each in adapter.changes.items()})


def _part(whole: int, rank: int, each: int) -> slice:
    return slice(min(rank * each, whole), min((rank + 1) * each, whole))


def _filled(weight: StoredWeight, outputs: int) -> StoredWeight:
    """Returns a matrix with zeros for more outputs."""
    values = np.zeros((outputs, *weight.shape[1:]), np.float32)
    values[: weight.shape[0]] = weight.decode()
    return StoredWeight.of(values, Kind.F32)


def _columns(weight: StoredWeight, part: slice) -> StoredWeight:
    """Returns some columns of a matrix, which are read on demand."""
    plain = weight.kind in FLOATS.values()

    def read() -> Bytes:
        values = weight.elements() if plain else weight.decode()
        return np.ascontiguousarray(values[:, part]).view(np.uint8)

    return StoredWeight(weight.kind if plain else Kind.F32, (weight.shape[0], part.stop - part.start), read)
