"""The space left for an input in a context."""

from __future__ import annotations

from typing import NamedTuple

from tenuto.base.errors import ContextExceeded


class Room(NamedTuple):
    """The space left for an input. `history`: tokens of the history; `allowed`: tokens that history and input may have
    together; `limit`: the context, in tokens. `spare`: tokens of the input that may already be in the history."""

    history: int
    allowed: int
    limit: int
    spare: int = 0

    def require(self, tokens: int) -> None:
        """Raises `ContextExceeded` if an input of at least `tokens` tokens cannot fit."""
        total = self.history + tokens - self.spare
        if total > self.limit:
            raise ContextExceeded.of(total, self.allowed, self.limit, exact=False)
