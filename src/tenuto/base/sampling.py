"""How a turn chooses its next token."""

from __future__ import annotations

from dataclasses import dataclass

from tenuto.base.checks import real, whole
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
        real("temperature", self.temperature, 0, 1e6)
        whole("top_k", self.top_k, 0, 2**31 - 1)
        if not real("top_p", self.top_p, 0, 1):
            raise InvalidRequest("top_p is 0; allowed: 0 < top_p <= 1")
        whole("seed", self.seed, 0, 2**63 - 1)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


GREEDY = Sampling()
