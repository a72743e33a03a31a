"""The form of errors in answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tenuto.base.errors import TenutoError

RETRY_SECONDS = 1
"""For `Retry-After`, if nothing better is known."""
BROKEN = "the server failed; its log says why"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
"""OpenAI's types of errors, by status."""


class DetailedError(TenutoError):
    """An error with facts that the clients of one interface read. `details`: under the interface's names."""

    def __init__(self, message: str, details: Mapping[str, Any], *, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.details = details


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as it is answered, in OpenAI's form for all interfaces. `details`: as of `DetailedError`."""

    status: int
    code: str
    message: str
    param: str | None = None
    details: Mapping[str, Any] | None = None

    @staticmethod
    def of(error: TenutoError) -> Failure:
        """Omits the error's detail; of our own mistakes nothing is told at all."""
        message = BROKEN if error.status == 500 else error.message
        details = error.details if isinstance(error, DetailedError) else None
        return Failure(error.status, error.code, message, error.param, details)

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        told: dict[str, Any] = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": told if self.details is None else {**told, "details": dict(self.details)}}

    @property
    def headers(self) -> dict[str, str]:
        if self.status in (429, 503):
            return {"retry-after": str(RETRY_SECONDS)}
        if self.status == 408:
            return {"connection": "close"}  # the rest may come at any time
        return {"www-authenticate": "Bearer"} if self.status == 401 else {}
