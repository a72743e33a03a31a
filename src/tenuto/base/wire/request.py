"""The base of all requests from the edge to the engine."""

from __future__ import annotations

from functools import cache
from typing import Generic, TypeVar, cast, get_args

import msgspec

from tenuto.base.views import SessionKey

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class WireMessage(msgspec.Struct, array_like=True, tag=True, frozen=True, kw_only=True):
    """Base of all messages; on the wire an array that begins with the message's name."""


class Request(WireMessage, Generic[T_co], frozen=True, kw_only=True):
    """Edge to engine, answered with a `T_co`. `call` is set by the link."""

    call: int = 0


class OfSession(Request[T_co], Generic[T_co], frozen=True, kw_only=True):
    """A request about one session."""

    tenant: str
    session: str

    @property
    def key(self) -> SessionKey:
        """The key of the session."""
        return self.tenant, self.session


@cache
def answer_of(request: type[Request[T]]) -> type[T]:
    """Returns the answer type of a kind of request."""
    (answer,) = get_args(request.__orig_bases__[0])  # type: ignore[attr-defined] # every generic class has bases
    return cast("type[T]", answer)
