"""Sessions on two processes of witnesses: all ranks have each session's history, whatever happens to its memory.

Faults planted in the messages between ranks are noticed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from tenuto.base.config import EngineConfig
from tenuto.base.errors import ExecutorLost
from tenuto.base.groups import GroupSpec, Kind
from tenuto.base.options import Policy, TurnParams
from tenuto.base.plan import PageCopies, Plan, TableChanges
from tenuto.base.turns import TurnState
from tenuto.engine.engine import Engine
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.parallel.followers import Followers
from tenuto.session.turn import Turn
from tests.carriers import AtOnce
from tests.clock import ManualClock
from tests.engine.stage import PAGE, VOCABULARY, WINDOW, continuation
from tests.exec.parallel.witness_ranks import witness_of_ranks

MIXES = [(Kind.FULL,), (Kind.SLIDING,), (Kind.FULL, Kind.SLIDING)]
NONE = np.zeros(0, np.int32)
ACTIONS = ("say", "say", "say", "fork", "rewind", "close", "step", "step", "step")


class Crowd:
    """Sessions that do at random what sessions do, on memory for a few of them; the rest is in host memory. With some
    seeds threads copy what comes back while steps run."""

    def __init__(self, executor: ModelExecutor, seed: int) -> None:
        self._random = Random(seed)
        config = EngineConfig(
            context_length=120,
            max_running=3,
            token_budget=16,
            overlap=seed % 2,
            host_tier=2**20,
            prefix_cache=bool(seed & 2),
        )
        units = (45,) * len(executor.spec.groups)
        self.engine = Engine(
            executor,
            units,
            config,
            vocab_size=VOCABULARY,
            eos_ids=(),
            clock=ManualClock(),
            random=Random(seed),
            carrier=None if seed == 3 else AtOnce(),
        )
        self._histories: dict[str, list[int]] = {}
        self._open: dict[str, tuple[Turn, list[int]]] = {}  # turns, and what the histories will be
        self._turns = 0

    def run(self, actions: int) -> int:
        """Does so many things, and ends. Returns the number of turns."""
        for _ in range(actions):
            getattr(self, f"_{self._random.choice(ACTIONS)}")()
        while self._open:
            self._step()
        self.engine.audit()
        self.engine.end()
        return self._turns

    def _idle(self) -> str | None:
        return self._random.choice([name for name in self._histories if name not in self._open] or [None])

    def _say(self) -> None:
        name = self._idle()
        if name is None or (len(self._histories) < 8 and self._random.random() < 0.3):
            name = self.engine.sessions.open(None, Policy()).id
            self._histories[name] = []
        tokens = [self._random.randrange(VOCABULARY) for _ in range(self._random.randint(1, 30))]
        output = self._random.randint(0, 10)
        if len(self._histories[name]) + len(tokens) + output > 110:
            self.engine.sessions.rewind(name, position=0)
            self._histories[name] = []
        told = self._histories[name] + tokens
        turn = self.engine.turns.submit(name, tokens, TurnParams(max_new_tokens=output))
        self._open[name] = turn, told + continuation(told, output)

    def _fork(self) -> None:
        name = self._idle()
        if name is not None and len(self._histories) < 8:
            self._histories[self.engine.sessions.fork(name).id] = list(self._histories[name])

    def _rewind(self) -> None:
        name = self._idle()
        if name is not None:
            position = self._random.randint(0, len(self._histories[name]))
            self.engine.sessions.rewind(name, position=position)
            del self._histories[name][position:]

    def _close(self) -> None:
        name = self._idle()
        if name is not None and len(self._histories) > 4:
            self.engine.sessions.close(name)
            del self._histories[name]

    def _step(self) -> None:
        self.engine.step()
        for name, (turn, expected) in list(self._open.items()):
            if turn.state in (TurnState.COMMITTED, TurnState.ABORTED):
                assert list(self.engine.registry.get(name).history) == expected
                self._histories[name] = expected
                self._turns += 1
                del self._open[name]


def play(mix: Sequence[Kind], plant: Callable[[Any], None] = lambda _: None) -> int:
    """Runs four crowds, one after another. `plant` changes the forward pass of the first rank. Returns the number of
    turns."""
    executor = witness_of_ranks(PAGE, [GroupSpec(kind, 1, WINDOW if kind is Kind.SLIDING else 0) for kind in mix], 2)
    try:
        plant(executor.forward)
        return sum(Crowd(executor, seed).run(200) for seed in range(4))
    finally:
        executor.close()


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "+".join(kind.value for kind in mix))
def test_all_ranks_have_each_history(mix: Sequence[Kind], monkeypatch: pytest.MonkeyPatch) -> None:
    told: Counter[str] = Counter()
    tell = Followers.tell_each

    def counted(self: Followers, name: str, args: Sequence[Any]) -> None:
        told[name] += 1
        tell(self, name, args)

    monkeypatch.setattr(Followers, "tell_each", counted)
    assert play(mix) > 100
    assert min(told[name] for name in ("run", "read_units", "write_units")) > 10, told


def exchanged(forward: Any) -> None:
    """Ranks get each other's shares of units."""
    write = forward.write_units
    forward.write_units = lambda group, units, data: write(group, units, [np.roll(x, len(x) // 2) for x in data])


def joined_backwards(forward: Any) -> None:
    """Shares are joined in the wrong order."""
    read = forward.read_units

    def turned(group: int, units: Any) -> Any:
        found = read(group, units)
        return np.roll(found, found.shape[1] // 2, axis=1)

    forward.read_units = turned


def sent_without(**missing: Any) -> Callable[[Any], None]:
    """Returns a fault: other ranks get plans in which something is missing."""

    def plant(forward: Any) -> None:
        tell = forward._followers.tell

        def less(name: str, *args: Any) -> None:
            tell(name, *[replace(each, **missing) if isinstance(each, Plan) else each for each in args])

        forward._followers.tell = less

    return plant


def written_elsewhere(forward: Any) -> None:
    """Other ranks write shares into each other's units."""
    tell = forward._followers.tell_each

    def shifted(name: str, args: Any) -> None:
        if name == "write_units":
            args = [(group, np.roll(units, 1), data) for group, units, data in args]
        tell(name, args)

    forward._followers.tell_each = shifted


FAULTS: dict[str, Callable[[Any], None]] = {
    "shares exchanged": exchanged,
    "shares joined backwards": joined_backwards,
    "written elsewhere": written_elsewhere,
    "no page tables": sent_without(tables=(TableChanges(NONE, NONE, NONE),)),
    "no page copies": sent_without(copies=(PageCopies(NONE, NONE, NONE),)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_between_ranks_is_noticed(fault: str) -> None:
    with pytest.raises((ExecutorLost, AssertionError)):
        play((Kind.FULL,), FAULTS[fault])
