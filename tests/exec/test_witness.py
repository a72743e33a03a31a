"""The witness's output follows from the history, and it catches every wrong page, slot and write in the step where it
happens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.base.errors import InvariantError
from tenuto.base.groups import GroupSpec, Kind
from tenuto.base.plan import (
    NO_SLOT,
    PREVIOUS_SAMPLE,
)
from tenuto.exec import witness as module
from tenuto.exec import witness_hashes
from tenuto.exec.witness import WitnessExecutor
from tenuto.exec.witness_hashes import advance, history_hash
from tests.exec.witness_bench import FULL, PAGE, PAGES, SLIDING, STATE, VOCABULARY, Bench, every_kind, ints, paged, said


@every_kind
@given(tokens=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30), data=st.data())
def test_the_next_token_depends_on_the_whole_history_and_not_on_how_it_was_cut(kinds, tokens, data) -> None:
    bench, at, found = Bench(*kinds), 0, []
    while at < len(tokens):
        count = data.draw(st.integers(1, len(tokens) - at))
        found = bench.run((0, at, tokens[at : at + count], 1))
        at += count
    assert found == [said(*tokens)]


@every_kind
def test_rows_of_one_step_do_not_mix(kinds) -> None:
    bench = Bench(*kinds)
    assert bench.run((0, 0, [1, 2, 3], 1), (1, 0, [7], 1)) == [said(1, 2, 3), said(7)]
    assert bench.run((1, 1, [8, 9], 2), (0, 3, [4], 0)) == [said(7, 8), said(7, 8, 9)]


@every_kind
def test_a_token_not_yet_known_is_the_one_the_row_sampled_last(kinds) -> None:
    bench = Bench(*kinds)
    first = bench.run((0, 0, [1, 2, 3], 1))[0]
    assert bench.run((0, 3, [PREVIOUS_SAMPLE], 1)) == [said(1, 2, 3, first)]


def test_hashes_advance_one_token_at_a_time() -> None:
    assert history_hash([1, 2, 3]) == advance(advance(advance(history_hash([]), 1), 2), 3)
    assert len({history_hash(list(h)) for h in ((), (0,), (0, 0), (1,), (0, 1), (1, 0))}) == 6


def test_a_page_copied_before_the_step_can_be_read_and_continued() -> None:
    bench = Bench(FULL)
    bench.run((0, 0, [1, 2, 3, 4, 5, 6], 0))
    tables = ((1, [0, 30]),)
    found = bench.run((1, 6, [9], 1), (0, 6, [7], 1), tables=tables, copies=[(1, 30, 2)])
    assert found == [said(1, 2, 3, 4, 5, 6, 9), said(1, 2, 3, 4, 5, 6, 7)]


# -- the mistakes it catches


@paged
def test_a_wrong_page_is_caught(kind: Kind) -> None:
    bench = Bench(kind)
    bench.run((0, 0, [1, 2, 3, 4, 5, 6, 7, 8], 0), (1, 0, [9, 8, 7, 6, 5, 4, 3, 2], 0))
    with pytest.raises(InvariantError, match="row 0 computing from 8 reads a hash at position 4 that does not follow"):
        bench.run((0, 8, [9], 1), tables=((0, [0, 11]),))


@paged
def test_two_pages_in_the_wrong_order_are_caught(kind: Kind) -> None:
    bench = Bench(kind)
    bench.run((0, 0, list(range(12)), 0))
    with pytest.raises(InvariantError, match="that does not follow"):
        bench.run((0, 12, [9], 1), tables=((0, [0, 2, 1]),))


@paged
def test_a_stale_page_of_the_same_sequence_is_caught(kind: Kind) -> None:
    bench = Bench(kind)
    bench.run((0, 0, [1, 2, 3, 4, 5, 6, 7], 0))
    bench.run((0, 4, [50, 60], 0))  # rewound and continued differently: position 6 now belongs to another history
    with pytest.raises(InvariantError, match="reads a hash at position 6 that does not follow"):
        bench.run((0, 7, [8], 1))


@paged
def test_a_slot_that_was_never_written_is_caught(kind: Kind) -> None:
    bench = Bench(kind)
    bench.run((0, 0, [1, 2, 3, 4], 0))
    with pytest.raises(InvariantError, match=f"{kind.value}: a row reads a slot that was never written"):
        bench.run((0, 6, [7], 1))


@paged
def test_a_page_overwritten_by_another_row_is_caught_when_it_is_next_read(kind: Kind) -> None:
    bench = Bench(kind)
    bench.run((0, 0, [1, 2, 3, 4, 5, 6], 0))
    bench.run((1, 0, [7, 7, 7, 7, 7, 7, 7], 0), tables=((1, [20, 1]),))
    with pytest.raises(InvariantError, match="row 0 computing from 6 reads a hash at position 4"):
        bench.run((0, 6, [7], 1))


@paged
def test_two_rows_that_write_one_slot_are_caught(kind: Kind) -> None:
    bench = Bench(kind)
    with pytest.raises(InvariantError, match="two rows write the same slot"):
        bench.run((0, 0, [1], 0), (1, 0, [2], 0), tables=((0, [3]), (1, [3])))


@paged
def test_a_forgotten_or_short_page_copy_is_caught(kind: Kind) -> None:
    for copies in ([], [(1, 30, 1)]):
        bench = Bench(kind)
        bench.run((0, 0, [1, 2, 3, 4, 5, 6], 0))
        with pytest.raises(InvariantError, match="never written"):
            bench.run((1, 6, [9], 1), tables=((1, [0, 30]),), copies=copies)


@paged
def test_a_write_into_a_page_another_reads_is_caught_at_that_read(kind: Kind) -> None:
    bench = Bench(kind)
    bench.run((0, 0, [1, 2, 3, 4, 5, 6, 7], 0))
    bench.run((1, 5, [9], 0), tables=((1, [0, 1]),))  # it wrote without the right to the tail
    with pytest.raises(InvariantError, match="row 0 computing from 7 reads a hash at position 6 that does not follow"):
        bench.run((0, 7, [8], 1), tables=((0, [0, 1]),))


@paged
def test_a_last_slot_overwritten_by_another_row_shows_in_the_token(kind: Kind) -> None:
    bench = Bench(kind)
    bench.run((0, 0, [1, 2, 3, 4, 5, 6], 0))
    bench.run((1, 5, [9], 0), tables=((1, [0, 1]),))  # the overwritten slot follows from the same beginning
    assert bench.run((0, 6, [7], 1), tables=((0, [0, 1]),)) == [said(1, 2, 3, 4, 5, 9, 7)]


def test_a_wrong_state_slot_is_caught_by_its_position() -> None:
    bench = Bench(STATE)
    bench.run((0, 0, [1, 2, 3], 0), (1, 0, [1, 2], 0))
    with pytest.raises(InvariantError, match="state slot 1 is at 2, but its row computes from 3"):
        bench.run((0, 3, [4], 1), reads=[1])


def test_a_state_slot_of_another_history_at_the_same_position_is_caught_if_pages_disagree() -> None:
    bench = Bench(FULL, STATE)
    bench.run((0, 0, [1, 2, 3], 0), (1, 0, [3, 2, 1], 0))
    with pytest.raises(InvariantError, match=r"memory groups disagree on the history of rows \[0\]"):
        bench.run((0, 3, [4], 1), reads=[1])


def test_a_wrong_state_slot_without_pages_shows_in_the_token() -> None:
    bench = Bench(STATE)
    bench.run((0, 0, [1, 2, 3], 0), (1, 0, [3, 2, 1], 0))
    assert bench.run((0, 3, [4], 1), reads=[1]) == [said(3, 2, 1, 4)] != [said(1, 2, 3, 4)]


def test_an_overwritten_state_slot_is_caught() -> None:
    bench = Bench(STATE)
    bench.run((0, 0, [1, 2, 3], 0))
    bench.run((1, 0, [7], 0), writes=[0])
    with pytest.raises(InvariantError, match="state slot 0 is at 1, but its row computes from 3"):
        bench.run((0, 3, [4], 1))


def test_a_zero_state_in_the_middle_of_a_history_is_caught() -> None:
    bench = Bench(STATE)
    bench.run((0, 0, [1, 2, 3], 0))
    with pytest.raises(InvariantError, match="zero state in the middle"):
        bench.run((0, 3, [4], 1), reads=[NO_SLOT])


def test_two_rows_that_write_one_state_slot_are_caught() -> None:
    bench = Bench(STATE)
    with pytest.raises(InvariantError, match="two rows write the same state slot"):
        bench.run((0, 0, [1], 0), (1, 0, [2], 0), writes=[5, 5])


# -- kept inputs


def guessed(*kinds: Kind) -> Bench:
    """Returns a bench whose row 0 stands at 3 and has computed three more tokens, of which two were guesses."""
    bench = Bench(*kinds)
    bench.run((0, 0, [1, 2, 3], 1))
    assert bench.run((0, 3, [4, 5, 6], 3), keeps=[1]) == [said(1, 2, 3, 4), said(1, 2, 3, 4, 5), said(1, 2, 3, 4, 5, 6)]
    return bench


mixed = pytest.mark.parametrize("kinds", [(STATE,), (FULL, STATE), (SLIDING, STATE, STATE)], ids=str)


@mixed
@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_a_row_goes_on_from_the_inputs_that_were_accepted(kinds, accepted: int) -> None:
    bench, at = guessed(*kinds), 3 + accepted
    history = [1, 2, 3, 4, 5, 6][:at]
    assert bench.run((0, at, [7, 8], 2), absorbs=[accepted], keeps=[1])[0] == said(*history, 7)
    assert bench.run((0, at + 1, [9], 1), absorbs=[1]) == [said(*history, 7, 9)]
    assert bench.run((0, at + 2, [10], 1)) == [said(*history, 7, 9, 10)], "the state was written at its end"


@pytest.mark.parametrize("absorbs", [0, 1, 3])
def test_a_wrong_number_of_absorbed_inputs_is_caught(absorbs: int) -> None:
    """Also one too many: that of a rejected guess."""
    with pytest.raises(InvariantError, match=r"state slot 0 is at 3.*, but its row computes from 5"):
        guessed(FULL, STATE).run((0, 5, [7], 1), absorbs=[absorbs])


def test_inputs_absorbed_twice_are_caught() -> None:
    bench = guessed(STATE)
    bench.run((0, 5, [7], 1), absorbs=[2])
    with pytest.raises(InvariantError, match="state slot 0 is at 6 and absorbs 2 inputs, but its row computes from 6"):
        bench.run((0, 6, [8], 1), absorbs=[2])


def test_inputs_that_a_later_step_replaced_are_caught() -> None:
    bench = guessed(STATE)
    bench.run((0, 4, [50, 60], 2), absorbs=[1], keeps=[1], writes=[7])
    with pytest.raises(InvariantError, match="row 0 absorbs 2 inputs from position 3 on; kept: 2 from 4 on"):
        bench.run((0, 5, [7], 1), absorbs=[2])


def test_inputs_of_the_rows_former_sequence_are_caught() -> None:
    bench = guessed(STATE)
    bench.run((1, 0, [3, 2, 1], 0))
    with pytest.raises(InvariantError, match="row 0 absorbs the input of another history at position 3"):
        bench.run((0, 5, [7], 1), reads=[1], absorbs=[2])


def test_inputs_of_a_rejected_guess_are_caught_by_the_pages() -> None:
    bench = guessed(FULL, STATE)
    bench.run((0, 4, [9], 1), absorbs=[1], writes=[7])  # 5 was rejected
    with pytest.raises(InvariantError, match=r"memory groups disagree on the history of rows \[0\]"):
        bench.run((0, 5, [7], 1), absorbs=[2])


def test_a_state_from_which_inputs_were_kept_is_the_one_before_them() -> None:
    with pytest.raises(InvariantError, match="state slot 0 is at 3, but its row computes from 6"):
        guessed(STATE).run((0, 6, [7], 1))


def test_a_wrong_token_or_hash_is_caught_by_the_next_token() -> None:
    """In a page with the right hash and the wrong token, or the reverse, the two do not match."""
    for which in (0, 1):
        bench = Bench(FULL)
        bench.run((0, 0, [1, 2, 3], 0))
        bench.witness._slots[0][which][1] += 1
        with pytest.raises(InvariantError, match="reads a hash at position 1 that does not follow"):
            bench.run((0, 3, [4], 1))


@given(unit=st.integers(0, 2 * PAGE - 1), flip=st.integers(0, 63))
def test_any_flipped_bit_that_a_row_reads_is_caught(unit: int, flip: int) -> None:
    bench = Bench(FULL)
    bench.run((0, 0, list(range(2 * PAGE)), 0))
    bench.witness._slots[0][0][unit] ^= np.uint64(1 << flip)
    with pytest.raises(InvariantError, match="that does not follow"):
        bench.run((0, 2 * PAGE, [4], 1))


def test_pages_before_the_window_are_not_read() -> None:
    bench = Bench(SLIDING)
    bench.run((0, 0, list(range(12)), 0))
    bench.witness._slots[0][0][:4] = 0  # the first page was reused elsewhere
    assert bench.run((0, 12, [12], 1)) == [said(*range(13))]


def test_a_window_of_one_token_cannot_be_witnessed() -> None:
    witness = WitnessExecutor(PAGE, [GroupSpec(SLIDING, 1, 1)], VOCABULARY)
    witness.prepare((PAGES,), 4)
    bench = Bench(SLIDING)
    bench.witness = witness
    bench.run((0, 0, [1, 2], 0))
    with pytest.raises(InvariantError, match="use at least two"):
        bench.run((0, 2, [3], 1))


@paged
def test_each_row_reads_only_its_own_history_beside_a_far_longer_one(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, shorts = 500, 16
    long = pages * PAGE - 2
    witness = WitnessExecutor(PAGE, [GroupSpec(kind, 1, 2 * long if kind is SLIDING else 0)], VOCABULARY)
    witness.prepare((pages + 2 * shorts,), 1 + shorts)
    bench = Bench(kind)
    bench.witness = witness
    tables = [(0, range(pages)), *((row, (pages + 2 * row - 2, pages + 2 * row - 1)) for row in range(1, 1 + shorts))]
    histories = [[7] * long, *([row] * 5 for row in range(1, 1 + shorts))]
    bench.run(*((row, 0, tokens, 0) for row, tokens in enumerate(histories)), tables=tables)
    read: list[int] = []

    def advance_and_count(states, tokens, weights, real=witness_hashes.advance_all):
        read.append(states.size)
        return real(states, tokens, weights)

    for each in (module, witness_hashes):
        monkeypatch.setattr(each, "advance_all", advance_and_count)
    found = bench.run(*((row, len(tokens), [3], 1) for row, tokens in enumerate(histories)), tables=())
    assert found == [said(*tokens, 3) for tokens in histories]
    new = 1 + shorts
    assert sum(read) == pages * PAGE + shorts * 2 * PAGE + new, "whole pages of each history, and the new tokens"
    bench.witness._slots[0][0][(pages + 1) * PAGE - 3] ^= np.uint64(1)
    with pytest.raises(InvariantError, match="row 1 computing from 6 reads a hash at position 1 that does not follow"):
        bench.run((0, long + 1, [3], 0), (1, 6, [3], 0), tables=())


def test_without_verification_only_the_previous_slot_is_read() -> None:
    bench = Bench(FULL, verify=False)
    bench.run((0, 0, [1, 2, 3, 4, 5], 0))
    bench.witness._slots[0][0][1] += np.uint64(1)
    assert bench.run((0, 5, [6], 1)) == [said(1, 2, 3, 4, 5, 6)]


@paged
@pytest.mark.parametrize("known", [9, 7], ids=["all", "but the last, which is in flight"])
def test_a_consistent_page_of_another_history_is_named_with_its_token(kind: Kind, known: int) -> None:
    bench = Bench(kind)
    mine, others = list(range(100, 109)), [*range(100, 106), 900, 901, 902]
    bench.run((0, 0, mine, 1))
    bench.run((0, 6, others[6:], 1))  # another sequence continues in the page as its own
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.witness, "histories", lambda plan: [ints(mine[:known])])
        with pytest.raises(
            InvariantError, match="reads token 900 at position 6, slot 2 of page 1; its history has 106"
        ):
            bench.run((0, 9, [5], 1))
        patch.setattr(bench.witness, "histories", lambda plan: [ints(others[:known])])
        bench.run((0, 9, [5], 1))
