"""The witness's output after a history."""

from __future__ import annotations

from tenuto.exec.witness_hashes import history_hash, next_token


def said(history: list[int], count: int) -> list[int]:
    """Returns the witness's output after a history."""
    tokens = list(history)
    for _ in range(count):
        tokens.append(next_token(history_hash(tokens), 1000))
    return tokens[len(history) :]
