"""What happens to sessions and must last, as plain data."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Literal

from tenuto.session.records import TurnRecord
from tenuto.session.session import Session
from tenuto.session.turn import Turn

ChangeKind = Literal["open", "fork", "restore", "adopt", "commit", "rewind", "close"]


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a session, complete in itself: whatever happens to the session later, it says what this one did.

    Afterwards the history is its first `kept` tokens from before (of a fork: the parent's), then `tokens`; there are
    `turns` records, of which `records` are the last, and what precedes them is as before (or as in the parent). `turn`:
    the one that committed. `parent`: of a fork, which is opened first, as a restored session is. `result`: of a turn
    with an idempotency key, to be kept under that, and `forgotten`: keys whose results no longer are. `used`: when this
    happened, in seconds since the epoch."""

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

    @property
    def length(self) -> int:
        """Tokens in the history afterwards."""
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
    ) -> Change:
        """The change that `session` has just undergone. The result of a turn with an idempotency key is kept from now
        on."""
        if parent is not None and not parent.policy.lasting:  # it may be gone before anyone reads this
            kept, parent = 0, None
        records = tuple(session.records if kept == 0 else session.records[-1:])
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
        )
