"""Idempotency keys: a request that is repeated gets the turn of the first one."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256

from fastapi import Request

from tenuto.base.errors import KeyReused, TenutoError
from tenuto.base.messages import StartTurn
from tenuto.serve.shared.live_turn import LiveTurn


@dataclass(frozen=True, slots=True)
class RequestKey:
    """An idempotency key as a client gave it, and a digest of the request that it came with."""

    key: str
    digest: bytes

    @staticmethod
    async def of(request: Request, key: str | None) -> RequestKey | None:
        """`None` if the client gave no `key`. What counts of a request is its path and its body."""
        if key is None:
            return None
        return RequestKey(key, sha256(request.url.path.encode() + b"\n" + await request.body()).digest())


@dataclass(frozen=True, slots=True)
class _Scope:
    """A key belongs to one session of one tenant, or to the tenant's requests without a session."""

    tenant: str
    session: str | None
    key: str


class IdempotencyKeys:
    """Which turn was started with which key.

    Invariant: a turn in `_turns` has not ended, or was committed and is retained; `_scopes` has the same turns by id.
    So a key is free again once its turn was rolled back.
    """

    def __init__(self) -> None:
        self._turns: dict[_Scope, tuple[LiveTurn, bytes]] = {}  # with the digests of their requests
        self._scopes: dict[str, _Scope] = {}

    def __len__(self) -> int:
        return len(self._turns)

    async def find(self, request: StartTurn, key: RequestKey) -> LiveTurn | None:
        """The turn that was started with this key, `None` if there is none; waits for one that is being rolled back.
        Raises `KeyReused` if that turn's request was another one."""
        while (entry := self._turns.get(_Scope(request.tenant, request.session, key.key))) is not None:
            turn, digest = entry
            if turn.rolling_back and not turn.ended:
                with suppress(TenutoError):
                    await turn.finished()  # the key is free then, unless the turn was committed after all
                continue
            if digest != key.digest:
                raise KeyReused(
                    "this idempotency key was used with another request; allowed: the same one, or a new key"
                )
            return turn
        return None

    def add(self, turn: LiveTurn, key: RequestKey) -> None:
        """`find` has just found none."""
        scope = _Scope(turn.tenant, turn.request.session, key.key)
        self._turns[scope] = turn, key.digest
        self._scopes[turn.id] = scope

    def release(self, turn: LiveTurn) -> None:
        """The turn's key, if it has one, is free."""
        scope = self._scopes.pop(turn.id, None)
        if scope is not None:
            del self._turns[scope]
