"""How a turn chooses its next token."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tenuto.base.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling options of one turn.

    `temperature` 0 is greedy. `top_k` 0 keeps every token. `top_p` 1.0 keeps every token. The random draw of a token
    depends on `seed` and on the token's position in the sequence alone, so a turn that is preempted and resumed, or
    that shares a batch with others, draws the same numbers.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidRequest(f"temperature is {self.temperature}; allowed: a finite number >= 0")
        if self.top_k < 0:
            raise InvalidRequest(f"top_k is {self.top_k}; allowed: 0 (off) or a positive count")
        if not 0 < self.top_p <= 1:
            raise InvalidRequest(f"top_p is {self.top_p}; allowed: 0 < top_p <= 1")
        if not 0 <= self.seed < 2**63:
            raise InvalidRequest(f"seed is {self.seed}; allowed: 0 <= seed < 2**63")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


GREEDY = Sampling()
