"""The protocol of the witness: steps in flight, late, eager and failed steps, sampling options and scores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.base.errors import InvariantError, StepFailed
from tenuto.base.groups import Kind
from tenuto.base.plan import (
    NO_SLOT,
    PREVIOUS_SAMPLE,
    InputScores,
    RowSampling,
    TableChanges,
)
from tenuto.base.sampling import GREEDY, LEAST_LOGPROB, Candidate, Sampling, TokenLogprob
from tenuto.exec.witness_hashes import history_hash, next_token, next_unmasked, seeded
from tests.exec.witness_bench import FULL, STATE, TOLD, VOCABULARY, Bench, every_kind, ints, paged, said
from tests.present import present


def test_two_steps_may_be_in_flight_but_not_three() -> None:
    bench = Bench(FULL)
    with pytest.raises(InvariantError, match="no step in flight"):
        bench.witness.collect()
    bench.witness.submit(bench.plan((0, 0, [1], 1)))
    bench.witness.submit(bench.plan((0, 1, [PREVIOUS_SAMPLE], 1)))
    with pytest.raises(InvariantError, match="while 2 are in flight"):
        bench.witness.submit(bench.plan((0, 2, [PREVIOUS_SAMPLE], 1)))


@every_kind
@given(late=st.lists(st.booleans(), min_size=6, max_size=6), ahead=st.lists(st.booleans(), min_size=6, max_size=6))
def test_steps_are_computed_and_collected_in_the_order_of_their_submission(kinds, late, ahead) -> None:
    """Each continues from the sample of the previous one, even if some are computed late."""
    answers, bench = iter(late), Bench(*kinds, eager=True)
    bench.witness._late = lambda: next(answers)
    slots: list[int] = [NO_SLOT, 0, 0, 0, 0, 0, 0]
    history, found, outstanding = [5, 6, 7], [], 0
    for step in range(6):
        work = (0, 0, history, 1) if step == 0 else (0, 2 + step, [PREVIOUS_SAMPLE], 1)
        tables = ((0, range(10)),) if step == 0 else ()
        bench.witness.submit(bench.plan(work, tables=tables, reads=slots[step : step + 1], writes=[0]))
        outstanding += 1
        while outstanding > int(ahead[step]):
            found += bench.witness.collect().tokens.tolist()
            outstanding -= 1
    while outstanding:
        found += bench.witness.collect().tokens.tolist()
        outstanding -= 1
    for token in found:
        assert token == said(*history)
        history.append(token)


@paged
@pytest.mark.parametrize("eager", [False, True])
def test_an_eager_step_may_write_a_new_page_while_an_earlier_one_still_reads_it(kind: Kind, eager: bool) -> None:
    bench = Bench(kind, late=lambda: True, eager=eager)
    bench.run((0, 0, [1, 2, 3, 4, 5, 6], 0))
    bench.witness.submit(bench.plan((0, 6, [7], 1)))
    bench.witness.submit(bench.plan((1, 0, [9, 9], 1), tables=((1, [1]),)))  # row 0's page, freed too early
    if eager:
        with pytest.raises(InvariantError, match="never written"):
            bench.witness.collect()
    else:
        assert bench.witness.collect().tokens.tolist() == [said(1, 2, 3, 4, 5, 6, 7)]


def test_an_eager_step_may_write_the_target_of_a_copy_while_an_earlier_one_still_reads_it() -> None:
    bench = Bench(FULL, late=lambda: True, eager=True)
    bench.run((0, 0, [1, 2, 3, 4, 5, 6], 0), (1, 0, [9, 8], 0))
    bench.witness.submit(bench.plan((0, 6, [7], 1)))
    bench.witness.submit(bench.plan((1, 2, [7], 1), tables=((1, [1]),), copies=[(10, 1, 2)]))
    with pytest.raises(InvariantError, match="never written"):
        bench.witness.collect()


def test_an_eager_step_may_write_a_slot_new_to_its_row_while_an_earlier_one_still_reads_it() -> None:
    bench = Bench(STATE, late=lambda: True, eager=True)
    bench.run((0, 0, [1, 2], 0))
    bench.witness.submit(bench.plan((0, 2, [3], 1), reads=[0], writes=[5]))
    bench.witness.submit(bench.plan((1, 0, [9], 1), reads=[NO_SLOT], writes=[0]))
    with pytest.raises(InvariantError, match="state slot 0 is at -1"):
        bench.witness.collect()


def test_the_two_state_slots_of_a_row_alternate_even_if_steps_are_eager() -> None:
    bench = Bench(STATE, late=lambda: True, eager=True)
    bench.run((0, 0, [1, 2], 0))
    bench.witness.submit(bench.plan((0, 2, [3], 1), reads=[0], writes=[5]))
    bench.witness.submit(bench.plan((0, 3, [4], 1), reads=[5], writes=[0]))
    assert bench.witness.collect().tokens.tolist() == [said(1, 2, 3)]
    assert bench.witness.collect().tokens.tolist() == [said(1, 2, 3, 4)]


def test_a_failed_step_may_have_written_everything_and_the_next_one_runs() -> None:
    failing = [True]
    bench = Bench(FULL, fail=lambda: failing.pop() if failing else False)
    with pytest.raises(StepFailed):
        bench.run((0, 0, [1, 2], 1))
    assert bench.run((0, 2, [3], 1), sampling=((0, TOLD),)) == [said(1, 2, 3)]


@pytest.mark.parametrize(("written", "there"), [(0.0, 0), (0.5, 2), (1.0, 4)])
def test_a_failed_step_may_have_written_a_part_or_nothing(written: float, there: int) -> None:
    failing = [True]
    bench = Bench(FULL, fail=lambda: failing.pop() if failing else False, written=lambda: written)
    with pytest.raises(StepFailed):
        bench.run((0, 0, [1, 2, 3, 4], 1))
    if there:
        assert bench.run((0, there, [9], 1), sampling=((0, TOLD),)) == [said(*range(1, there + 1), 9)]
    if there < 4:
        with pytest.raises(InvariantError, match="never written"):
            bench.run((0, there + 2, [9], 1), sampling=((0, TOLD),))


def test_tables_and_options_sent_with_a_failed_step_are_lost() -> None:
    failing = [True]
    bench = Bench(FULL, fail=lambda: failing.pop() if failing else False)
    with pytest.raises(StepFailed):
        bench.run((0, 0, [1, 2], 1))
    with pytest.raises(InvariantError, match="lost in a failed step"):
        bench.run((0, 2, [3], 1), tables=())
    with pytest.raises(InvariantError, match="lost in a failed step"):
        bench.run((0, 0, [1], 1), tables=())
    assert bench.run((0, 2, [3], 1)) != [said(1, 2, 3)]  # its sampling options are lost too


@pytest.mark.parametrize("late", [False, True])
def test_tables_and_options_sent_after_a_failed_step_stay_though_a_step_in_flight_is_void(late: bool) -> None:
    failing = [True]
    bench = Bench(FULL, late=lambda: late, fail=lambda: failing.pop() if failing else False)
    bench.witness.submit(bench.plan((0, 0, [1, 2], 1)))
    bench.witness.submit(bench.plan((0, 2, [3], 1)))
    with pytest.raises(StepFailed):
        bench.witness.collect()
    bench.witness.submit(bench.plan((0, 0, [4], 1), sampling=((0, TOLD),)))
    bench.witness.collect()  # the void one
    assert bench.witness.collect().tokens.tolist() == [said(4)]


@pytest.mark.parametrize("late", [False, True])
def test_a_late_step_uses_its_memory_until_it_is_collected(late: bool) -> None:
    bench = Bench(FULL, late=lambda: late)
    bench.witness.submit(bench.plan((0, 0, [1, 2], 1)))
    written = bench.witness._slots[0][1][0] == 1
    assert written is np.bool_(not late)
    assert bench.witness.collect().tokens.tolist() == [said(1, 2)]


def test_a_plan_without_table_changes_reads_the_known_tables() -> None:
    bench = Bench(FULL)
    bench.run((0, 0, [1, 2], 0))
    plan = replace(bench.plan((0, 2, [3], 1)), tables=(TableChanges(ints(()), ints(()), ints(())),))
    bench.witness.submit(plan)
    assert bench.witness.collect().tokens.tolist() == [said(1, 2, 3)]


def test_masked_tokens_are_not_generated_before_their_position_and_others_are_certain() -> None:
    bench, given = Bench(FULL), [5, 6, 7]
    first = next_token(history_hash(given), VOCABULARY)
    said = (first + 2) % VOCABULARY
    masked = (first, (first + 1) % VOCABULARY)
    assert next_unmasked(history_hash(given), VOCABULARY, masked) == said
    plan = replace(bench.plan((0, 0, given, 1)), sampling=((0, RowSampling(GREEDY, None, None, masked, 4, 3)),))
    bench.witness.submit(plan)
    result = bench.witness.collect()
    assert result.tokens.tolist() == [said]
    assert present(result.sampled).entries(0, [said], 3) == [TokenLogprob(said, 0.0, (Candidate(said, 0.0),))]
    free = next_token(history_hash([*given, said]), VOCABULARY)
    bench.witness.submit(replace(bench.plan((0, 3, [said], 1)), sampling=()))
    assert bench.witness.collect().tokens.tolist() == [free]
    bench.witness.submit(replace(bench.plan((0, 0, given, 1)), sampling=((0, RowSampling(GREEDY)),)))
    plain = bench.witness.collect()
    assert (plain.tokens.tolist(), plain.sampled) == ([first], None)


def test_a_sampling_turns_output_depends_on_its_seed_and_a_greedy_turns_does_not() -> None:
    bench, found = Bench(FULL), {}
    for sampling in (Sampling(), Sampling(seed=7), Sampling(1.0), Sampling(1.0, seed=7), Sampling(1.0, seed=8)):
        plan = replace(bench.plan((0, 0, [5, 6], 1)), sampling=((0, RowSampling(sampling)),))
        bench.witness.submit(plan)
        found[sampling.temperature, sampling.seed] = bench.witness.collect().tokens.tolist()[0]
    assert found[0.0, 0] == found[0.0, 7] == found[1.0, 0] == said(5, 6)
    assert len({found[1.0, seed] for seed in (0, 7, 8)}) == 3
    assert found[1.0, 7] == next_token(seeded(history_hash([5, 6]), 7), VOCABULARY)
    bench.witness.submit(replace(bench.plan((0, 0, [5, 6], 1)), sampling=()))
    assert bench.witness.collect().tokens.tolist() == [found[1.0, 8]], "a row keeps its seed"


def test_an_input_token_is_certain_if_the_witness_would_have_generated_it() -> None:
    bench = Bench(FULL)
    likely = next_token(history_hash([5]), VOCABULARY)
    after = next_token(history_hash([5, likely]), VOCABULARY)
    scores = InputScores(ints([0, 1]), ints([likely, (after + 1) % VOCABULARY]), 2, ((), (after, 7)))
    bench.witness.submit(replace(bench.plan((0, 0, [5, likely, 9], 0)), scores=scores))
    found, targets = present(bench.witness.collect().scored), scores.targets.tolist()
    assert found.entries(0, targets[:1], 1) == [TokenLogprob(likely, 0.0, (Candidate(likely, 0.0),))]
    named = (Candidate(after, 0.0), Candidate(7, LEAST_LOGPROB))
    assert found.entries(1, targets[1:], 1, (after, 7)) == [
        TokenLogprob(targets[1], LEAST_LOGPROB, (Candidate(after, 0.0),), named=named)
    ]


def test_a_witness_row_with_allowed_ids_generates_only_these() -> None:
    bench = Bench(FULL)
    plan = replace(bench.plan((0, 0, [5, 6], 1)), sampling=((0, RowSampling(Sampling(allowed_ids=(40, 70)))),))
    bench.witness.submit(plan)
    assert bench.witness.collect().tokens.tolist() == [(40, 70)[next_token(history_hash([5, 6]), 2)]]
