"""Sliding attention: a position is resumable while the pages of its window are held."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.base.groups import GroupSpec
from tenuto.memory.kinds.sliding import SlidingTable, window_pages
from tenuto.memory.memory import session_units
from tenuto.memory.pool import Pool
from tests.memory.scribe import FULL, SLIDING, Scribe, make_table

PAGE, WINDOW = 4, 6  # of every scribe here

sizes = {"position": st.integers(0, 400), "page_size": st.integers(1, 20), "window": st.integers(2, 50)}


def make_sliding(page_size: int, window: int) -> SlidingTable:
    table = make_table(GroupSpec(SLIDING, 1, window), Pool("sliding0", 1), page_size)
    assert isinstance(table, SlidingTable)
    return table


@given(**sizes)
def test_a_window_covers_the_pages_of_the_tokens_that_the_next_one_attends_to(
    position: int, page_size: int, window: int
) -> None:
    table = make_sliding(page_size, window)
    pages = {p // page_size for p in range(max(0, position - window + 1), position)}
    first = table.first_entry(position)
    assert set(range(first, first + table.span(position))) >= pages
    assert table.span(position) <= len(pages) + 1
    assert table.span(position) <= window_pages(GroupSpec(SLIDING, 1, window), page_size)


@given(**sizes)
def test_the_unit_count_of_an_idle_session_covers_its_window(position: int, page_size: int, window: int) -> None:
    table = make_sliding(page_size, window)
    assert table.span(position) <= session_units(GroupSpec(SLIDING, 1, window), page_size, position)


@given(**sizes)
def test_later_windows_never_begin_before_earlier_ones(position: int, page_size: int, window: int) -> None:
    table = make_sliding(page_size, window)
    assert table.first_entry(position) <= table.first_entry(position + 1)


@pytest.mark.parametrize("chunk", [1, 3, 4, 8])
def test_a_long_turn_holds_at_most_a_window_and_its_last_chunk(chunk: int) -> None:
    scribe = Scribe([SLIDING], units=30)
    writing = scribe.open(scribe.session())
    most = window_pages(GroupSpec(SLIDING, 1, WINDOW), PAGE) + 1 + chunk // PAGE
    for _ in range(100 // chunk):
        scribe.compute(writing, chunk)
        assert scribe.memory.pools[0].leased <= most
        scribe.audit()


def test_the_sessions_window_is_kept_while_a_turn_moves_past_it() -> None:
    """Known fault: a source evicted between match and use."""
    scribe = Scribe([SLIDING])
    script = scribe.committed(12)
    scribe.compute(scribe.open(script), 30)
    scribe.audit()
    scribe.abort(script)
    scribe.compute(scribe.open(script), 3)
    scribe.commit(script, 15)
    scribe.audit()


def test_a_turn_is_expected_to_grow_up_to_two_windows() -> None:
    """Known fault: growth was expected to be zero, so a preempted turn restarted again and again with room only for its
    tokens."""
    (group,) = Scribe([SLIDING]).memory.groups
    lengths, ends = np.array([5, 9, 40]), np.array([9, 100, 80])
    assert group.expected_growth(lengths, ends) == 1 + (2 * window_pages(group.spec, PAGE) - 3)


def test_a_commit_keeps_the_last_window_and_frees_the_rest() -> None:
    scribe = Scribe([SLIDING])
    script = scribe.committed(12)
    scribe.compute(scribe.open(script), 30)
    scribe.commit(script, 42)
    (table,) = script.memory.tables
    assert isinstance(table, SlidingTable)
    scribe.memory.cache.evict()  # which only saves work
    while scribe.memory.cache.evict():
        pass
    assert scribe.memory.pools[0].leased == table.span(41)


def test_a_position_is_resumable_while_its_window_is_held() -> None:
    scribe = Scribe([FULL, SLIDING])
    script = scribe.committed(31)  # 30 computed; its window is 25 .. 29 in pages 6 and 7
    assert script.memory.resumable(30) == 30
    assert script.memory.resumable(29) == 29  # attends to 24 .. 28
    assert script.memory.resumable(28) == 0  # would attend to 23, in a page that was freed


def test_a_rewind_to_an_older_checkpoint_resumes_there() -> None:
    scribe = Scribe([FULL, SLIDING])
    script = scribe.session()
    writing = scribe.open(script)
    scribe.compute(writing, 10)
    scribe.mark(writing)
    scribe.compute(writing, 20)
    scribe.commit(script, 31)
    scribe.rewind(script, 20)
    assert script.memory.computed == 10
    scribe.compute(scribe.open(script), 9)
    scribe.commit(script, 20)
    scribe.audit()


def test_a_fork_copies_the_used_slots_of_the_windows_last_page_and_its_parent_continues_in_place() -> None:
    scribe = Scribe([SLIDING])
    parent = scribe.committed(12)
    child = scribe.fork(parent)
    scribe.compute(scribe.open(parent), 1)
    assert scribe.copies == []
    scribe.compute(scribe.open(child), 1)
    assert scribe.copies == [(0, 3)]
    scribe.commit(parent, 13)
    scribe.commit(child, 13)
    scribe.audit()


def test_a_session_cut_below_the_slots_its_fork_reads_copies_the_page() -> None:
    scribe = Scribe([SLIDING])
    parent = scribe.committed(12)
    scribe.fork(parent)
    scribe.rewind(parent, 11)
    assert parent.memory.computed == 10
    scribe.compute(scribe.open(parent), 2)
    assert scribe.copies == [(0, 2)]
    scribe.audit()


def test_aborting_a_fork_leaves_the_window_pages_to_the_parent() -> None:
    scribe = Scribe([SLIDING])
    parent = scribe.committed(12)
    free = scribe.free()
    child = scribe.fork(parent)
    scribe.compute(scribe.open(child), 9)
    scribe.abort(child)
    child.memory.drop()
    assert scribe.free() == free
    scribe.audit()
