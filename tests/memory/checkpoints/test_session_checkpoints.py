"""Checkpoints of sessions: their ends, the sources of turns, and forks."""

from __future__ import annotations

import pytest

from tenuto.base.groups import Kind
from tenuto.memory.kinds.full import FullTable
from tenuto.memory.pool import Holder, Lease
from tests.memory.checkpoints.test_checkpoint import positions
from tests.memory.scribe import FULL, SLIDING, STATE, Scribe, Script


@pytest.mark.parametrize("mix", [[SLIDING], [STATE], [FULL, SLIDING, STATE]], ids=str)
def test_the_checkpoint_at_a_sessions_end_is_never_evicted(mix) -> None:
    scribe = Scribe(mix)
    script = scribe.committed(9)
    scribe.compute(scribe.open(script), 20)
    scribe.commit(script, 30)
    while scribe.memory.cache.evict():
        scribe.audit()
    assert script.memory.computed == 28
    assert positions(script.memory.checkpoints) == [28]


def test_the_source_of_a_running_turn_is_not_evicted() -> None:
    """Known fault: a source evicted between match and use."""
    scribe = Scribe([FULL, STATE])
    script = scribe.committed(9)
    scribe.compute(scribe.open(script), 20)
    scribe.commit(script, 30)
    writing = scribe.open(script, base=9)  # regenerates from the checkpoint at 8
    assert writing.memory.start == 8
    while scribe.memory.cache.evict():
        pass
    scribe.compute(writing, 4)
    scribe.abort(script)
    scribe.audit()
    assert scribe.memory.cache.evict()
    assert positions(script.memory.checkpoints) == [28]


def marked(scribe: Scribe, checkpoints: int) -> Script:
    """Makes a session with this many older checkpoints."""
    script = scribe.session()
    writing = scribe.open(script)
    for _ in range(checkpoints):
        scribe.compute(writing, 2)
        assert scribe.mark(writing)
    scribe.compute(writing, 2)
    scribe.commit(script, 2 * checkpoints + 3)
    assert len(script.memory.checkpoints) == checkpoints + 1
    return script


def test_forks_share_their_parents_checkpoints_without_further_leases_or_units() -> None:
    scribe = Scribe([STATE])
    parent = marked(scribe, 5)
    free, touched = scribe.free(), scribe.memory.touched
    children = [scribe.fork(parent) for _ in range(3)]
    assert (scribe.free(), scribe.memory.touched) == (free, touched)
    assert len(scribe.memory.cache) == 5
    for child in children:
        assert list(child.memory.checkpoints) == list(parent.memory.checkpoints)
    assert scribe.audit().leases == 6
    parent.memory.drop()
    scribe.audit()
    for child in children:
        assert len(child.memory.checkpoints) == 6
        child.memory.drop()
    assert scribe.free() == [80]


def test_forks_do_not_make_the_cache_evict_checkpoints_of_others() -> None:
    """Known fault: each fork counted its parent's checkpoints once more."""
    scribe = Scribe([FULL, STATE], checkpoint_share=0.25)  # 20 slots
    other, parent = marked(scribe, 5), marked(scribe, 10)
    for _ in range(8):
        scribe.fork(parent)
        scribe.memory.cache.trim()
    assert scribe.memory.cache.evicted == 0
    assert len(other.memory.checkpoints) == 6


def work_of_a_fork(checkpoints: int) -> int:
    """Counts the units whose counts change in a fork of a session with this many checkpoints."""
    scribe = Scribe([SLIDING, STATE], units=3 * checkpoints + 80, context_length=4 * checkpoints + 80)
    parent = marked(scribe, checkpoints)
    before = scribe.memory.touched
    scribe.fork(parent)
    return scribe.memory.touched - before


def test_a_fork_touches_no_units_of_its_parents_checkpoints() -> None:
    assert work_of_a_fork(10) == work_of_a_fork(1000) == 0


def test_a_fork_at_an_older_checkpoint_protects_it_from_eviction() -> None:
    scribe = Scribe([FULL, STATE])
    parent = marked(scribe, 3)
    child = scribe.fork(parent, 5)
    assert child.memory.computed == 4
    while scribe.memory.cache.evict():
        scribe.audit()
    assert positions(parent.memory.checkpoints) == [4, 8]
    assert positions(child.memory.checkpoints) == [4]
    child.memory.drop()
    assert scribe.memory.cache.evict()
    assert positions(parent.memory.checkpoints) == [8]
    scribe.audit()


def keep_pages(table: FullTable, position: int, holder: Holder) -> Lease:
    """Returns a second lease on all pages below `position`."""
    pages = -(-position // table.page_size)
    lease = table.base.share(0, min(pages, table.first), holder)
    lease.absorb(table.opened.share(0, pages - len(lease), holder))
    return lease


@pytest.mark.parametrize("other", [SLIDING, STATE])
def test_a_checkpoint_may_also_hold_pages_of_full_attention(other: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FullTable, "keep", keep_pages)
    scribe = Scribe([FULL, other])
    free = scribe.free()
    parent = marked(scribe, 3)
    child = scribe.fork(parent)
    scribe.audit()
    kept = [len(checkpoint.parts[0] or ()) for checkpoint in parent.memory.checkpoints]
    assert kept == [-(-checkpoint.position // 4) for checkpoint in parent.memory.checkpoints]
    scribe.rewind(parent, len(parent.history) - 1)  # with a sliding window, part of the last checkpoint covers it
    scribe.compute(scribe.open(child), 3)
    scribe.abort(child)
    scribe.audit()
    assert scribe.memory.cache.reclaimable(0) == 0  # the sessions hold the same pages
    for script in (parent, child):
        script.memory.drop()
    scribe.audit()
    assert scribe.free() == free
