"""Idempotency keys: a repeated request gets the turn of the first one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple

from fastapi import Request

from tenuto.base.errors import KeyReused, TenutoError
from tenuto.base.wire.messages import StartTurn
from tenuto.serve.shared.bodies import JsonRequest
from tenuto.serve.shared.live_turn import LiveTurn

REUSED = "this idempotency key was used with another request; allowed: the same one, or a new key"


class RequestKey(NamedTuple):
    """A client's idempotency key, and a digest of its request."""

    key: str
    digest: bytes

    @staticmethod
    async def of(request: Request, key: str | None) -> RequestKey | None:
        """Returns `key` with the digest of the request's path and body, or `None` without a key."""
        if key is None:
            return None
        assert isinstance(request, JsonRequest)
        return RequestKey(key, await request.digest())


_Scope = tuple[str, str | None, str]
"""A key belongs to one session of one tenant, or to the tenant's requests without a session."""


class IdempotencyKeys:
    """Turns started with idempotency keys.

    Invariant: a turn in `_turns` is open, or was committed and is retained. So a key is free again once its turn is
    rolled back. It is also free once another session has the id of its turn's session.
    """

    def __init__(self, outlived: Callable[[LiveTurn], Awaitable[bool]]) -> None:
        """`outlived`: whether another session has the id of an ended turn's session by now."""
        self._outlived = outlived
        self._turns: dict[_Scope, LiveTurn] = {}

    def __len__(self) -> int:
        return len(self._turns)

    async def find(self, request: StartTurn, key: RequestKey) -> LiveTurn | None:
        """Returns the turn that was started with this key, or `None`. Waits while that turn is being rolled back.
        Raises `KeyReused` if its request was a different one, and the errors of `outlived`."""
        while (turn := self._turns.get((request.tenant, request.session, key.key))) is not None:
            if turn.rolling_back and not turn.ended:
                with suppress(TenutoError):
                    await turn.finished()  # then the key is free, unless the turn was committed after all
                continue
            if turn.ended and await self._outlived(turn):
                self.release(turn)
                continue
            if turn.once != key:
                raise KeyReused(REUSED)
            return turn
        return None

    def add(self, turn: LiveTurn) -> None:
        """Registers a turn that has a key. Call only right after `find` has returned `None`."""
        self._turns[_scope(turn)] = turn

    def release(self, turn: LiveTurn) -> None:
        """Frees the turn's key, if it has one."""
        if turn.once is not None and self._turns.get(_scope(turn)) is turn:
            del self._turns[_scope(turn)]


def _scope(turn: LiveTurn) -> _Scope:
    assert turn.once is not None
    return turn.tenant, turn.request.session, turn.once[0]
