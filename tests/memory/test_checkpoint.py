"""The cache of checkpoints that only save work: its budget, and who goes first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.memory.checkpoint import Checkpoint, CheckpointCache
from tenuto.memory.pool import Pool
from tests.memory.scribe import FULL, SLIDING, STATE, Scribe, Someone


class Shelf:
    """A cache over two groups, and the checkpoints of one owner."""

    def __init__(self, budget: tuple[int, int] = (100, 100)) -> None:
        self.pools = [Pool("sliding0", 200), Pool("state1", 200)]
        self.cache = CheckpointCache(self.pools, budget)
        self.home: list[Checkpoint] = []

    def add(self, position: int, pages: int = 1, slots: int = 1) -> Checkpoint:
        made = Checkpoint(position, Someone("session s"), self.home)
        made.parts.extend(pool.acquire(n, made) for pool, n in zip(self.pools, (pages, slots), strict=True))
        self.home.append(made)
        self.cache.add(made)
        return made


def test_the_oldest_goes_first_whatever_its_position() -> None:
    shelf = Shelf()
    for position in (30, 10, 20):
        shelf.add(position)
    assert shelf.cache.evict()
    assert [checkpoint.position for checkpoint in shelf.home] == [10, 20]
    assert shelf.cache.evict()
    assert [checkpoint.position for checkpoint in shelf.home] == [20]


def test_an_evicted_checkpoint_leaves_its_home_and_frees_its_units() -> None:
    shelf = Shelf()
    gone = shelf.add(10, pages=3)
    assert shelf.cache.evict()
    assert (shelf.home, gone in shelf.cache, shelf.cache.evicted) == ([], False, 1)
    assert [pool.free for pool in shelf.pools] == [200, 200]


def test_an_empty_cache_has_nothing_to_give() -> None:
    assert not Shelf().cache.evict()


def test_a_checkpoint_that_is_needed_again_is_not_evictable() -> None:
    shelf = Shelf()
    needed, other = shelf.add(10), shelf.add(20)
    shelf.cache.discard(needed)
    assert shelf.cache.evict()
    assert shelf.home == [needed]
    assert not shelf.cache.evict()
    shelf.cache.discard(other)  # not in it any more: nothing happens
    assert len(shelf.cache) == 0


@given(
    sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=20),
    budget=st.tuples(st.integers(0, 30), st.integers(0, 20)),
)
def test_trimming_keeps_the_newest_that_fit_the_budget(sizes: list[tuple[int, int]], budget: tuple[int, int]) -> None:
    shelf = Shelf(budget)
    for position, (pages, slots) in enumerate(sizes):
        shelf.add(position, pages, slots)
    shelf.cache.trim()
    kept = sizes[len(sizes) - len(shelf.cache) :]
    fits = lambda some: all(sum(size[g] for size in some) <= budget[g] for g in range(2))  # noqa: E731
    assert fits(kept)
    assert kept == sizes or not fits(sizes[len(sizes) - len(kept) - 1 :])
    assert [pool.leased for pool in shelf.pools] == [sum(size[g] for size in kept) for g in range(2)]


def test_nothing_is_evicted_before_the_cache_is_trimmed() -> None:
    shelf = Shelf((0, 0))
    shelf.add(10)
    assert len(shelf.home) == 1
    shelf.cache.trim()
    assert shelf.home == []


def test_a_checkpoint_names_its_position_and_its_owner() -> None:
    shelf = Shelf()
    made = shelf.add(10, pages=3)
    assert made.holder_name == "checkpoint 10 of session s"
    assert (made.units(0), made.units(1)) == (3, 1)
    made.move(Someone("session t"), [])
    assert made.holder_name == "checkpoint 10 of session t"


@pytest.mark.parametrize("mix", [[SLIDING], [STATE], [FULL, SLIDING, STATE]], ids=str)
def test_where_a_session_stands_is_never_evicted(mix) -> None:
    scribe = Scribe(mix)
    script = scribe.told(9)
    scribe.compute(scribe.open(script), 20)
    scribe.commit(script, 30)
    while scribe.memory.cache.evict():
        scribe.audit()
    assert script.memory.computed == 28
    assert [checkpoint.position for checkpoint in script.memory.checkpoints] == [28]


def test_what_a_turn_started_from_outlives_its_eviction_from_the_session() -> None:
    """Known fault: a source evicted between match and use."""
    scribe = Scribe([FULL, STATE])
    script = scribe.told(9)
    scribe.compute(scribe.open(script), 20)
    scribe.commit(script, 30)
    writing = scribe.open(script, base=9)  # regenerates from the checkpoint at 8
    assert writing.memory.start == 8
    while scribe.memory.cache.evict():
        pass
    scribe.compute(writing, 4)
    scribe.abort(script)
    scribe.audit()


def test_sharing_a_checkpoint_twice_over_counts_a_units_lease_each() -> None:
    scribe = Scribe([STATE])
    parent = scribe.told(9)
    for _ in range(3):
        scribe.fork(parent)
    unit = parent.memory.checkpoints[-1].parts[0].units[0]
    assert scribe.memory.pools[0].counts[unit] == 4
    assert scribe.memory.pools[0].leased == 1
