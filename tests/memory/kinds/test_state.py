"""Recurrent state: a slot holds the state at one position, and a checkpoint's slot is never written."""

from __future__ import annotations

import pytest

from tenuto.base.errors import InvariantError
from tenuto.base.groups import GroupSpec
from tenuto.base.plan import NO_SLOT
from tenuto.memory.kinds.state import StateGroup
from tenuto.memory.pool import Pool
from tests.memory.scribe import FULL, STATE, Scribe, Someone, make_table
from tests.present import present


def test_starting_a_turn_copies_nothing_and_reads_the_sessions_slot() -> None:
    scribe = Scribe([STATE])
    script = scribe.committed(9)
    kept = present(script.memory.checkpoints[-1].parts[0]).units[0]
    writing = scribe.open(script)
    row = writing.memory.row
    (group,) = scribe.memory.groups
    assert isinstance(group, StateGroup)
    assert group.current[row] == kept
    assert group.alternate[row] not in (kept, NO_SLOT)


def test_an_aborted_turn_leaves_the_session_its_own_slot() -> None:
    """Known faults: a turn that aborts frees or overwrites its session's state slot."""
    scribe = Scribe([FULL, STATE])
    script = scribe.committed(9)
    kept = present(script.memory.checkpoints[-1].parts[1]).units[0]
    for _ in range(3):
        scribe.compute(scribe.open(script), 5)
        scribe.abort(script)
        assert present(script.memory.checkpoints[-1].parts[1]).units[0] == kept
        scribe.audit()


def test_a_turn_that_never_ran_releases_only_its_own_slots() -> None:
    """Known fault: a turn that did not fit the batch frees its session's state slot, and it is freed again later."""
    scribe = Scribe([STATE])
    script = scribe.committed(9)
    free = scribe.free()
    scribe.open(script)
    scribe.abort(script)
    assert scribe.free() == free
    script.memory.drop()
    assert scribe.free() == [80]


def test_a_commit_leaves_one_slot_and_a_checkpoint_before_it() -> None:
    scribe = Scribe([STATE])
    script = scribe.committed(9)
    scribe.compute(scribe.open(script), 5)
    scribe.commit(script, 14)
    assert [checkpoint.position for checkpoint in script.memory.checkpoints] == [8, 13]
    assert scribe.free() == [78]
    scribe.memory.cache.evict()
    assert scribe.free() == [79]
    scribe.audit()


def test_a_barge_in_on_a_turn_that_started_further_back_keeps_the_sessions_position() -> None:
    """Known fault: a regenerated turn that had lost its memory and just restarted took the session's position with
    it."""
    scribe = Scribe([FULL, STATE])
    script = scribe.committed(9)
    scribe.open(script, base=9, target=4)
    scribe.commit(script, 10)
    assert script.memory.computed == 8
    scribe.audit()


def test_a_state_is_resumable_only_at_the_position_of_a_slot() -> None:
    scribe = Scribe([FULL, STATE])
    script = scribe.session()
    writing = scribe.open(script)
    for _ in range(3):
        scribe.compute(writing, 5)
        assert scribe.mark(writing)
    scribe.compute(writing, 2)
    scribe.commit(script, 18)
    assert [script.memory.resumable(target) for target in (17, 16, 15, 14, 9, 4)] == [17, 15, 15, 10, 5, 0]


def test_a_turn_continues_past_its_checkpoint_in_another_slot() -> None:
    scribe = Scribe([STATE])
    script = scribe.session()
    writing = scribe.open(script)
    scribe.compute(writing, 5)
    scribe.mark(writing)
    for _ in range(4):
        scribe.compute(writing, 1)
    scribe.commit(script, 6)  # a barge-in that keeps nothing after the checkpoint
    assert script.memory.computed == 5
    scribe.audit()


def test_a_row_without_a_slot_besides_its_checkpoint_is_stopped_before_it_writes() -> None:
    scribe = Scribe([STATE])
    script = scribe.session()
    writing = scribe.open(script)
    scribe.compute(writing, 5)
    writing.memory.mark(5)
    (group,) = scribe.memory.groups
    assert isinstance(group, StateGroup)
    group.alternate[writing.memory.row] = NO_SLOT
    with pytest.raises(InvariantError, match="would write a state slot that a checkpoint holds"):
        scribe.compute(writing, 1)


def test_with_two_buffers_the_state_before_the_last_step_is_kept() -> None:
    scribe = Scribe([STATE], overlap=True)
    script = scribe.committed(6)
    writing = scribe.open(script)
    scribe.compute(writing, 2)
    scribe.compute(writing, 1)
    assert writing.memory.cut_to(8) == 8
    assert writing.memory.cut_to(7) == 7
    assert writing.memory.cut_to(6) == 5  # the session's own slot
    scribe.redraft(writing, 7)
    scribe.compute(writing, 3)
    scribe.commit(script, 11)
    scribe.audit()


@pytest.mark.parametrize("overlap", [False, True], ids=["in place", "overlapped"])
def test_a_turn_with_guesses_needs_no_further_slot_and_stands_where_its_last_step_began(overlap: bool) -> None:
    scribe = Scribe([FULL, STATE], overlap=overlap, lookahead=3)
    script = scribe.committed(6)
    writing = scribe.open(script)
    scribe.compute(writing, 2)  # up to 7
    free = scribe.free()
    scribe.compute(writing, 4, accepted=2)
    scribe.compute(writing, 4, accepted=4)
    scribe.compute(writing, 3, accepted=1)
    assert scribe.free()[1] == free[1]
    assert writing.computed == 14
    assert [writing.memory.cut_to(target) for target in (14, 13, 12)] == [13, 13, 9 if overlap else 5]
    scribe.commit(script, 15)
    assert script.memory.computed == 13
    scribe.audit()


def test_a_step_without_guesses_writes_the_state_at_its_end() -> None:
    scribe = Scribe([STATE], lookahead=3)
    script = scribe.committed(6)
    writing = scribe.open(script)
    scribe.compute(writing, 4, accepted=3)
    scribe.compute(writing, 1)
    assert writing.memory.cut_to(9) == 9
    scribe.commit(script, 10)
    assert script.memory.computed == 9
    scribe.audit()


def test_the_slot_of_a_checkpoint_is_not_written_by_a_step_with_guesses() -> None:
    scribe = Scribe([FULL, STATE], lookahead=3)
    script = scribe.session()
    writing = scribe.open(script)
    scribe.compute(writing, 5)
    scribe.mark(writing)
    scribe.compute(writing, 4, accepted=1)
    scribe.compute(writing, 2, accepted=2)
    assert [writing.memory.cut_to(target) for target in (8, 7, 6, 5)] == [6, 6, 6, 5]
    scribe.redraft(writing, 5)
    scribe.compute(writing, 3)
    scribe.commit(script, 9)
    scribe.audit()


def test_a_state_that_a_step_with_guesses_is_still_to_write_cannot_be_kept() -> None:
    scribe = Scribe([STATE], lookahead=3)
    writing = scribe.open(scribe.committed(6))
    scribe.compute(writing, 4, accepted=3)
    rows, row = scribe.memory.rows, writing.memory.row
    assert writing.memory.cut_to(8) == 5 == writing.memory.start
    scribe.compute(writing, 4, accepted=3)
    assert writing.memory.cut_to(11) == 8
    rows.uncertain[row] = True  # as while the step is in flight, which may fail
    assert writing.memory.cut_to(11) == 5


def test_a_fork_shares_the_state_slot_and_both_continue() -> None:
    scribe = Scribe([STATE])
    parent = scribe.committed(9)
    child = scribe.fork(parent)
    assert scribe.memory.pools[0].leased == 1
    for script in (parent, child):
        scribe.compute(scribe.open(script), 3)
        scribe.commit(script, 12)
    assert parent.history != child.history
    scribe.audit()


def test_a_table_has_one_open_turn() -> None:
    pool = Pool("state0", 4)
    table = make_table(GroupSpec(STATE, 1), pool)
    with pytest.raises(InvariantError, match="no turn is open"):
        table.extend(present(pool.acquire(1, Someone("turn 0"))))
    table.begin(present(pool.acquire(1, Someone("turn 1"))), 0, None, at_end=True)
    with pytest.raises(InvariantError, match="turn 2 begins on a table on which another turn is open"):
        table.begin(present(pool.acquire(1, Someone("turn 2"))), 0, None, at_end=True)
