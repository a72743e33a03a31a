"""How long the parts of a turn took, as the edge has seen it."""

from __future__ import annotations

from dataclasses import dataclass

from tenuto.serve.shared.live_turn import LiveTurn


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of a turn so far. `prompt`: from the request to the first token, with the time it waited. `output`: from
    the first token to the last. `generated`: number of tokens so far."""

    prompt: float
    output: float
    generated: int

    @classmethod
    def of(cls, turn: LiveTurn, generated: int) -> Timings:
        """Returns the timings of a turn that has sent so many tokens."""
        first = turn.first_at if turn.first_at is not None else turn.last_at
        return cls(first - turn.requested_at, turn.last_at - first, generated)

    @property
    def total(self) -> float:
        """Seconds from the request to the last token."""
        return self.prompt + self.output
