"""Idempotency keys: a repeated request gets the turn of the first one."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from fastapi import Request

from tenuto.base.errors import KeyReused, TenutoError
from tenuto.base.wire.messages import StartTurn
from tenuto.serve.shared.bodies import JsonRequest
from tenuto.serve.shared.live_turn import LiveTurn

REUSED = "this idempotency key was used with another request; allowed: the same one, or a new key"


@dataclass(frozen=True, slots=True)
class RequestKey:
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


@dataclass(frozen=True, slots=True)
class _Scope:
    """A key belongs to one session of one tenant, or to the tenant's requests without a session."""

    tenant: str
    session: str | None
    key: str


class IdempotencyKeys:
    """Turns started with idempotency keys.

    Invariant: a turn in `_turns` is open, or was committed and is retained; `_scopes` has the same turns by id. So a
    key is free again once its turn is rolled back.
    """

    def __init__(self) -> None:
        self._turns: dict[_Scope, tuple[LiveTurn, bytes]] = {}  # with their requests' digests
        self._scopes: dict[str, _Scope] = {}

    def __len__(self) -> int:
        return len(self._turns)

    async def find(self, request: StartTurn, key: RequestKey) -> LiveTurn | None:
        """Returns the turn that was started with this key, or `None`. Waits while that turn is being rolled back.
        Raises `KeyReused` if its request was a different one."""
        while (entry := self._turns.get(_Scope(request.tenant, request.session, key.key))) is not None:
            turn, digest = entry
            if turn.rolling_back and not turn.ended:
                with suppress(TenutoError):
                    await turn.finished()  # then the key is free, unless the turn was committed after all
                continue
            if digest != key.digest:
                raise KeyReused(REUSED)
            return turn
        return None

    def add(self, turn: LiveTurn, key: RequestKey) -> None:
        """Registers `turn`. Call only right after `find` has returned `None`."""
        scope = _Scope(turn.tenant, turn.request.session, key.key)
        self._turns[scope] = turn, key.digest
        self._scopes[turn.id] = scope

    def rename(self, turn_id: str, new: str) -> None:
        """Changes the id of a turn that has a key."""
        self._scopes[new] = self._scopes.pop(turn_id)

    def release(self, turn: LiveTurn) -> None:
        """Frees the turn's key, if it has one."""
        scope = self._scopes.pop(turn.id, None)
        if scope is not None:
            del self._turns[scope]
