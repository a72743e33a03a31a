"""Messages of the engine to the edge: answers and refusals of its requests, and the deltas of its turns."""

from __future__ import annotations

from typing import Any

import msgspec

from tenuto.base.errors import EngineStopped, TenutoError
from tenuto.base.turns import Delta
from tenuto.base.wire.request import WireMessage


class Answer(WireMessage, frozen=True, kw_only=True):
    """Engine to edge: a request's answer, encoded on its own."""

    call: int
    value: msgspec.Raw


class Refusal(WireMessage, frozen=True, kw_only=True):
    """Engine to edge: a `TenutoError`."""

    call: int
    code: str
    message: str
    param: str | None = None
    detail: str = ""
    details: dict[str, Any] | None = None


class Updates(WireMessage, frozen=True, kw_only=True):
    """Engine to edge: the deltas of a step, by call."""

    updates: list[tuple[int, Delta]]


MAYBE_DONE = "the request may have been carried out, and its turn may be in the session once that is served again"
"""The end of an error message for a request that was under way when the engine stopped."""


class Stopped(WireMessage, frozen=True, kw_only=True):
    """Engine to edge: the last message, with the reason why the engine has stopped. `detail`: see `TenutoError`."""

    reason: str
    detail: str = ""

    def error(self) -> EngineStopped:
        """The error of every later request."""
        return EngineStopped(self.reason, detail=self.detail)

    def interrupted(self) -> EngineStopped:
        """The error of a request that was under way."""
        return EngineStopped(f"{self.reason}; {MAYBE_DONE}", detail=self.detail)


AnyReply = Answer | Refusal | Updates | Stopped


def _by_code(kind: type[TenutoError]) -> dict[str, type[TenutoError]]:
    found = {kind.code: kind}
    for child in kind.__subclasses__():
        found |= _by_code(child)
    return found


_ERRORS = _by_code(TenutoError)


def refusal_of(call: int, error: TenutoError) -> Refusal:
    """Returns the message for an error."""
    return Refusal(
        call=call,
        code=error.code,
        message=error.message,
        param=error.param,
        detail=error.detail,
        details=dict(error.details) if error.details is not None else None,
    )


def error_of(refusal: Refusal) -> TenutoError:
    """Returns the error of a refusal."""
    kind = _ERRORS.get(refusal.code, TenutoError)
    return kind(refusal.message, param=refusal.param, detail=refusal.detail, details=refusal.details)
