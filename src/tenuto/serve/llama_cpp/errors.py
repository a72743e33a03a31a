"""Errors as llama.cpp's clients know them: OpenAI's, with another form where the context is exceeded."""

from __future__ import annotations

from typing import Any

from tenuto.serve.shared.errors import ErrorForm, Failure


def _body(failure: Failure, _: str) -> dict[str, Any]:
    body, found = failure.body, failure.details or {}
    if "context_length" in found:
        counts = {"n_prompt_tokens": found["prompt_tokens"], "n_ctx": found["context_length"]}
        body["error"] |= {"type": "exceed_context_size_error", **counts}
    return body


FORM = ErrorForm(_body)
