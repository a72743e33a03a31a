"""Changes of sessions that the journal records, as plain data."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Literal

from tenuto.session.records import TurnRecord
from tenuto.session.session import Session
from tenuto.session.turn import Turn

ChangeKind = Literal[
    "open", "fork", "restore", "adopt", "begin", "drop", "commit", "rewind", "replace", "close", "erase"
]


@dataclass(slots=True)
class ErasedRows:
    """The rows that an `erase` has removed from the journal; written by the journal before it acknowledges the change.
    `rows`: their number. `shared`: the ids of the sessions that still use pieces of the erased one's history, and how
    many of its tokens these pieces have."""

    rows: int = 0
    shared: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a session, complete in itself: later changes of the session do not affect it.

    After the change, the history consists of its first `kept` tokens from before (for a fork: of the parent), then
    `tokens`. There are `turns` records: those from before (or of the parent), except that the last ones are `records`.

    `erase` is a `close` that leaves nothing of the session in the journal's files. `begin` and `drop` leave the history
    as it is: a turn was accepted whose `request` is recorded, so that another replica can begin it again, or it was
    rolled back.

    `turn`: the committed turn. `parent`: the parent of a fork; forks and restored sessions are opened by an earlier,
    separate change. `result`: the key and the kept result of a turn with an idempotency key. `forgotten`: keys whose
    results are no longer kept. `used`: the time of the change, in seconds since the epoch.
    """

    kind: ChangeKind
    session: Session
    version: int
    kept: int
    tokens: array[int]
    turns: int
    records: tuple[TurnRecord, ...]
    turn: Turn | None = None
    parent: Session | None = None
    result: tuple[str, bytes] | None = None
    forgotten: tuple[str, ...] = ()
    used: float = 0.0
    request: bytes = b""
    erased: ErasedRows = field(default_factory=ErasedRows)

    @property
    def length(self) -> int:
        """The number of tokens in the history after the change."""
        return self.kept + len(self.tokens)

    @classmethod
    def of(
        cls,
        kind: ChangeKind,
        session: Session,
        kept: int = 0,
        turn: Turn | None = None,
        parent: Session | None = None,
        used: float = 0.0,
        same: int | None = None,
        request: bytes = b"",
    ) -> Change:
        """Returns the change just made to `session`. `same`: the number of leading records that it left, if not all but
        the last, or none where no tokens were kept. Keeps the result of a turn with an idempotency key from now on."""
        if parent is not None and not parent.policy.lasting:  # the parent may be closed before this is written
            kept, parent = 0, None
        if same is None:
            same = 0 if kept == 0 else max(0, len(session.records) - 1)
        records = tuple(session.records[same:])
        tokens = session.history[kept:]
        result, forgotten = None, list[str]()
        if turn is not None and turn.once is not None and turn.result is not None:
            result = turn.once.key, turn.once.kept(turn.said(turn.result.kept), turn.result)
            forgotten = session.results.add(*result)
        return cls(
            kind,
            session,
            session.version,
            kept,
            tokens,
            len(session.records),
            records,
            turn,
            parent,
            result,
            tuple(forgotten),
            used,
            request,
        )
