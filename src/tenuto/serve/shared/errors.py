"""Errors in answers. Each API has its own form; OpenAI's is also that of the native API and of SGLang's."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from tenuto.base.errors import TenutoError

RETRY_SECONDS = 1
"""Default value of `Retry-After`."""
BROKEN = "the server failed; its log says why"
_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
"""OpenAI's types of errors, by status."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The content of an error answer, independent of any API's form. `details`: values for programs."""

    status: int
    code: str
    message: str
    param: str | None = None
    details: Mapping[str, Any] | None = None

    @staticmethod
    def of(error: TenutoError) -> Failure:
        """Returns the public content of an error: without its detail and, for internal errors, without its message."""
        message = BROKEN if error.status == 500 else error.message
        return Failure(error.status, error.code, message, error.param, error.details)

    @staticmethod
    def in_body(status: int, body: Mapping[str, Any]) -> Failure:
        """Returns the content of an error answer in OpenAI's form."""
        error = body["error"]
        return Failure(status, error["code"], error["message"], error["param"], error.get("details"))

    @property
    def body(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        told = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": {**told, **self.more}}

    @property
    def more(self) -> dict[str, Any]:
        """The details as a field of the error, or nothing without details."""
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
    """The form of one API's errors. `body`: returns the body of an answer, or the data of a stream's event, for a
    failure and the request's id. `id_headers`: headers that carry the request's id in every answer."""

    body: Callable[[Failure, str], dict[str, Any]]
    id_headers: tuple[str, ...] = ("x-request-id",)


def is_anthropics(scope: Scope) -> bool:
    """Whether the request comes from a client of Anthropic: these send the version of the interface."""
    return "anthropic-version" in Headers(scope=scope)


def is_request_id(given: str) -> bool:
    """Whether a client may give its request this id: a short one of visible ASCII."""
    return _REQUEST_ID.fullmatch(given) is not None


def new_request_id() -> str:
    """Returns an id for a request that came without one."""
    return secrets.token_hex(8)


OPENAI_FORM = ErrorForm(lambda failure, _: failure.body)
