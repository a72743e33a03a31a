"""What every operation of an engine has in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from tenuto.base.errors import EngineStopped, TenutoError


@dataclass(slots=True)
class Fuse:
    """`broken`: the bug of our own that has stopped the engine; written by `guarded`."""

    broken: Exception | None = None


class Guarded(Protocol):
    """Has operations of an engine; all of these have one fuse."""

    fuse: Fuse


E = TypeVar("E", bound=Guarded)
P = ParamSpec("P")
R = TypeVar("R")


def guarded(method: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
    """An operation that either ends, or refuses with a `TenutoError` having changed nothing. Whatever else it raises is
    our own bug, and stops the engine: every operation raises `EngineStopped` ever after."""

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
