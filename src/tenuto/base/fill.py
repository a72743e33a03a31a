"""Tokens for filling in the middle of a text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FillTokens:
    """The tokens before the prefix, the suffix and the middle of a text, which the model writes. `repository` and
    `file`: those before the names of a repository and a file, if the model has both (Qwen2.5-Coder, arXiv:2409.12186).
    """

    prefix: int
    suffix: int
    middle: int
    repository: int | None = None
    file: int | None = None
