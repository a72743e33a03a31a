"""Messages between replicas of a fleet when a session moves from one to another."""

from __future__ import annotations

import zlib
from typing import Literal

import msgspec
import numpy as np

from tenuto.base.errors import InvalidRequest
from tenuto.base.options import Policy, TurnParams
from tenuto.base.plan import Bytes
from tenuto.base.sampling import TokenLogprob
from tenuto.base.tools.answers import Reading
from tenuto.base.turns import Delta, OutputSpan
from tenuto.base.views import Ticket
from tenuto.base.wire.document import Conversation

Surplus = Literal["turns", "memory"]
"""The load that a replica has too much of, so that it moves sessions to another one."""


class Relieved(msgspec.Struct, frozen=True, kw_only=True):
    """The load of the replica that a session leaves to spread load, without what is leaving already: its running and
    waiting `turns`, or the share of its memory that is `used`. The other is `None`."""

    turns: int | None = None
    used: float | None = None


class StateOffer(msgspec.Struct, frozen=True, kw_only=True):
    """A session that is to move, so that its new owner can reserve room. `owner`: the number of the replica that owns
    it. `identity`: see `state_file.StateHeader`, as are `page_size`, `unit_bytes` and `units`, the numbers of units
    that its state takes now. `length`: the most tokens that it and its open turn can have. `busy`: whether a turn is
    open. `params`: those of that turn, whose grammar takes time to compile. `relieved`: refuse the session if this
    replica would then have a larger load than that one."""

    tenant: str
    session: str
    owner: int
    identity: str
    page_size: int
    unit_bytes: list[int]
    units: list[int]
    length: int
    policy: Policy
    params: TurnParams | None
    relieved: Relieved | None = None


class StatePiece(msgspec.Struct, frozen=True, array_like=True):
    """Units of a group: the one in place `first` of those that its state takes, and those after it. `data`: their
    bytes, which a piece that has come in a message shares with that. `checksums`: the CRC-32 of each."""

    group: int
    first: int
    data: memoryview
    checksums: list[int] = []

    @classmethod
    def of(cls, group: int, first: int, units: Bytes) -> StatePiece:
        """Returns the piece with `units`, uint8 [n, bytes a unit], without checksums. Nothing is copied."""
        return cls(group, first, np.ascontiguousarray(units).reshape(-1).data)

    def summed(self, unit_bytes: int) -> StatePiece:
        """Returns it with checksums."""
        return StatePiece(self.group, self.first, self.data, self._sums(unit_bytes))

    def units(self, unit_bytes: int) -> Bytes:
        """Returns the units, uint8 [n, bytes a unit], which share their memory with the piece. Raises
        `InvalidRequest` if one is damaged."""
        if (
            unit_bytes < 1
            or len(self.data) != unit_bytes * len(self.checksums)
            or self._sums(unit_bytes) != self.checksums
        ):
            raise InvalidRequest("units of a session that moves here are damaged")
        data = self.data if not self.data.readonly else bytearray(self.data)
        return np.frombuffer(data, np.uint8).reshape(-1, unit_bytes)

    def _sums(self, unit_bytes: int) -> list[int]:
        return [zlib.crc32(self.data[at : at + unit_bytes]) for at in range(0, len(self.data), unit_bytes)]


class MovedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """An open turn of a session that moves. `input`, `output`: its tokens so far, as the bytes of an `array("i")`.
    `elapsed`, `begun`: seconds since it arrived, and since it began to compute. `versions`: the weights that sampled
    its output. `once`: see `session.results.Once.parts`. The other fields are those of `session.turn.Turn`."""

    params: TurnParams
    base_length: int
    replaces: bool
    input: bytes
    output: bytes
    max_new_tokens: int
    conversation: Conversation | None
    prediction: bytes
    elapsed: float
    begun: float | None
    started: bool
    recorded: bool
    cached: int
    computed_before: int
    computed_tokens: int
    guessed: int
    accepted: int
    recomputed: dict[str, int]
    versions: list[OutputSpan]
    output_logprobs: list[TokenLogprob]
    input_scores: list[TokenLogprob]
    once: tuple[str, bytes, str, Reading | None, bytes] | None
    ticket: Ticket | None


class StateEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a session's state, once nothing changes the session any more. `epoch`: that of its owner. `position`:
    the tokens that the state covers, in `units` of each group, of which the first `kept` were sent before and are still
    right; `pieces` are the others, as far as they are not sent separately. `turn`: its open turn. `rested`: for how
    many seconds no turn of it has been open, if that is known."""

    identity: str
    epoch: int
    position: int
    units: list[int]
    kept: list[int]
    pieces: list[StatePiece]
    turn: MovedTurn | None
    rested: float | None = None


class LiveStream(msgspec.Struct, frozen=True, kw_only=True):
    """The stream of an open turn at the edge of the replica that it leaves. `said`: all its deltas, joined. `once`: its
    idempotency key and the digest of its request. `continues`: whether it continues without readers. `about`: see
    `StartTurn`. `ahead`: the numbers of tokens and characters at the end of `said` that the engine will repeat, since
    its turn was begun again after a replica was lost."""

    name: str
    ticket: Ticket
    said: Delta
    reading: Reading | None
    once: tuple[str, bytes] | None
    continues: bool
    resumable: bool
    about: bytes = b""
    ahead: tuple[int, int] = (0, 0)
