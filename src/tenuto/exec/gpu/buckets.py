"""The sizes of captured steps. A step is computed as the smallest captured one that it fits into."""

from __future__ import annotations

MOST_TOKENS = 2560
"""The most tokens of a captured step: the prefills of `exec.device.ON_CUDA`'s mixed steps, and as many decodes again as
it has turns. Longer steps take so long that the host keeps up."""
MOST_SAMPLES = 512
"""The most samples of a captured step: each takes the memory of a vocabulary's logits."""
MOST_STEPPED = 256
"""The most tokens of a row that recurrent layers compute one after another. Scans by blocks are better at more."""
_LEAST_TOKENS, _LEAST_ROWS = 16, 4
_FINE = 512
"""Steps of more tokens take longer with each, so their sizes are closer to each other."""


def bucket_of(rows: int) -> int:
    """Returns the number of rows of the captured decode that computes `rows`: a power of two, or a multiple of 16."""
    return 1 << (rows - 1).bit_length() if rows <= 16 else -(-rows // 16) * 16


def mixed_bucket_of(tokens: int, rows: int, most: int) -> tuple[int, int] | None:
    """Returns the numbers of tokens and of rows of the captured step that computes `tokens` of `rows`; None if it has
    too many tokens. Numbers of tokens are powers of two, the halves between, and from `_FINE` on the quarters; numbers
    of rows are powers of four, or the `most` that there can be."""
    if tokens > MOST_TOKENS:
        return None
    power = 1 << (max(tokens, _LEAST_TOKENS) - 1).bit_length()
    part = power // 8 if power > _FINE else power // 4
    found = min(max(-(-tokens // part) * part, power // 2 + part, _LEAST_TOKENS), MOST_TOKENS)
    many = _LEAST_ROWS
    while many < rows:
        many *= 4
    return found, min(many, most)


def samples_bucket_of(samples: int, tokens: int, rows: int) -> int | None:
    """Returns the number of samples of the captured step of `tokens` tokens and `rows` rows that takes `samples`: one
    for each row, or a power of four as many; None if it has too many samples."""
    if samples > MOST_SAMPLES:
        return None
    found = rows
    while found < samples:
        found *= 4
    return min(found, tokens, MOST_SAMPLES)
