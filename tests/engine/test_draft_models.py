"""A draft model guesses what turns say; it follows all that happens to sessions, and costs nothing but time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

from tenuto.base.errors import ConfigError
from tenuto.base.groups import GroupSpec
from tenuto.base.options import Policy
from tenuto.base.plan import PARTS, MemoryPart, Plan
from tenuto.base.sampling import Sampling
from tenuto.exec.witness import WitnessExecutor
from tenuto.sched.draft_model import DraftModel
from tenuto.sched.draft_proposer import DRAFT, DraftProposer
from tenuto.sched.draft_tables import DraftTables
from tenuto.sched.guesses import Guesses, NextStep, Proposer
from tenuto.sched.suffix_proposer import SuffixProposer
from tenuto.session.turn import Turn
from tests.clock import ManualClock
from tests.engine.stage import (
    FULL,
    PAGE,
    PREFILL,
    SLIDING,
    STATE,
    VOCABULARY,
    Stage,
    continuation,
    count_from,
    every_mix,
    every_overlap,
)
from tests.present import present


class DraftWitness(WitnessExecutor):
    """A witness that counts the tokens it computes, and fails while `failing`."""

    def __init__(self, *groups: GroupSpec) -> None:
        super().__init__(PAGE, groups, VOCABULARY, fail=lambda: self.failing)
        self.failing = False
        self.tokens = 0
        self.submitted = 0

    def submit(self, plan: Plan) -> None:
        self.tokens += int(plan.counts.sum())
        self.submitted += 1
        super().submit(plan)


class Silent(Proposer):
    """Guesses nothing, and remembers which memory it was told to release."""

    def __init__(self) -> None:
        self.released: list[Collection[MemoryPart]] = []

    def propose(self, turns: Sequence[Turn], limits: Sequence[int], step: NextStep) -> list[Guesses]:
        return [Guesses() for _ in turns]

    def release(self, parts: Collection[MemoryPart]) -> None:
        self.released.append(parts)


class Drafted(Stage):
    """A stage with a draft model, by default one that says the same."""

    def __init__(
        self, *args: Any, pages: int = 200, right: bool = True, beside: Proposer | None = None, **options: Any
    ) -> None:
        self.draft = DraftWitness(GroupSpec(FULL, 1), GroupSpec(SLIDING, 1, 6))
        if not right:
            self.draft.restore((), self.draft.load("another"))
        running = options.setdefault("max_running", 4)
        self.tables = DraftTables(self.draft.spec, pages, running)
        self.draft.prepare((pages, pages), running, 0)
        model = DraftModel(self.draft, self.tables, ManualClock(), vocab_size=VOCABULARY, context=10**6)
        super().__init__(
            *args, proposer=DraftProposer(model, beside or SuffixProposer()), **{"lookahead": 4, **options}
        )

    @property
    def guessed(self) -> int:
        return self.engine.guessed[DRAFT]

    @property
    def accepted(self) -> int:
        return self.engine.accepted[DRAFT]

    def drafted(self, action: Callable[[], object]) -> int:
        """Returns the number of tokens that the draft model computes until everything has ended."""
        before = self.draft.tokens
        action()
        self.play()
        return self.draft.tokens - before


@every_mix
@every_overlap
def test_output_is_the_same_in_fewer_steps(mix, overlap: int) -> None:
    stage, plain = Drafted(mix, overlap=overlap), Stage(mix, overlap=overlap)
    for each in (stage, plain):
        each.committed(output=60)
    assert stage.engine.registry.get("s").history == plain.engine.registry.get("s").history
    assert stage.accepted == stage.guessed > 30
    assert stage.engine.steps < plain.engine.steps * 2 / 3


def test_a_model_that_is_always_wrong_is_soon_hardly_asked() -> None:
    stage = Drafted(right=False, context_length=700)
    session = stage.committed(tokens=20, output=600)
    assert list(session.history)[20:] == continuation(count_from(1, 20), 600)
    assert (stage.accepted, stage.guessed < 60, stage.draft.submitted < 120) == (0, True, True)


def test_the_draft_model_follows_forks_rewinds_regenerations_and_barge_ins() -> None:
    stage = Drafted(context_length=400, recount=True)
    stage.committed(tokens=40, output=20)
    assert stage.drafted(lambda: stage.say("s", [5, 6], 20)) < 40  # the rest is there
    stage.engine.sessions.rewind("s", position=50)
    assert stage.drafted(lambda: stage.say("s", [7], 20)) < 40
    stage.engine.sessions.fork("s", child="fork", position=45)
    assert stage.drafted(lambda: stage.say("fork", [8, 9], 20)) < 50
    turn = stage.say("fork", [3], 20)
    stage.until(lambda: len(turn.output) >= 7)
    stage.engine.turns.abort("fork", keep=4)
    stage.say("fork", [4], 20)
    stage.say("s", [4], 20)
    stage.play()
    for name in ("s", "fork"):
        stage.engine.sessions.close(name)
    assert stage.guessed > 60
    assert stage.accepted > stage.guessed - 8  # some were under way when the turn was aborted


@every_overlap
def test_a_preempted_turn_goes_on_with_guesses(overlap: int) -> None:
    stage = Drafted(overlap=overlap)
    stage.open()
    turn = stage.reach("preempted", output=40)
    stage.play()
    assert turn.output.tolist() == continuation(count_from(600, 20), 40)
    assert stage.accepted > 20


@every_overlap
def test_seeded_turns_beside_each_other_get_guesses_with_their_own_options(overlap: int) -> None:
    stage = Drafted(overlap=overlap, max_running=2)
    said = set()
    for seed in range(8):
        stage.open(str(seed))
    for _ in range(2):
        turns = []
        for seed in range(8):
            sampling = Sampling(temperature=1.0, seed=seed) if seed % 3 else Sampling()
            turns.append(stage.say(str(seed), count_from(3, 12), 24, sampling=sampling))
        stage.play()
        said |= {tuple(turn.output) for turn in turns}
    assert len(said) == 12  # three turns are greedy
    assert stage.accepted == stage.guessed > 120


def test_sessions_take_turns_in_a_small_memory() -> None:
    stage = Drafted(pages=50, max_running=4)
    for number in range(8):
        stage.open(str(number))
    for _ in range(2):
        turns = [stage.say(str(number), count_from(number, 40), 20) for number in range(8)]
        stage.play()
    for turn in turns:
        history = list(turn.session.history)
        assert history[-20:] == continuation(history[:-20], 20)
    assert stage.accepted > 40
    assert all(pool.free + pool.leased == 50 for pool in stage.tables.pools)


def test_a_failed_step_of_the_draft_model_costs_only_its_guesses() -> None:
    stage = Drafted(max_running=2)
    stage.open()
    turn = stage.say("s", count_from(1, 20), 100)
    stage.until(lambda: len(turn.output) > 10)
    stage.draft.failing, before = True, stage.draft.submitted
    stage.until(lambda: len(turn.output) > 50)
    assert stage.draft.submitted - before < 8  # after each failure it is left alone for longer
    stage.draft.failing, before = False, stage.accepted
    stage.play()
    assert turn.output.tolist() == continuation(count_from(1, 20), 100)
    assert stage.accepted > before
    assert present(turn.result).usage.computed == 119 + present(turn.result).usage.rejected


def test_tenants_do_not_use_each_others_tokens() -> None:
    stage = Drafted(recount=True)
    tokens = count_from(1, 40)
    stage.engine.sessions.open("a", Policy(tenant="one"))
    stage.engine.sessions.open("b", Policy(tenant="one"))
    stage.engine.sessions.open("c", Policy(tenant="two"))
    assert stage.drafted(lambda: stage.say("a", tokens, 8, tenant="one")) > 40
    assert stage.drafted(lambda: stage.say("b", tokens, 8, tenant="one")) < 15
    assert stage.drafted(lambda: stage.say("c", tokens, 8, tenant="two")) > 40


def test_its_memory_is_released_with_the_engines() -> None:
    beside = Silent()
    stage = Drafted(beside=beside)
    stage.committed(output=20)
    stage.engine.occupation.pause()
    stage.engine.occupation.release(PARTS)
    assert sum(part.nbytes for group in stage.draft._slots for part in group) == 0
    assert all(pool.free == pool.capacity for pool in stage.tables.pools)
    assert beside.released == [frozenset(PARTS)]
    stage.engine.occupation.restore(PARTS, stage.executor.load(None))
    stage.engine.occupation.resume()
    before = stage.accepted
    stage.say("s", [1, 2], 20)
    stage.play()
    assert stage.accepted > before


def test_the_audit_counts_its_pages() -> None:
    stage = Drafted(recount=False)
    stage.committed(output=20)
    report = stage.engine.audit()
    pools = {pool.name: pool for pool in report.pools}
    assert pools["draft model full0"].leased == stage.tables.pools[0].leased > 0
    table = next(iter(stage.tables))
    stage.tables._used.pop(table)
    with pytest.raises(Exception, match="draft model full0"):
        stage.engine.audit()


def test_turns_that_want_none_get_no_guesses() -> None:
    stage = Drafted()
    stage.open()
    stage.say("s", count_from(1, 20), 30, speculate=False)
    stage.play()
    stage.engine.turns.submit("s", [1, 2], PREFILL)
    stage.play()
    assert stage.draft.submitted == 0


def test_a_model_with_recurrent_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="recurrent"):
        DraftTables(WitnessExecutor(PAGE, [GroupSpec(STATE, 1)], VOCABULARY).spec, 10, 1)
