"""How much of a context is left for an input."""

from __future__ import annotations

from typing import NamedTuple

from tenuto.base.errors import ContextExceeded


class Room(NamedTuple):
    """`history` tokens are there, and `allowed` may be once the input has been added; `limit` is the context. `spare`:
    so many of an input's tokens may be left out, because they are there already."""

    history: int
    allowed: int
    limit: int
    spare: int = 0

    def require(self, tokens: int) -> None:
        """Raises `ContextExceeded` if so many, or more, certainly do not fit."""
        total = self.history + tokens - self.spare
        if total > self.limit:
            raise ContextExceeded(
                f"history and input have at least {total} tokens; allowed: {self.allowed} of a context of {self.limit}"
            )
