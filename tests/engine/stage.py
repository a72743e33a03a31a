"""An engine on the witness for stories: expected outputs, computed tokens, and a full recount after every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any

import pytest

from tenuto.base.config import EngineConfig
from tenuto.base.groups import GroupSpec, Kind
from tenuto.base.options import Policy, TurnParams
from tenuto.base.plan import Ints, Plan, StepResult
from tenuto.base.turns import TurnState
from tenuto.engine.engine import Engine, StepReport
from tenuto.exec.witness import WitnessExecutor
from tenuto.exec.witness_hashes import advance, history_hash, next_token
from tenuto.memory.kinds.full import FullTable
from tenuto.memory.tiers.disk import Disk
from tenuto.memory.tiers.moves import Carrier
from tenuto.sched.guesses import Guesses, NextStep, Proposer
from tenuto.session.session import Session
from tenuto.session.turn import Turn
from tenuto.text.masks import Masks
from tests.carriers import AtOnce
from tests.clock import ManualClock
from tests.readers import check_writes, known_histories

FULL, SLIDING, STATE = Kind.FULL, Kind.SLIDING, Kind.STATE
VOCABULARY = 997
PREFILL = TurnParams(max_new_tokens=0)
"""Appends input and generates nothing."""
PAGE, WINDOW = 4, 10

every_mix = pytest.mark.parametrize(
    "mix",
    [(FULL,), (SLIDING,), (STATE,), (FULL, SLIDING, STATE)],
    ids=lambda mix: "+".join(kind.value for kind in mix),
)
every_overlap = pytest.mark.parametrize("overlap", [0, 1], ids=["in turn", "overlapped"])


class Recorder(WitnessExecutor):
    """A witness that keeps the plans it was given. Once it has its engine, it reads all histories and checks each
    plan's writes, unless this is switched off."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.plans: list[Plan] = []
        self.collected = 0
        self.engine: Engine | None = None
        self.checks_writes = True  # which costs as much as a recount

    def histories(self, plan: Plan) -> list[Ints] | None:
        return known_histories(self.engine, plan) if self.engine is not None else None

    @property
    def collecting(self) -> Plan:
        """The plan whose result is being collected."""
        return self.plans[self.collected - 1]

    def submit(self, plan: Plan) -> None:
        self.plans.append(plan)
        if self.engine is not None and self.checks_writes:
            check_writes(self.engine, plan)
        super().submit(plan)

    def collect(self) -> StepResult:
        self.collected += 1
        return super().collect()


class Stage:
    """One engine. `told` opens a session with a history; `play` runs everything that waits or runs to its end."""

    def __init__(
        self,
        mix: Sequence[Kind] = (FULL,),
        *,
        units: int | Sequence[int] = 300,
        page_size: int = PAGE,
        failing: Sequence[int] = (),
        guess: Callable[[Turn, int], list[int]] | None = None,
        proposer: Proposer | None = None,
        eos: tuple[int, ...] = (),
        recount: bool = True,
        masks: Masks | None = None,
        disk: Disk | None = None,
        carrier: Carrier | None = None,
        identity: str = "",
        **config: Any,
    ) -> None:
        groups = [GroupSpec(kind, 1, WINDOW if kind is SLIDING else 0) for kind in mix]
        collected = iter(range(10**9))
        self.executor = Recorder(
            page_size, groups, VOCABULARY, fail=lambda: next(collected) in failing, late=lambda: True
        )
        self.executor.checks_writes = recount
        self.clock = ManualClock()
        usual: dict[str, Any] = {
            "context_length": 200,
            "max_running": 4,
            "token_budget": 16,
            "audit_every": int(recount),
            "prefix_cache": False,  # memory of closed sessions is freed
            "checkpoint_rate": 0,  # state is written only when the engine ends
        }
        self.engine = Engine(
            self.executor,
            (units,) * len(groups) if isinstance(units, int) else tuple(units),
            EngineConfig(**{**usual, **config}),
            vocab_size=VOCABULARY,
            eos_ids=eos,
            clock=self.clock,
            random=Random(0),
            proposer=Guesser(guess) if guess is not None else proposer,
            masks=masks,
            disk=disk,
            carrier=carrier or AtOnce(),
            identity=identity,
        )
        self.executor.engine = self.engine

    # -- sessions

    def open(self, session_id: str = "s", **policy: Any) -> Session:
        return self.engine.sessions.open(session_id, Policy(**policy))

    def committed(self, session_id: str = "s", tokens: int = 30, output: int = 6, **policy: Any) -> Session:
        """Opens a session with one committed turn of `tokens` in and `output` out."""
        session = self.open(session_id, **policy)
        self.say(session_id, count_from(len(session_id), tokens), output)
        self.play()
        return session

    def save_at_once(self) -> Stage:
        """Lets the state of sessions be written without a pause: the clock stands still."""
        self.engine.snapshots.pause = self.engine.snapshots.delay = 0.0
        return self

    # -- turns

    def append(self, session_id: str, tokens: Iterable[int]) -> Turn:
        return self.engine.turns.submit(session_id, tokens, PREFILL)

    def say(
        self, session_id: str, tokens: Sequence[int], output: int | None = 8, tenant: str = "", **params: Any
    ) -> Turn:
        return self.engine.turns.submit(session_id, tokens, TurnParams(max_new_tokens=output, **params), tenant=tenant)

    def step(self) -> StepReport:
        return self.engine.step()

    def until(self, condition: Callable[[], object], most: int = 400) -> None:
        for _ in range(most):
            if condition():
                return
            self.step()
        assert condition(), f"the condition did not hold within {most} steps"

    def play(self) -> None:
        """Steps until nothing waits or runs."""
        self.until(lambda: self.engine.idle, most=3000)
        self.engine.step()

    def reach(self, state: str, session_id: str = "s", output: int = 20) -> Turn:
        """Brings a turn with 20 input tokens to `state`."""
        tokens = count_from(600, 20)
        if state == "drafting":
            turn = self.engine.turns.draft(session_id, tokens)
            self.step()
            return turn
        turn = self.say(session_id, tokens, output)
        if state == "queued":
            return turn
        if state == "mid-prefill":
            self.until(lambda: turn.state is TurnState.RUNNING)
            assert not turn.output
        else:
            self.until(lambda: len(turn.output) >= 4)
        if state == "preempted":
            self.engine.pressure.preempt(turn)
        return turn

    # -- expected outputs and computed tokens

    def computed_since(self, plans: int) -> int:
        """Returns the number of tokens computed in the plans after the first `plans`."""
        return sum(int(plan.counts.sum()) for plan in self.executor.plans[plans:])

    def cost(self, action: Callable[[], object]) -> int:
        """Returns the number of tokens computed from `action` until everything has ended."""
        before = len(self.executor.plans)
        action()
        self.play()
        return self.computed_since(before)


class Guesser(Proposer):
    """A proposer whose guesses are certain."""

    def __init__(self, guess: Callable[[Turn, int], list[int]]) -> None:
        self._guess = guess

    def propose(self, turns: Sequence[Turn], limits: Sequence[int], step: NextStep) -> list[Guesses]:
        found = [self._guess(turn, limit) for turn, limit in zip(turns, limits, strict=True)]
        return [Guesses(tokens, [1.0] * len(tokens)) for tokens in found]


STATES = ("drafting", "queued", "mid-prefill", "mid-decode", "preempted")


def full_table(session: Session) -> FullTable:
    """Returns the table of a session's first group, which is full attention."""
    table = session.memory.tables[0]
    assert isinstance(table, FullTable)
    return table


def count_from(start: int, tokens: int) -> list[int]:
    return [(start * 31 + i) % VOCABULARY for i in range(tokens)]


def continuation(history: Sequence[int], tokens: int) -> list[int]:
    """Returns the witness's output after `history`."""
    state, said = history_hash(history), []
    for _ in range(tokens):
        said.append(next_token(state, VOCABULARY))
        state = advance(state, said[-1])
    return said
