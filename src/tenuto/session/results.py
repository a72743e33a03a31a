"""Results of turns with idempotency keys, kept with their sessions for repeated requests."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tenuto.base.tools.answers import Reading
from tenuto.base.turns import Delta, TurnResult
from tenuto.base.views import KeptTurn, Ticket

MAX_RESULTS = 32
"""The most results kept for each session, those committed last."""
MAX_BYTES = 2**20
"""The most bytes of results kept for each session. A larger turn, for example one with log-probabilities of a long
input, is kept without its output."""


class KeptTurns:
    """The committed turns of one session that have idempotency keys, by key, oldest first. They are kept encoded to
    save memory."""

    def __init__(self, kept: Iterable[tuple[str, bytes]] = ()) -> None:
        self._turns = dict(kept)
        self.size = sum(map(len, self._turns.values()))  # bytes

    def __len__(self) -> int:
        return len(self._turns)

    def all(self) -> tuple[tuple[str, bytes], ...]:
        """Returns all keys with their encoded turns, in the form of the constructor's argument."""
        return tuple(self._turns.items())

    def find(self, key: str) -> KeptTurn | None:
        found = self._turns.get(key)
        return msgspec.msgpack.decode(found, type=KeptTurn) if found is not None else None

    def named(self, name: str) -> KeptTurn | None:
        """Returns the turn of this name."""
        kept = (msgspec.msgpack.decode(turn, type=KeptTurn) for turn in self._turns.values())
        return next((turn for turn in kept if turn.name == name), None)

    def add(self, key: str, turn: bytes) -> list[str]:
        """Adds a turn. Returns the keys of the turns that are no longer kept."""
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
    """The idempotency key of a turn; encodes the result that is kept when the turn commits."""

    __slots__ = ("_about", "_digest", "_reading", "_ticket", "key", "name")

    def __init__(self, key: str, digest: bytes, name: str, reading: Reading | None = None, about: bytes = b"") -> None:
        self.key = key
        self.name = name
        self._digest = digest
        self._reading = reading
        self._about = about
        self._ticket: Ticket | None = None

    def accepted(self, ticket: Ticket) -> None:
        """Records the ticket that the client got when the turn was accepted."""
        self._ticket = ticket

    @property
    def parts(self) -> tuple[str, bytes, str, Reading | None, bytes]:
        """The arguments of the constructor."""
        return self.key, self._digest, self.name, self._reading, self._about

    @property
    def ticket(self) -> Ticket | None:
        """The requests that `accepted` has recorded."""
        return self._ticket

    def kept(self, output: Delta, result: TurnResult) -> bytes:
        """Returns the committed turn, encoded in at most `MAX_BYTES`."""
        ticket = self._ticket
        assert ticket is not None
        whole = msgspec.structs.replace(output, result=result)
        kept = KeptTurn(
            key=self.key,
            digest=self._digest,
            name=self.name,
            ticket=ticket,
            output=whole,
            reading=self._reading,
            about=self._about,
        )
        encoded = msgspec.msgpack.encode(kept)
        if len(encoded) <= MAX_BYTES:
            return encoded
        return msgspec.msgpack.encode(
            msgspec.structs.replace(
                kept,
                ticket=msgspec.structs.replace(ticket, prompt=[]),
                output=Delta(result=result),
                omitted=len(encoded),
                about=b"",
            )
        )
