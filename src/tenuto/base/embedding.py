"""The way in which a model makes embeddings."""

from __future__ import annotations

from dataclasses import dataclass

from tenuto.base.options import Pooling


@dataclass(frozen=True, slots=True)
class EmbeddingHabits:
    """How a model's inputs become embeddings: vectors of `width` numbers, pooled as `pooling` says, and scaled to
    length 1 if `normalized`. `shorter`: smaller numbers of dimensions to which it was trained to be cut (Matryoshka
    embeddings, arXiv:2205.13147); `None`: any. `prompts`: texts to put before others, by name, of which `default` is
    used if none is named. `declared`: the files describe embeddings. `only`: the model has no output matrix, so that it
    generates nothing."""

    width: int
    pooling: Pooling = "last"
    normalized: bool = True
    shorter: tuple[int, ...] | None = ()
    prompts: tuple[tuple[str, str], ...] = ()
    default: str = ""
    declared: bool = False
    only: bool = False
