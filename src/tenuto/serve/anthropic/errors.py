"""Errors in Anthropic's form."""

from __future__ import annotations

from typing import Any

from tenuto.serve.shared.errors import ErrorForm, Failure

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's types of errors, by status."""


def _body(failure: Failure, request_id: str) -> dict[str, Any]:
    kind = _TYPES.get(failure.status, "api_error" if failure.status >= 500 else "invalid_request_error")
    told = {"type": kind, "message": failure.message, **failure.more}
    return {"type": "error", "error": told, "request_id": request_id}


FORM = ErrorForm(_body, ("x-request-id", "request-id"))
