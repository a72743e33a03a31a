"""A step's tokens are divided between turns, and proposing a plan changes nothing."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.base.config import EngineConfig
from tenuto.base.errors import InvariantError
from tenuto.base.options import Policy
from tenuto.memory.memory import Memory
from tenuto.sched.planner import Planner
from tenuto.sched.shares import Shares
from tenuto.sched.suspects import Suspects
from tests.engine.stage import FULL, STATE, Stage, count_from, every_mix, every_overlap
from tests.memory.scribe import make_shape, make_spec
from tests.present import present

Row = tuple[int, int, bool]
"""The tokens a turn wants, its priority, and whether it is a draft."""

wishes = st.one_of(st.integers(0, 2), st.integers(0, 60))
rows = st.lists(st.tuples(wishes, st.integers(0, 2), st.booleans()), max_size=8)


def divide(wants: list[Row], budget: int, mixed: int = 512) -> list[int]:
    """Returns the planner's share for each of `wants`."""
    return divide_among_tenants([(row, "") for row in wants], budget, {}, mixed)


def divide_among_tenants(
    wants: list[tuple[Row, str]], budget: int, weights: dict[str, float], mixed: int = 512
) -> list[int]:
    """Returns the same for rows of several tenants."""
    turns = [
        SimpleNamespace(drafting=draft, priority=priority, session=SimpleNamespace(policy=Policy(tenant=tenant)))
        for (_, priority, draft), tenant in wants
    ]
    memory = Memory(make_spec([FULL]), [50], make_shape())
    batch = SimpleNamespace(turns=np.array(turns, object), shares=Shares(weights))
    config = EngineConfig(max_running=8, token_budget=budget, mixed_budget=mixed)
    planner = Planner(memory, batch, Suspects(), config, None)  # type: ignore[arg-type]
    wanted = np.array([wanted for (wanted, _, _), _ in wants], np.int64)
    return planner._divide(np.arange(len(wants)), wanted).tolist()


def divide_one_by_one(wants: list[Row], budget: int) -> list[int]:
    """Returns the same token by token. Each row gets one. Of the most important rows the first then gets a quarter, and
    the one that wants the fewest tokens gets the next; the less important follow."""
    given_tokens = [0] * len(wants)
    for index, (wanted, _, _) in enumerate(wants):
        if wanted and budget:
            given_tokens[index] += 1
            budget -= 1
    for kind in sorted({(draft, -priority) for _, priority, draft in wants}):
        members = [i for i, (wanted, p, d) in enumerate(wants) if (d, -p) == kind and wanted > 1]
        for turn in range(budget):
            lacking = [i for i in members if given_tokens[i] < wants[i][0]]
            if lacking:
                first = lacking[0] == members[0] and turn < budget / 4
                index = lacking[0] if first else min(lacking, key=lambda i: wants[i][0])
                given_tokens[index] += 1
        budget -= sum(given_tokens[i] - 1 for i in members)
    return given_tokens


@given(rows, st.integers(9, 80))
def test_the_budget_is_divided_as_if_token_by_token(wants: list[Row], budget: int) -> None:
    assert divide(wants, budget) == divide_one_by_one(wants, budget)


@given(rows, st.integers(9, 80))
def test_no_token_of_the_budget_is_wasted_or_given_twice(wants: list[Row], budget: int) -> None:
    counts = divide(wants, budget)
    assert sum(counts) == min(budget, sum(wanted for wanted, _, _ in wants))
    assert all(0 <= count <= wanted for count, (wanted, _, _) in zip(counts, wants, strict=True))


@given(rows, st.integers(9, 80))
def test_every_turn_that_wants_a_token_gets_one(wants: list[Row], budget: int) -> None:
    assert all(bool(count) == bool(wanted) for count, (wanted, _, _) in zip(divide(wants, budget), wants, strict=True))


@given(rows, st.integers(9, 80))
def test_a_draft_gets_more_than_one_token_only_when_no_other_turn_wants_more(wants: list[Row], budget: int) -> None:
    counts = divide(wants, budget)
    if any(count > 1 and draft for count, (_, _, draft) in zip(counts, wants, strict=True)):
        assert all(count == wanted for count, (wanted, _, draft) in zip(counts, wants, strict=True) if not draft)


tenant_rows = st.lists(
    st.tuples(st.tuples(wishes, st.integers(0, 2), st.booleans()), st.sampled_from("abc")), max_size=8
)
weights = st.fixed_dictionaries({tenant: st.sampled_from([0.5, 1.0, 2.0, 5.0]) for tenant in "abc"})


@given(tenant_rows, weights, st.integers(9, 80))
def test_tokens_left_by_one_tenant_go_to_the_others(wants, weights, budget: int) -> None:
    counts = divide_among_tenants(wants, budget, weights)
    assert sum(counts) == min(budget, sum(wanted for (wanted, _, _), _ in wants))
    assert all(bool(count) == bool(row[0]) for count, (row, _) in zip(counts, wants, strict=True))
    assert all(0 <= count <= row[0] for count, (row, _) in zip(counts, wants, strict=True))


@given(tenant_rows, weights, st.integers(9, 80))
def test_a_tenant_that_wants_more_has_received_its_share_by_weight(wants, weights, budget: int) -> None:
    """Up to rounding for those served before it; the token that every row gets is not counted."""
    counts = divide_among_tenants(wants, budget, weights)
    got = dict.fromkeys("abc", 0)
    hungry = set()
    for count, ((wanted, _, draft), tenant) in zip(counts, wants, strict=True):
        if not draft:
            got[tenant] += max(0, count - 1)
            if count < wanted:
                hungry.add(tenant)
    for tenant in hungry:
        for other, tokens in got.items():
            assert (got[tenant] + 2) / weights[tenant] >= (tokens - 1) / weights[other] - 1e-9


@given(rows, st.integers(9, 80), st.integers(9, 80))
def test_steps_of_several_turns_have_a_smaller_budget(wants: list[Row], budget: int, mixed: int) -> None:
    count = sum(wanted > 0 for wanted, _, _ in wants)
    assert divide(wants, budget, mixed) == divide(wants, min(budget, count + mixed) if count > 1 else budget)


def test_a_short_prefill_is_done_in_one_step_beside_long_ones() -> None:
    assert divide([(500, 0, False), (500, 0, False), (6, 0, False)], 32) == [25, 1, 6]


def test_prefills_of_one_length_end_one_after_another() -> None:
    assert divide([(48, 0, False)] * 16, 1024, mixed=256) == [48] * 5 + [22] + [1] * 10


@given(st.lists(st.integers(2, 500), max_size=7), st.integers(9, 80))
def test_the_prefill_that_waited_longest_gets_a_quarter_however_many_shorter_ones_come(
    others: list[int], budget: int
) -> None:
    counts = divide([(500, 0, False), *((wanted, 0, False) for wanted in others)], budget)
    assert counts[0] - 1 >= min(499, (budget - len(counts)) / 4)


@every_mix
@every_overlap
def test_a_short_turn_beside_a_long_prefill_has_its_first_token_within_two_steps(mix, overlap: int) -> None:
    stage = Stage(mix, overlap=overlap)
    stage.open("long")
    stage.open("short")
    long = stage.say("long", count_from(1, 190), 2)
    stage.step()
    short = stage.say("short", count_from(2, 8), 2)
    stage.until(lambda: short.output, most=2 + overlap)
    assert not long.output


@every_mix
def test_decodes_continue_in_every_step_of_a_long_prefill(mix) -> None:
    stage = Stage(mix)
    for name in ("a", "b", "long"):
        stage.open(name)
    decodes = [stage.say(name, [1], 60) for name in ("a", "b")]
    stage.until(lambda: all(turn.output for turn in decodes))
    long = stage.say("long", count_from(1, 150), 2)
    while not long.output:
        before = [len(turn.output) for turn in decodes]
        stage.step()
        assert [len(turn.output) for turn in decodes] == [count + 1 for count in before]
        assert int(stage.executor.plans[-1].counts.sum()) <= 16


def test_a_draft_gets_the_rest_of_the_budget() -> None:
    stage = Stage()
    stage.open("draft")
    stage.open("turn")
    stage.engine.turns.draft("draft", count_from(1, 150))
    turn = stage.say("turn", count_from(2, 100), 30)
    stage.step()
    by_row = dict(zip(stage.executor.plans[-1].rows.tolist(), stage.executor.plans[-1].counts.tolist(), strict=True))
    assert sorted(by_row.values()) == [1, 15]
    stage.until(lambda: turn.output)
    stage.step()
    assert sorted(stage.executor.plans[-1].counts.tolist()) == [1, 15]  # now the decode takes one


@every_mix
def test_a_proposal_changes_nothing(mix) -> None:
    stage = Stage(mix)
    stage.committed()
    stage.reach("mid-prefill")
    engine = stage.engine
    owners = (engine.memory.rows, *engine.memory.groups)
    before = [{name: a.copy() for name, a in vars(owner).items() if isinstance(a, np.ndarray)} for owner in owners]
    assert all(before)
    touched, news = engine.memory.touched, list(engine.batch._taken)
    first, second = engine._planner.propose(), engine._planner.propose()
    for owner, arrays in zip(owners, before, strict=True):
        for name, array in arrays.items():
            assert (array == getattr(owner, name)).all(), f"proposing moved {name}"
    assert (engine.memory.touched, engine.batch._taken) == (touched, news)
    assert all((getattr(first, n) == getattr(second, n)).all() for n in ("rows", "starts", "counts", "needs"))
    assert first.lacking is None
    assert second.lacking is None


def test_a_proposal_that_no_longer_fits_is_refused_before_any_pool_changes() -> None:
    stage = Stage((FULL, STATE))
    stage.committed()
    stage.reach("mid-prefill")
    engine = stage.engine
    proposal = engine._planner.propose()
    pool = engine.memory.pools[0]
    taken = pool.acquire(pool.free, SimpleNamespace(holder_kind="session", holder_name="thief"))
    touched, scheduled = engine.memory.touched, engine.memory.rows.scheduled.copy()
    with pytest.raises(InvariantError, match="more units of full0 than are free"):
        engine._planner.apply(proposal)
    assert engine.memory.touched == touched
    assert (engine.memory.rows.scheduled == scheduled).all()
    present(taken).release()


@given(prompts=st.lists(st.integers(2, 60), min_size=1, max_size=4), free=st.integers(0, 12))
def test_rows_that_do_not_fit_memory_are_left_out_and_the_shortfall_is_reported(prompts: list[int], free: int) -> None:
    stage = Stage(recount=False, token_budget=64)
    for i, prompt in enumerate(prompts):
        stage.open(f"s{i}")
        stage.say(f"s{i}", count_from(i, prompt), 4)
    engine = stage.engine
    engine._admission.admit()
    whole = engine._planner.propose()
    pool = engine.memory.pools[0]
    pool.acquire(pool.free - free, SimpleNamespace(holder_kind="session", holder_name="others"))
    proposal = engine._planner.propose()
    needs = whole.needs[0].tolist()
    first = next((place for place, n in enumerate(needs) if n and sum(needs[: place + 1]) > free), None)
    assert int(proposal.needs.sum()) <= free
    assert (proposal.lacking is None) == (first is None) == (len(proposal.rows) == len(whole.rows))
    if first is not None:
        lacking = proposal.lacking
        assert lacking is not None
        assert (lacking.turn, lacking.place) == (engine.batch.running()[first], first)
        assert lacking is not None
        assert (lacking.needed.tolist(), lacking.alone.tolist()) == (
            [sum(needs[: first + 1])],
            [needs[first]],
        )
    assert set(proposal.rows) == set(whole.rows[: len(proposal.rows)])  # in running order
