"""The meaning of sampling options, in float64 and one token at a time: written from their definitions, as a check of
the kernels."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Row:
    """The options of one row, and the tokens it has seen."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: dict[int, float] = field(default_factory=dict)
    masked: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)


def reference_logits(logits: np.ndarray, row: Row) -> np.ndarray:
    """Returns one row's logits after biases, masks and penalties, token by token."""
    edited = logits.astype(np.float64)
    for token in range(len(edited)):
        x = edited[token] + row.bias.get(token, 0.0)
        if token in row.prompt or token in row.output:
            x = x / row.repetition if x > 0 else x * row.repetition
        count = row.output.count(token)
        x -= row.frequency * count + (row.presence if count else 0.0)
        edited[token] = -np.inf if token in row.masked else x
    return edited


def reference_kept(edited: np.ndarray, row: Row) -> tuple[np.ndarray, float]:
    """Returns one row's probabilities over the tokens it keeps, 0 for others; and the distance of the nearest token to
    an edge, where rounding decides."""
    p = np.exp((edited - edited.max()) / row.temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept = order[: row.top_k or None]
    before = np.cumsum(p[kept]) - p[kept]
    to_share, to_least = before / p[kept].sum() - row.top_p, p[kept] / p.max() - row.min_p
    edges = [to_share] * (row.top_p < 1) + [to_least] * (0 < row.min_p < 1)
    kept = kept[((to_share < 0) | (row.top_p == 1)) & (to_least >= 0)]
    result = np.zeros_like(p)
    result[kept] = p[kept]
    return result / result.sum(), min((float(np.abs(edge).min()) for edge in edges), default=1.0)
