"""A failed step is repeated in place, and bisection finds the turns that cause it without delaying the others for
long."""

from __future__ import annotations

from math import ceil, log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.base.plan import Plan
from tenuto.base.turns import EndReason, TurnState
from tenuto.base.views import Transition
from tenuto.sched.suspects import MAX_FAILURES
from tenuto.session.turn import Turn
from tests.engine.stage import FULL, SLIDING, STATE, Stage, continuation, count_from, every_mix, every_overlap
from tests.memory.scribe import Someone
from tests.present import present


class Poison:
    """Makes every step fail that computes the token at position `strikes[turn]` of a turn, or a later one."""

    def __init__(self, stage: Stage) -> None:
        self.strikes: dict[Turn, int] = {}
        self.failed: list[list[Turn]] = []  # the turns of each failed step that made suspects
        self.parts = 0  # steps planned for suspects only
        self._stage = stage
        self._ends: dict[int, dict[Turn, int]] = {}  # by step: where it ends for each turn
        self._submit, self._step_failed = stage.executor.submit, stage.engine.suspects.step_failed
        stage.executor.submit = self._submitting  # type: ignore[method-assign]
        stage.engine.suspects.step_failed = self._failing  # type: ignore[method-assign]
        stage.executor._fail = self._strikes

    def _submitting(self, plan: Plan) -> None:
        engine = self._stage.engine
        self.parts += bool(engine.suspects.rows(engine.batch.held))
        turns = engine.batch.turns[plan.rows].tolist()
        self._ends[plan.step] = dict(zip(turns, (plan.starts + plan.counts).tolist(), strict=True))
        self._submit(plan)

    def _failing(self, turns, *, alone: bool) -> None:
        self.failed.append(list(turns))
        self._step_failed(turns, alone=alone)

    def _strikes(self) -> bool:
        ends = self._ends[self._stage.executor.collecting.step]
        return any(end > self.strikes.get(turn, end) for turn, end in ends.items())


@settings(max_examples=60)
@given(data=st.data(), n=st.integers(1, 12), overlap=st.integers(0, 1))
@pytest.mark.parametrize("mix", [(FULL,), (FULL, SLIDING, STATE)], ids=["full", "all"])
def test_k_poisoned_turns_among_n_cost_no_more_failed_steps_than_bisection(mix, data, n: int, overlap) -> None:
    poisoned = data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=min(n, 4)))
    stage = Stage(mix, units=600, max_running=12, token_budget=32, overlap=overlap, recount=False)
    poison, turns, prompts = Poison(stage), [], []
    for i in range(n):
        stage.open(f"s{i}")
        prompts.append(count_from(i, data.draw(st.integers(1, 40))))
        turns.append(stage.say(f"s{i}", prompts[i], 8))
        if i in poisoned:
            poison.strikes[turns[i]] = data.draw(st.integers(0, len(prompts[i]) + 5))
        for _ in range(data.draw(st.integers(0, 2))):
            stage.step()
    stage.play()
    stage.engine.audit()
    most = len(poisoned) * (ceil(log2(n)) + MAX_FAILURES)
    assert len(poison.failed) <= most
    # Failed steps, as many successful ones, and a few more: with recurrent state a group of seven took 13, of which 6
    # failed.
    assert poison.parts <= (most + len(poisoned)) * 2 * (1 + overlap)
    for i, turn in enumerate(turns):
        if i in poisoned:
            assert present(turn.result).reason is EndReason.FAILED
        else:
            assert list(turn.output) == continuation(prompts[i], 8)


@every_overlap
def test_a_poisoned_turn_that_arrives_among_many_delays_them_by_a_few_steps(overlap: int) -> None:
    """Known fault: one request that fails all its steps made twelve others take nine times as long."""

    def steps(poisoned: bool) -> tuple[int, EndReason | None]:
        stage = Stage(units=4000, context_length=2000, max_running=16, token_budget=256, overlap=overlap, recount=False)
        poison, turns = Poison(stage), []
        for i in range(12):
            stage.open(f"s{i}")
            turns.append(stage.say(f"s{i}", [i] * 20, 100))
        for _ in range(50):
            stage.step()
        stage.open("p")
        late = stage.say("p", [5], 5)
        if poisoned:
            poison.strikes[late] = 0
        stage.until(lambda: all(turn.result for turn in turns))
        assert all(list(turn.output) == continuation([i] * 20, 100) for i, turn in enumerate(turns))
        return stage.engine.steps, late.result.reason if late.result else None

    well, _ = steps(poisoned=False)
    ill, reason = steps(poisoned=True)
    assert reason is EndReason.FAILED
    assert ill - well <= 2 * (ceil(log2(13)) + MAX_FAILURES) * (1 + overlap)


def test_two_failed_steps_isolate_no_turn_and_recompute_no_old_tokens() -> None:
    """Known fault: after two failed steps every turn ran alone, which took seven times as long."""

    def run(failing: tuple[int, ...]) -> tuple[int, int]:
        stage = Stage(units=4000, context_length=2000, max_running=16, token_budget=128, failing=failing, recount=False)
        turns = []
        for i in range(12):
            stage.open(f"s{i}")
            turns.append(stage.say(f"s{i}", count_from(i, 600), 60))
        stage.play()
        assert stage.engine.transitions[Transition("step failed")] == len(failing)
        assert stage.engine.transitions[Transition("preempt")] == 0
        return stage.engine.steps, sum(turn.computed_tokens for turn in turns)

    (steps, tokens), (steps_failing, tokens_failing) = run(()), run((70, 75))
    assert steps_failing - steps <= 2 * 2  # each is repeated as two halves
    assert tokens_failing - tokens <= 2 * 128


def test_a_draft_that_failed_near_its_end_and_is_then_shortened_is_no_longer_suspect() -> None:
    """Known fault: the position where it had failed lay beyond its new end, so it ran alone until its end."""
    stage = Stage(units=600, context_length=2000, max_running=8, token_budget=64, failing=(12, 13))
    stage.open("d")
    stage.engine.turns.draft("d", count_from(1, 1000))
    stage.until(lambda: stage.engine.transitions[Transition("step failed")] == 2)
    draft = stage.engine.registry.get("d").turn
    assert draft is not None
    assert (draft.failures, draft.failed_end) == (2, 13 * 64)
    stage.engine.turns.draft("d", [5] * 4)
    turn = stage.say("d", [5] * 4, 100)
    others = []
    for i in range(4):
        stage.open(f"o{i}")
        others.append(stage.say(f"o{i}", [1, 2, 3], 5))
    stage.until(lambda: all(other.result for other in others), most=10)
    assert not stage.engine.suspects
    assert turn.failures == 0


def test_a_suspect_that_waits_for_another_turns_computation_delays_no_others() -> None:
    """Known fault: only the waiting turn was allowed to run, so all others were preempted again and again."""
    stage = Stage(units=300, context_length=300, max_running=8, token_budget=24, prefix_cache=True)
    same = count_from(1, 200)
    turns = {"first": stage.say(stage.open("first").id, same, 4)}
    stage.step()
    turns["waits"] = stage.say(stage.open("waits").id, [*same, 7], 4)
    for name in ("c", "d"):
        turns[name] = stage.say(stage.open(name).id, count_from(len(turns), 30), 60)
    for _ in range(8):
        stage.step()
    sharing = stage.engine.sharing
    assert sharing.waits(turns["waits"])
    stage.engine.pressure.preempt(turns["first"])
    failing = iter([True])
    stage.executor._fail = lambda: next(failing, False)
    stage.until(lambda: turns["waits"] in stage.engine.suspects and len(stage.engine.suspects) == 1)
    assert sharing.waits(turns["waits"])
    said = len(turns["c"].output), len(turns["d"].output)
    for _ in range(4):
        stage.step()
    assert (len(turns["c"].output), len(turns["d"].output)) == (said[0] + 4, said[1] + 4)
    stage.play()
    assert stage.engine.transitions[Transition("preempt")] == 1  # the test's own
    assert list(turns["waits"].output) == continuation([*same, 7], 4)


@pytest.mark.parametrize("ends", [False, True], ids=["beside a running turn", "alone"])
def test_for_a_suspect_draft_without_room_no_other_draft_yields(ends: bool) -> None:
    """Known fault: another draft yielded that had not been in the failed step."""
    stage = Stage(units=40, recount=False, failing=(1,))
    stage.open("running")
    running = stage.say("running", [1], 40)
    stage.open("suspect")
    suspect = stage.engine.turns.draft("suspect", count_from(2, 60))
    stage.step()
    stage.step()
    stage.open("other")
    other = stage.engine.turns.draft("other", count_from(3, 20))
    stage.until(lambda: suspect in stage.engine.suspects and running not in stage.engine.suspects)
    pool = stage.engine.memory.pools[0]
    if ends:
        stage.engine.turns.abort("running")
    taken = present(pool.acquire(pool.free, Someone("a stranger")))
    stage.step()
    assert present(other.session.memory.turn).row >= 0
    assert (suspect.session.memory.turn is None) is ends  # it has to yield itself only if nothing else can run
    taken.release()
    stage.play()
    assert ends or list(running.output) == continuation([1], 40)


@every_mix
def test_a_failed_step_voids_the_next_one_and_only_its_own_turns_are_suspects(mix) -> None:
    stage = Stage(mix, overlap=1)
    poison = Poison(stage)
    for name in ("a", "b", "c"):
        stage.open(name)
    first, second = (stage.say(name, count_from(3, 12), 8) for name in ("a", "b"))
    stage.step()  # the step that will fail is in flight
    late = stage.say("c", [1, 2, 3], 8)
    poison.strikes[first] = 0
    stage.step()  # the next one, with the late turn, is in flight when it fails
    assert poison.failed == [[first, second]]
    assert late in stage.engine.batch
    assert all(late not in group for group in stage.engine.suspects._groups)
    assert present(late.session.memory.turn).computed == 0
    assert late.failures == 0
    stage.play()
    assert present(first.result).reason is EndReason.FAILED
    assert list(second.output) == continuation(count_from(3, 12), 8)
    assert list(late.output) == continuation([1, 2, 3], 8)


@every_mix
@every_overlap
def test_a_failed_step_recomputes_only_its_own_tokens(mix, overlap: int) -> None:
    def cost(failing: tuple[int, ...]) -> int:
        stage = Stage(mix, overlap=overlap, failing=failing, checkpoint_interval=16)
        stage.open()
        return stage.cost(lambda: stage.say("s", count_from(1, 150), 4))

    assert cost((6,)) - cost(()) <= 16 * (1 + overlap)  # of one turn: the step's and its successor's


@every_mix
@every_overlap
def test_a_turn_in_a_failed_step_keeps_its_row_and_its_output(mix, overlap: int) -> None:
    stage = Stage(mix, overlap=overlap, failing=(4,))
    stage.open()
    turn = stage.say("s", count_from(1, 20), 12)
    stage.until(lambda: stage.engine.transitions[Transition("step failed")])
    assert (turn.state, stage.engine.transitions[Transition("preempt")]) == (TurnState.RUNNING, 0)
    stage.play()
    assert list(turn.output) == continuation(count_from(1, 20), 12)


@every_mix
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_draft_that_waits_for_a_row_when_its_step_fails_starts_again(mix, failing: int) -> None:
    """Known fault: its source was a checkpoint that the failed step should have filled. Since it waited, it could not
    be preempted, and the engine stopped."""
    stage, tokens = Stage(mix, overlap=1, failing=(failing,), checkpoint_interval=4, max_running=1), count_from(1, 60)
    stage.open()
    stage.open("o")
    stage.engine.turns.draft("s", tokens)
    for _ in range(failing + 1):
        stage.step()
    turn, other = stage.say("s", tokens, 8), stage.say("o", [1, 2, 3], 8, priority=5)
    stage.play()
    assert stage.engine.transitions[Transition("step failed")] == 1
    assert list(turn.output) == continuation(tokens, 8)
    assert list(other.output) == continuation([1, 2, 3], 8)


@every_overlap
def test_a_turn_back_at_a_checkpoint_stays_suspect_until_it_passes_where_its_step_failed(
    overlap,
) -> None:
    """Known fault: recomputing from a checkpoint, it passed the start of the failed step, was cleared, and failed the
    others' steps again and again."""
    stage = Stage((FULL, SLIDING, STATE), units=600, max_running=12, token_budget=32, overlap=overlap, recount=False)
    poison, turns = Poison(stage), []
    for i, tokens in enumerate((1, 1, 34, 1)):
        stage.open(f"s{i}")
        turns.append(stage.say(f"s{i}", count_from(i, tokens), 8))
    poison.strikes[turns[2]] = 32
    stage.play()
    assert [present(turn.result).reason is EndReason.FAILED for turn in turns] == [False, False, True, False]
    assert len(poison.failed) <= ceil(log2(4)) + MAX_FAILURES


def test_a_failed_step_is_logged_with_its_turns(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(failing=[0])
    for name in ("a", "b"):
        stage.open(name)
        stage.say(name, [1, 2], 3)
    stage.play()
    (record,) = caplog.records
    assert (record.message, vars(record)["turns"]) == ("a step failed", ["turn 1 of a", "turn 2 of b"])


def test_a_turn_is_not_blamed_for_a_failed_step_shared_with_turns_that_left() -> None:
    stage = Stage(overlap=1, failing=(2,))
    for name in ("stays", "leaves"):
        stage.open(name)
    stays, _ = stage.say("stays", [1, 2], 20), stage.say("leaves", [3, 4], 20)
    stage.step()
    stage.step()
    stage.step()
    stage.engine.turns.abort("leaves")
    stage.until(lambda: stage.engine.transitions[Transition("step failed")] == 1)
    assert (stays.failures, len(stage.engine.suspects)) == (0, 1)
    stage.play()
    assert list(stays.output) == continuation([1, 2], 20)


def test_a_suspect_without_room_keeps_its_memory_while_others_run() -> None:
    """Known fault: no other turn was allowed to run, so the suspect was preempted, as if nothing else could help."""
    stage = Stage(units=5, context_length=20, host_tier=10**6, failing=(3,))
    stage.engine.pressure.drop(stage.committed("parked", 6, 2))  # to host memory
    stage.open("s")
    turn = stage.say("s", count_from(2, 12), 6)
    stage.until(lambda: stage.engine.suspects)
    urgent = stage.say("parked", [], 1, priority=1)  # its copies take the page that the suspect needs
    stage.play()
    assert stage.engine.transitions[Transition("preempt")] == 0
    assert (len(urgent.output), list(turn.output)) == (1, continuation(count_from(2, 12), 6))


def test_a_suspect_that_has_room_runs_alone_while_another_one_lacks_it() -> None:
    stage = Stage(units=5, context_length=20, token_budget=24, host_tier=10**6, failing=(3,))
    stage.engine.pressure.drop(stage.committed("parked", 6, 2))
    for name in ("small", "large"):
        stage.open(name)
    small = stage.say("small", [1, 2], 6)
    stage.step()
    stage.say("large", count_from(2, 16), 2, priority=1)
    stage.until(lambda: len(stage.engine.suspects) == 2)
    urgent = stage.say("parked", [], 1, priority=2)
    plans = len(stage.executor.plans)
    stage.until(lambda: len(stage.executor.plans) > plans)
    assert urgent.running
    assert stage.executor.plans[-1].rows.tolist() == [stage.engine.batch.row_of(small)]
