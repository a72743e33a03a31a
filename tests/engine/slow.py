"""A stage with a parked session whose copies advance by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tenuto.base.groups import Kind
from tenuto.engine.parking import Parking
from tenuto.session.turn import Turn
from tests.carriers import ByHand
from tests.engine.stage import FULL, Stage, continuation
from tests.present import present
from tests.tiered import parking_in

HISTORY = 66
"""Tokens in the history of a session with 60 input tokens."""


class Slow:
    """A stage whose copies advance by hand, one page or state at a time, with a parked session "s"."""

    def __init__(self, mix: tuple[Kind, ...] = (FULL,), **options: Any) -> None:
        self.copies = ByHand(piece=1)
        given = {"units": 120, "token_budget": 24, "host_tier": 10**6, "carrier": self.copies, **options}
        self.stage = Stage(mix, **given)
        self.engine = self.stage.engine
        self.stage.committed("s", 60)
        self.park("s")

    @property
    def parking(self) -> Parking:
        return parking_in(self.engine)

    def park(self, name: str) -> None:
        self.engine.pressure.drop(self.engine.registry.get(name))
        assert self.parking.position(self.engine.registry.get(name))

    def come_back(self, name: str = "s", output: int = 3, **params: Any) -> Turn:
        """Submits a turn of a parked session, which waits for its copies."""
        turn = self.stage.say(name, [5, 6], output, **params)
        self.stage.until(lambda: turn.running)
        assert turn.session.memory.arriving
        return turn

    def ends(self, turn: Turn, history: Sequence[int]) -> int:
        """Checks that the turn ends correctly; returns the number of cached tokens."""
        while not self.engine.idle:
            self.copies.finish()
            self.stage.step()
        self.engine.audit()
        assert list(turn.output) == continuation([*history, 5, 6], len(turn.output))
        assert turn.output
        return present(turn.result).usage.cached

    def free(self) -> list[int]:
        return [pool.free for pool in self.engine.memory.pools]

    def limbo(self) -> list[int]:
        return [pool.limbo for pool in self.engine.memory.pools]
