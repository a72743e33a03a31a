"""A context that is exceeded, in the words by which clients of other servers recognize it."""

from __future__ import annotations

from typing import Literal

from tenuto.base.errors import ContextExceeded


class ContextLengthExceeded(ContextExceeded):
    """`ContextExceeded`, with the code that OpenAI's clients know."""

    code = "context_length_exceeded"


def context_error(
    error: ContextExceeded, limit: int, field: str, words: Literal["openai", "anthropic"]
) -> ContextLengthExceeded:
    """`error` as clients of `words` know it. `limit`: of the model, in tokens; `field`: the request's, of its input."""
    known = {
        "openai": f"This model's maximum context length is {limit} tokens",
        "anthropic": "prompt is too long",
    }[words]
    return ContextLengthExceeded(f"{known}: {error.message}", param=field)
