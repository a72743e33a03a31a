"""Checkpoints are shared by everything that refers to them, and the cache of unneeded ones has a budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.base.errors import InvariantError
from tenuto.memory.checkpoints.cache import CheckpointCache
from tenuto.memory.checkpoints.checkpoint import Checkpoint
from tenuto.memory.checkpoints.sequence import Checkpoints
from tenuto.memory.pool import Lease, Pool
from tests.present import present


class Shelf:
    """A cache over two groups, and the checkpoints of one sequence."""

    def __init__(self, budget: tuple[int, int] = (100, 100)) -> None:
        self.pools = [Pool("sliding0", 200), Pool("state1", 200)]
        self.cache = CheckpointCache(self.pools, budget)
        self.listed = Checkpoints(self.cache)

    def make(self, position: int, pages: int = 1, slots: int = 1) -> Checkpoint:
        """Makes a needed checkpoint."""
        made = Checkpoint(position, "session s", self.listed.below(position))
        made.parts.extend(pool.acquire(n, made) for pool, n in zip(self.pools, (pages, slots), strict=True))
        self.cache.pin(made)
        return made

    def sharing(self, position: int, first: Lease, start: int, stop: int) -> Checkpoint:
        """Makes one that needs only pages [start, stop) of another."""
        made = Checkpoint(position, "session s")
        made.parts.extend([first.share(start, stop, made), None])
        self.cache.pin(made)
        return made

    def add(self, position: int, pages: int = 1, slots: int = 1) -> Checkpoint:
        """Makes one that only saves work."""
        made = self.make(position, pages, slots)
        self.listed.push(made)
        self.listed.relax()
        return made

    def another(self, position: int = 10**9) -> Checkpoints:
        """Makes another sequence that refers to the checkpoints listed before `position`."""
        other = Checkpoints(self.cache)
        other.refer_to(self.listed, position)
        return other

    @property
    def free(self) -> list[int]:
        return [pool.free for pool in self.pools]


def positions(listed: Checkpoints) -> list[int]:
    return [checkpoint.position for checkpoint in listed]


# -- references


def test_a_shared_checkpoint_is_held_once_and_ends_with_its_last_reference() -> None:
    shelf = Shelf()
    made = shelf.add(10, pages=3)
    others = [shelf.another() for _ in range(3)]
    assert (made.references, shelf.free) == (4, [197, 199])
    for listed in (shelf.listed, *others):
        assert shelf.free == [197, 199]
        listed.cut(0)
    assert (made.references, shelf.free, len(shelf.cache)) == (0, [200, 200], 0)


def test_an_evicted_checkpoint_is_gone_for_every_reference() -> None:
    shelf = Shelf()
    shelf.add(10)
    shelf.add(20)
    other = shelf.another()
    shelf.listed.push(shelf.make(30))
    assert shelf.cache.evict()
    assert (positions(shelf.listed), positions(other)) == ([20, 30], [20])
    assert shelf.free == [198, 198]
    assert (other.at(10), other.below(20), other.from_on(5)) == (None, None, other.at(20))
    shelf.listed.cut(0)
    other.cut(0)
    assert shelf.free == [200, 200]


def test_a_checkpoint_becomes_evictable_with_its_last_unpin() -> None:
    shelf = Shelf()
    made = shelf.make(10)
    shelf.cache.pin(made)
    shelf.listed.push(made)
    other = Checkpoints(shelf.cache)
    other.push(made)
    shelf.listed.relax()
    assert not shelf.cache.evict()
    other.relax()
    assert shelf.cache.evict()
    assert shelf.free == [200, 200]


def test_a_cached_checkpoint_that_is_pinned_again_becomes_evictable_again() -> None:
    shelf = Shelf()
    needed, other = shelf.add(10), shelf.add(20)
    taken = shelf.listed.take(10)
    assert taken is needed
    assert positions(shelf.listed) == [20]
    assert shelf.cache.evict()
    assert other.evicted
    assert not shelf.cache.evict()
    shelf.cache.release_pinned(needed)
    assert shelf.free == [200, 200]


def test_taking_an_absent_checkpoint_takes_nothing() -> None:
    shelf = Shelf()
    shelf.add(10)
    assert shelf.listed.take(9) is None
    shelf.cache.evict()
    assert shelf.listed.take(10) is None


def test_unbalanced_references_and_pins_are_found() -> None:
    shelf = Shelf()
    made = shelf.add(10)
    shelf.cache.release(made)
    with pytest.raises(InvariantError, match="checkpoint 10 of session s is released, but no sequence refers to it"):
        shelf.cache.release(made)
    with pytest.raises(InvariantError, match="is referred to after its end"):
        shelf.cache.refer(Checkpoint(30, "session s"))
    evicted = shelf.add(40)
    shelf.cache.evict()
    with pytest.raises(InvariantError, match="is needed after it was evicted"):
        shelf.cache.pin(evicted)
    pinned = shelf.make(50)
    shelf.cache.unpin(pinned)
    with pytest.raises(InvariantError, match="is unpinned, but no sequence needs it"):
        shelf.cache.unpin(pinned)


def test_a_checkpoint_names_its_position_and_its_maker() -> None:
    made = Shelf().add(10, pages=3)
    assert made.holder_name == "checkpoint 10 of session s"
    assert (len(made.units_of(0)), len(made.units_of(1))) == (3, 1)


steps = st.lists(st.tuples(st.sampled_from(["push", "cut", "evict", "fork"]), st.integers(0, 9)), max_size=40)


@given(steps)
def test_a_list_of_checkpoints_finds_the_nearest_living_one(steps: list[tuple[str, int]]) -> None:
    """Compared with a plain list of positions."""
    shelf = Shelf()
    listed = shelf.listed
    plain: dict[int, Checkpoint] = {}
    for step, number in steps:
        if step == "push":
            position = max(plain, default=0) + 1 + number
            plain[position] = shelf.make(position)
            listed.push(plain[position])
        elif step == "cut":
            listed.cut(number * 5)
            plain = {position: made for position, made in plain.items() if position < number * 5}
        elif step == "evict" and shelf.cache.evict():
            gone = [position for position, made in plain.items() if made.evicted]
            assert len(gone) == 1
            del plain[gone[0]]
        elif step == "fork":
            child = shelf.another(number * 5)
            assert positions(child) == [position for position in plain if position < number * 5]
            child.cut(0)
        for target in range(0, 60, 7):
            below, after = listed.below(target), listed.from_on(target)
            assert (below.position if below else None) == max((p for p in plain if p < target), default=None)
            assert (after.position if after else None) == min((p for p in plain if p >= target), default=None)
        assert positions(listed) == list(plain)
    listed.cut(0)
    assert shelf.free == [200, 200]


# -- the budget


def test_an_evicted_checkpoint_leaves_its_list_and_frees_its_units() -> None:
    shelf = Shelf()
    gone = shelf.add(10, pages=3)
    assert shelf.cache.evict()
    assert (positions(shelf.listed), gone in shelf.cache, shelf.cache.evicted) == ([], False, 1)
    assert shelf.free == [200, 200]


def test_an_empty_cache_evicts_nothing() -> None:
    shelf = Shelf()
    assert not shelf.cache.evict()
    assert not shelf.cache.evict_for([0, 1])


@given(
    sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=20),
    budget=st.tuples(st.integers(0, 30), st.integers(0, 20)),
)
def test_trimming_evicts_only_until_the_rest_fits_the_budget(
    sizes: list[tuple[int, int]], budget: tuple[int, int]
) -> None:
    shelf = Shelf(budget)
    made = [shelf.add(position, pages, slots) for position, (pages, slots) in enumerate(sizes, 1)]
    fits = lambda some: all(sum(sizes[c.position - 1][g] for c in some) <= budget[g] for g in range(2))  # noqa: E731
    while not fits(left := [checkpoint for checkpoint in made if not checkpoint.evicted]):
        assert shelf.cache.over_budget
        assert shelf.cache.evict()
    trimmed = Shelf(budget)
    for position, (pages, slots) in enumerate(sizes, 1):
        trimmed.add(position, pages, slots)
    trimmed.cache.trim()
    assert positions(trimmed.listed) == [checkpoint.position for checkpoint in left]
    assert trimmed.cache.evicted == len(sizes) - len(left)
    kept = [sizes[checkpoint.position - 1] for checkpoint in left]
    assert [pool.leased for pool in trimmed.pools] == [sum(size[g] for size in kept) for g in range(2)]


def test_nothing_is_evicted_before_the_cache_is_trimmed() -> None:
    shelf = Shelf((0, 0))
    shelf.add(10)
    assert len(shelf.listed) == 1
    shelf.cache.trim()
    assert len(shelf.listed) == 0


def test_a_unit_that_several_cached_checkpoints_hold_counts_once_in_the_budget() -> None:
    """Successive windows share pages."""
    shelf = Shelf((4, 0))
    first = shelf.make(8, pages=4, slots=0)
    window = first.parts[0]
    second = shelf.sharing(12, present(window), 1, 4)
    for made in (first, second):
        shelf.listed.push(made)
    shelf.listed.relax()
    shelf.cache.trim()
    assert positions(shelf.listed) == [8, 12]
    shelf.add(20, slots=0)
    assert shelf.cache.over_budget


# -- pressure


def test_units_held_only_by_the_cache_are_reclaimable() -> None:
    shelf = Shelf()
    cached = shelf.add(10, pages=5, slots=2)
    assert (shelf.cache.reclaimable(0), shelf.cache.reclaimable(1)) == (5, 2)
    needed = shelf.sharing(20, present(cached.parts[0]), 0, 2)
    assert (shelf.cache.reclaimable(0), shelf.cache.reclaimable(1)) == (3, 2)
    shelf.cache.unpin(needed)
    assert shelf.cache.reclaimable(0) == 5
    while shelf.cache.evict():
        pass
    assert (shelf.cache.reclaimable(0), shelf.free) == (0, [200, 200])


def test_only_checkpoints_that_free_a_unit_of_a_short_group_are_evicted() -> None:
    shelf = Shelf()
    window = shelf.make(5, pages=6, slots=0).parts[0]  # these pages are needed
    useless = shelf.sharing(6, present(window), 0, 3)
    shelf.listed.push(useless)
    slot, pages = shelf.add(10, pages=0, slots=1), shelf.add(20, pages=2, slots=0)
    assert shelf.cache.evict_for([0])
    assert (useless.evicted, slot.evicted, pages.evicted) == (False, False, True)
    assert not shelf.cache.evict_for([0])
    assert shelf.cache.evict_for([0, 1])
    assert (useless.evicted, slot.evicted) == (False, True)


def test_units_shared_by_several_cached_checkpoints_are_freed_together() -> None:
    shelf = Shelf()
    first = shelf.make(8, pages=2, slots=0)
    shelf.listed.push(first)
    stranger = shelf.make(9, pages=1, slots=0)
    useless = shelf.sharing(10, present(stranger.parts[0]), 0, 1)
    shelf.listed.push(useless)
    shelf.listed.push(shelf.sharing(12, present(first.parts[0]), 0, 2))
    shelf.listed.relax()
    assert shelf.cache.evict_for([0])
    assert positions(shelf.listed) == [10]
    assert shelf.pools[0].free == 199
    assert not shelf.cache.evict_for([0])


pages = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 4), st.booleans()), max_size=8)


@given(pages)
def test_evicting_for_a_group_frees_exactly_what_was_reclaimable(pages: list[tuple[int, int, bool]]) -> None:
    """Some are cached and some needed, over pages that overlap at random."""
    shelf = Shelf()
    base = shelf.make(1, pages=11, slots=0)
    for position, (start, count, needed) in enumerate(pages, 2):
        made = shelf.sharing(position, present(base.parts[0]), start, start + count)
        if not needed:
            shelf.cache.unpin(made)
    shelf.cache.release_pinned(base)
    while promised := shelf.cache.reclaimable(0):
        before = shelf.pools[0].free
        assert shelf.cache.evict_for([0])
        freed = shelf.pools[0].free - before
        assert freed > 0
        assert shelf.cache.reclaimable(0) == promised - freed
    assert not shelf.cache.evict_for([0])


def test_room_for_a_new_checkpoint_is_made_once() -> None:
    shelf = Shelf()
    kept = [shelf.add(position) for position in range(1, 4)]
    taken = [pool.acquire(pool.free, kept[0]) for pool in shelf.pools]
    shelf.cache.wanted.add(0)
    shelf.cache.trim()
    assert shelf.cache.evicted == 1
    taken += [pool.acquire(pool.free, kept[0]) for pool in shelf.pools]
    shelf.cache.trim()
    assert shelf.cache.evicted == 1, "no new checkpoint was requested"


def test_a_checkpoint_can_be_shown_however_many_are_below_it() -> None:
    made: Checkpoint | None = None
    for position in range(2000):
        made = Checkpoint(position, "session s", made)
    assert "Checkpoint" in repr(made)
