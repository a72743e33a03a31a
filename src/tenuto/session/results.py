"""What became of turns with idempotency keys, kept with their sessions for repeated requests."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tenuto.base.turns import Delta, TurnResult
from tenuto.base.views import KeptTurn, Ticket

MAX_RESULTS = 32
"""Kept of each session: those that were committed last."""
MAX_BYTES = 2**20
"""Kept of each session. A turn of which there is more, as log-probabilities of a long input may be, is kept without its
output."""


class KeptTurns:
    """The turns of one session that were started with idempotency keys and committed, by key, oldest first. They are
    kept encoded, which takes least memory."""

    def __init__(self, kept: Iterable[tuple[str, bytes]] = ()) -> None:
        self._turns = dict(kept)
        self.size = sum(map(len, self._turns.values()))  # bytes

    def __len__(self) -> int:
        return len(self._turns)

    def all(self) -> tuple[tuple[str, bytes], ...]:
        """As the constructor takes them."""
        return tuple(self._turns.items())

    def find(self, key: str) -> KeptTurn | None:
        found = self._turns.get(key)
        return msgspec.msgpack.decode(found, type=KeptTurn) if found is not None else None

    def add(self, key: str, turn: bytes) -> list[str]:
        """Keep one more. Returns the keys of those that are not kept any longer."""
        gone = [key] if self._remove(key) else []
        self._turns[key] = turn
        self.size += len(turn)
        while len(self._turns) > 1 and (len(self._turns) > MAX_RESULTS or self.size > MAX_BYTES):
            oldest = next(iter(self._turns))
            self._remove(oldest)
            gone.append(oldest)
        return gone

    def _remove(self, key: str) -> bool:
        turn = self._turns.pop(key, None)
        self.size -= len(turn) if turn is not None else 0
        return turn is not None


class Once:
    """An idempotency key on a turn: what is kept of it when it commits."""

    __slots__ = ("_digest", "_ticket", "key", "name")

    def __init__(self, key: str, digest: bytes, name: str) -> None:
        self.key = key
        self.name = name
        self._digest = digest
        self._ticket: Ticket | None = None

    def accepted(self, ticket: Ticket) -> None:
        """The turn was accepted, and this is what its client was told."""
        self._ticket = ticket

    def kept(self, output: Delta, result: TurnResult) -> bytes:
        """The committed turn, encoded in at most `MAX_BYTES`."""
        ticket = self._ticket
        assert ticket is not None
        whole = msgspec.structs.replace(output, result=result)
        kept = KeptTurn(key=self.key, digest=self._digest, name=self.name, ticket=ticket, output=whole)
        encoded = msgspec.msgpack.encode(kept)
        if len(encoded) <= MAX_BYTES:
            return encoded
        return msgspec.msgpack.encode(
            msgspec.structs.replace(
                kept,
                ticket=msgspec.structs.replace(ticket, prompt=[]),
                output=Delta(result=result),
                omitted=len(encoded),
            )
        )
