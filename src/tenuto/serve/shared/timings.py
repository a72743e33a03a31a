"""The time that the parts of a turn took, measured in the edge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


def shown_times(turn: LiveTurn, generated: int) -> dict[str, Any]:
    """Returns the times of a turn in llama.cpp's form. The number of its input tokens that were computed is known once
    it has ended."""
    times = Timings.of(turn, generated)
    shown: dict[str, Any] = {"prompt_ms": 1000 * times.prompt}
    if turn.result is not None:
        usage = turn.result.usage
        computed = usage.prompt - usage.cached
        shown = {"cache_n": usage.cached, "prompt_n": computed} | shown | _rates("prompt", computed, times.prompt)
    return {
        **shown,
        "predicted_n": generated,
        "predicted_ms": 1000 * times.output,
        **_rates("predicted", generated, times.output),
    }


def _rates(name: str, tokens: int, seconds: float) -> dict[str, float]:
    per_token, per_second = 1000 * seconds / tokens if tokens else 0.0, tokens / seconds if seconds else 0.0
    return {f"{name}_per_token_ms": per_token, f"{name}_per_second": per_second}
