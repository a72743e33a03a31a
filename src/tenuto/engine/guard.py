"""What every operation of an engine has in common."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from tenuto.base.errors import EngineStopped, TenutoError


class Breakable(Protocol):
    """An object whose `broken` is `None` until one of our own bugs has stopped it."""

    broken: Exception | None


E = TypeVar("E", bound=Breakable)
P = ParamSpec("P")
R = TypeVar("R")


def guarded(method: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
    """An operation that either ends, or refuses with a `TenutoError` having changed nothing. Whatever else it raises is
    our own bug, and stops the engine: every operation raises `EngineStopped` ever after."""

    @wraps(method)
    def operation(self: E, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.broken is not None:
            raise EngineStopped("the engine stopped", detail=f"{type(self.broken).__name__}: {self.broken}")
        try:
            return method(self, *args, **kwargs)
        except TenutoError:
            raise
        except Exception as error:
            self.broken = error
            raise

    return operation
