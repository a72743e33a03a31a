"""Headers of the answer to the request in progress, which any code that serves it may set before the answer begins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

SESSION = "x-tenuto-session"
CACHED = "x-tenuto-cached"
RECOMPUTED = "x-tenuto-recomputed"
VOLATILE = "x-tenuto-volatile-lines"
LEFT_UNDONE = "x-tenuto-left-undone"

_headers: ContextVar[dict[str, str] | None] = ContextVar("answer_headers", default=None)


@contextmanager
def telling() -> Iterator[dict[str, str]]:
    """Yields the headers that are set inside the block, by name."""
    headers: dict[str, str] = {}
    token = _headers.set(headers)
    try:
        yield headers
    finally:
        _headers.reset(token)


def answer_headers() -> dict[str, str]:
    """Returns the headers of the answer, to be changed; those of no answer outside a request."""
    headers = _headers.get()
    return headers if headers is not None else {}
