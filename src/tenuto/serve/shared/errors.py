"""Errors in answers. Each API has its own form; OpenAI's is also that of the native API and of SGLang's."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
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
    """An error as it is answered, before an API's form is given to it. `details`: as in `DetailedError`."""

    status: int
    code: str
    message: str
    param: str | None = None
    details: Mapping[str, Any] | None = None

    @staticmethod
    def of(error: TenutoError) -> Failure:
        """Omits the error's detail, and the message of an error that is our own mistake."""
        message = BROKEN if error.status == 500 else error.message
        details = error.details if isinstance(error, DetailedError) else None
        return Failure(error.status, error.code, message, error.param, details)

    @property
    def body(self) -> dict[str, Any]:
        """In OpenAI's form."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        told = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": {**told, **self.more}}

    @property
    def more(self) -> dict[str, Any]:
        """The details, as a field of the error, if there are any."""
        return {} if self.details is None else {"details": dict(self.details)}

    @property
    def headers(self) -> dict[str, str]:
        if self.status in (429, 503):
            return {"retry-after": str(RETRY_SECONDS)}
        if self.status == 408:
            return {"connection": "close"}  # the rest may come at any time
        return {"www-authenticate": "Bearer"} if self.status == 401 else {}


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """The form in which one API tells errors. `body`: writes the body of the answer, or the data of a stream's event,
    from a failure and the request's id. `id_headers`: the headers of every answer that have the request's id."""

    body: Callable[[Failure, str], dict[str, Any]]
    id_headers: tuple[str, ...] = ("x-request-id",)


def new_request_id() -> str:
    """An id for a request whose client has given none."""
    return secrets.token_hex(8)


OPENAI_FORM = ErrorForm(lambda failure, _: failure.body)
