"""What callers are told of a session."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session as it is now. `state`: open or closing; `turn`: the state of its open turn, if there is one. `version`
    counts commits and rewinds. Of its `tokens`, the first `computed` have their state in memory."""

    session_id: str
    state: str
    turn: str | None
    version: int
    turns: int
    tokens: int
    computed: int
    context_left: int
