"""Worlds with a purpose: the cost of a turn with ample memory, the cost of failing steps to healthy turns, the order of
yielding. Each draws its sizes from its seed; `World` and `Watch` make the same checks as in random worlds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from random import Random
from typing import Any

from tenuto.base.groups import GroupSpec, Kind
from tenuto.base.options import Policy, TurnParams
from tenuto.base.plan import Plan
from tenuto.base.sampling import Sampling
from tenuto.memory.shape import Shape
from tests.sim.letters import VOCAB
from tests.sim.mirror import MirroredWorld
from tests.sim.naive import NaiveTurn
from tests.sim.setting import MIXES, WorldConfig, engine_config, least_units
from tests.sim.sharing import TENANTS, WEIGHTS, sharing
from tests.sim.stories import (
    churn,
    cut_back,
    editing,
    failing,
    guessed,
    poisoned,
    scored,
    shortened,
    struck,
    tails,
    typing,
)
from tests.sim.stories_of_pressure import alone, families, outgrow, passed_over, promotion


class Scenario(MirroredWorld):
    """Plays one story after another until the number of steps is reached."""

    def __init__(self, config: WorldConfig, ignored: Collection[str] = ()) -> None:
        super().__init__(config, ignored)
        self.forced = 0  # steps that must fail before any others
        self.rows = 0  # rows in use when the last plan was made
        self.given: list[tuple[NaiveTurn, int]] = []  # its turns, with the number of tokens it computes for each
        self.again = 0  # settled tokens that turns with recurrent state may compute again after failed steps
        self._story = story_of(config.seed)

    def run(self, steps: int) -> None:
        while self.steps < steps:
            self._story(self)
            self._clear()
            if self._story is churn:  # thousands of operations in a few steps: once is enough
                self._story = tails

    def _clear(self) -> None:
        for sid in list(self.naive):
            if sid in self.naive:
                self.close(sid, finish=False)
        self.step()
        self.step()
        self.step()

    def step_fails(self, members: Mapping[int, int]) -> bool:
        if self.forced:
            self.forced -= 1
            return True
        return super().step_fails(members)

    def landed(self, members: Collection[int], *, failed: bool) -> None:
        super().landed(members, failed=failed)
        if failed and any(group.kind is Kind.STATE for group in self.config.groups):
            void = (number for ends in self.executor.members.values() for number in ends)
            self.again += sum(self._back(self.turns[number]) for number in {*members, *void} & self.turns.keys())

    def _back(self, naive: NaiveTurn) -> int:
        """Returns the settled tokens past the highest position at which the turn certainly keeps its state."""
        memory = self.session_of(naive.sid).memory.turn
        settled = memory.computed if memory is not None else 0
        kept = [naive.prompt - 1, max(0, naive.first_start)]  # a failed step may have changed the state it read
        return settled - max((position for position in kept if position <= settled), default=settled)

    def planned(self, plan: Plan) -> dict[int, int]:
        ends = super().planned(plan)
        self.rows = len(self.engine.batch)
        self.given = [(self.turns[number], n) for number, n in zip(ends, plan.counts.tolist(), strict=True)]
        return ends

    # -- for stories

    def text(self, tokens: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(tokens)]

    def say(self, sid: str, tokens: list[int], most: int, **params: Any) -> NaiveTurn:
        """Submits a turn of exactly `most` tokens, with its input cut to fit."""
        tokens = tokens[: max(1, self.longest - len(self.naive[sid].tokens) - most)]
        seed = Sampling(temperature=1.0, seed=self.rng.getrandbits(30))
        given = TurnParams(max_new_tokens=most, ignore_eos=True, sampling=seed, **params)
        turn = self.submit(sid, tokens, given)
        assert turn is not None
        return self.turns[turn.number]

    def opened(self, **policy: Any) -> str:
        sid = self.open(Policy(**policy))
        assert sid is not None
        return sid

    def committed(self, tokens: int, most: int = 1) -> str:
        """Opens a session with a history in memory."""
        sid = self.opened()
        self.say(sid, self.text(tokens), most)
        self.play()
        return sid

    def play(self, most: int = 4000) -> int:
        """Steps until every submitted turn has ended; returns the number of steps."""
        began = self.steps
        while any(not turn.drafting for turn in self.turns.values()):
            self.step()
            assert self.steps - began < most, "it does not end"
        return self.steps - began


EVERY = 4
"""Every fourth world is a scenario."""
STORIES: tuple[Callable[[Scenario], None], ...] = (
    typing,
    tails,
    poisoned,
    families,
    outgrow,
    churn,
    sharing,
    failing,
    alone,
    promotion,
    editing,
    shortened,
    scored,
    guessed,
    struck,
    passed_over,
    cut_back,
)


PLACES = 24
"""Stories repeat in this cycle, so that adding one changes few seeds."""


def story_of(seed: int) -> Callable[[Scenario], None]:
    return STORIES[(seed // EVERY) % PLACES % len(STORIES)]


def is_scenario(seed: int) -> bool:
    return seed % EVERY == EVERY - 1


def scenario_world(seed: int) -> WorldConfig:
    """Returns the setting of a scenario, with ample or tight memory as its story requires."""
    rng = Random(seed)
    story = story_of(seed)
    ample = story not in (families, outgrow, alone, promotion, passed_over)
    pages_only = story in (outgrow, promotion, alone, passed_over)
    mix = (Kind.FULL,) if pages_only and rng.random() < 0.7 else rng.choice(MIXES)
    page_size = rng.choice((1, 2, 4, 4, 8)) if story not in (tails, cut_back) else rng.choice((3, 4, 8, 16, 32, 64))
    running = rng.choice((4, 8, 12)) if story is not alone else 1
    context = rng.choice((200, 400)) if story is not alone else rng.choice((40, 80))
    config = WorldConfig(
        seed=seed,
        story=story.__name__,
        groups=tuple(GroupSpec(kind, 1, rng.choice((4, 10, 30)) if kind is Kind.SLIDING else 0) for kind in mix),
        pressure="ample" if ample else "tight",
        overlap=1 if story is scored else rng.randint(0, 1),
        lookahead=3 if story is guessed else 0,
        page_size=page_size,
        context=context,
        budget=running + rng.choice((8, 16, 50)),
        running=running,
        sessions=40,
        queued=40,
        units=(),
        checkpoint_share=1.0 if ample else rng.choice((0.2, 0.5, 1.0)),
        interval=rng.choice((16, 64, 10**6)),
        aging=5.0,
        fail_rate=0.0,
        recount_every=2,
        look=0.3,
    )
    if story is sharing:
        weights = tuple((tenant, rng.choice(WEIGHTS)) for tenant in TENANTS) if rng.random() < 0.5 else ()
        running = rng.choice((1, 2, 4, 8, 16))
        config = replace(config, running=running, weights=weights, budget=running + rng.choice((24, 60)))
        config = replace(config, sessions=80, interval=10**6)
    shape = Shape.of(engine_config(config), page_size)
    least = [least_units(group, page_size, context, shape) for group in config.groups]
    if ample:
        units = [200 if g.kind is Kind.STATE else n * (running + 8) for g, n in zip(config.groups, least, strict=True)]
    elif story is alone:
        units = [n + rng.choice((0, 0, 1)) for n in least]
    else:
        times = rng.choice((1.2, 2.0, 3.0))
        units = [max(n + 2, int(n * times)) for n in least]
    return replace(config, units=tuple(units))
