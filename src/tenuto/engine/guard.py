"""The common frame of an engine's operations: an internal error stops the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from tenuto.base.errors import EngineStopped, TenutoError


@dataclass(slots=True)
class Fuse:
    """Stops all operations of an engine. `broken`: the internal error that has stopped it; written by `guarded`."""

    broken: Exception | None = None


class Guarded(Protocol):
    """A class with operations of an engine; all such classes share one fuse."""

    fuse: Fuse


E = TypeVar("E", bound=Guarded)
P = ParamSpec("P")
R = TypeVar("R")


def guarded(method: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
    """Makes a method an operation that either succeeds, or raises a `TenutoError` and changes nothing. Any other
    exception is an internal error and stops the engine: every later operation raises `EngineStopped`."""

    @wraps(method)
    def operation(self: E, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if (broken := self.fuse.broken) is not None:
            raise EngineStopped("the engine stopped", detail=f"{type(broken).__name__}: {broken}")
        try:
            return method(self, *args, **kwargs)
        except TenutoError:
            raise
        except Exception as error:
            self.fuse.broken = error
            raise

    return operation
