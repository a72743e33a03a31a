"""Ended turns and changes of sessions since the last step."""

from __future__ import annotations

from dataclasses import dataclass, field

from tenuto.session.changes import Change
from tenuto.session.turn import Turn


@dataclass(slots=True)
class Outcomes:
    """Turns that have `ended` and `changes` of sessions, in order. Written by the life cycle."""

    ended: list[Turn] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)

    def take_ended(self) -> list[Turn]:
        """Returns the turns that have ended since the last call."""
        ended, self.ended = self.ended, []
        return ended

    def take_changes(self) -> list[Change]:
        """Returns the changes of sessions since the last call."""
        changes, self.changes = self.changes, []
        return changes
