"""Cached checkpoints are evicted where that adds the least replay for their age, and finding one is cheap."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.memory.checkpoints.cache import CheckpointCache
from tenuto.memory.checkpoints.checkpoint import Checkpoint
from tenuto.memory.checkpoints.sequence import Checkpoints
from tenuto.memory.checkpoints.thinning import PER_OCTAVE
from tenuto.memory.pool import Pool


class Lines:
    """A cache of state slots, and sequences that stand at their last checkpoint."""

    def __init__(self, budget: int = 10**6, slots: int = 4000) -> None:
        self.pool = Pool("state0", slots)
        self.cache = CheckpointCache([self.pool], [budget])
        self.lines: list[Checkpoints] = []
        self.computed = 0  # by all lines
        self.made_at: dict[Checkpoint, int] = {}

    def open(self) -> Checkpoints:
        self.lines.append(Checkpoints(self.cache))
        return self.lines[-1]

    def go_on(self, line: Checkpoints, tokens: int) -> None:
        """Computes this many tokens and makes a checkpoint after them, where the line then stands."""
        start = line.needed.position if line.needed is not None else 0
        made = Checkpoint(start + tokens, "session s", line.needed)
        made.parts.append(self.pool.acquire(1, made))
        self.cache.pin(made)
        self.computed += tokens
        self.made_at[made] = self.computed
        line.push(made)

    def stand_at(self, line: Checkpoints, checkpoint: Checkpoint | None) -> None:
        """Cuts the line back to one of its checkpoints, or to nothing."""
        if checkpoint is not None:
            self.cache.pin(checkpoint)
        line.cut(checkpoint.position if checkpoint is not None else 0)
        if checkpoint is not None:
            line.push(checkpoint)

    def fork(self, line: Checkpoints, checkpoint: Checkpoint) -> None:
        child = self.open()
        child.refer_to(line, checkpoint.position)
        self.cache.pin(checkpoint)
        child.push(checkpoint)


def most_replayed(line: Checkpoints, checkpoint: Checkpoint) -> int:
    """Returns the replay, without this checkpoint, of a sequence that resumes just below the next one."""
    listed = list(line)
    place = listed.index(checkpoint)
    above = listed[place + 1].position if place + 1 < len(listed) else checkpoint.position
    return above - (listed[place - 1].position if place else 0)


def test_of_equal_gaps_the_oldest_is_evicted_first() -> None:
    lines = Lines()
    line = lines.open()
    for _ in range(4):
        lines.go_on(line, 10)
    lines.cache.evict()
    assert [checkpoint.position for checkpoint in line] == [20, 30, 40]


def test_of_equal_ages_the_smallest_gap_is_evicted_first() -> None:
    lines = Lines()
    line, other = lines.open(), lines.open()
    for tokens in (80, 10, 10, 10):
        lines.go_on(line, tokens)
    lines.go_on(other, 10_000)
    lines.cache.evict()
    assert [checkpoint.position for checkpoint in line] == [80, 100, 110]


def test_an_idle_sessions_checkpoints_are_evicted_before_a_busy_ones() -> None:
    lines = Lines(budget=20)
    idle, busy = lines.open(), lines.open()
    for line in (idle, busy):
        for _ in range(12):
            lines.go_on(line, 10)
            lines.cache.trim()
    for _ in range(30):
        lines.go_on(busy, 10)
        lines.cache.trim()
    assert len(idle) < len(busy) - 8
    assert len(idle) > 1  # but some from everywhere


def test_a_checkpoint_that_was_needed_again_counts_as_new() -> None:
    lines = Lines()
    line, other = lines.open(), lines.open()
    for _ in range(6):
        lines.go_on(line, 10)
        lines.go_on(other, 10)
    again = line[0]
    lines.cache.require(again)
    lines.cache.refer(again)
    lines.go_on(lines.open(), 1000)
    lines.cache.release_pinned(again)
    for _ in range(8):
        lines.cache.evict()
    assert not again.evicted


def test_a_checkpoint_that_a_turn_dropped_leaves_no_trace_in_the_gaps() -> None:
    lines = Lines()
    line = lines.open()
    for _ in range(3):
        lines.go_on(line, 10)
    kept = line[2]
    for tokens in (500, 7):
        lines.go_on(line, tokens)
        assert lines.cache.order.gap(kept) == 10 + tokens
        lines.stand_at(line, kept)
        assert lines.cache.order.gap(kept) == 10


moves = st.lists(
    st.tuples(st.sampled_from(["go on", "go on", "go on", "fork", "cut", "close", "evict"]), st.integers(0, 40)),
    max_size=60,
)


@given(moves)
def test_evictions_add_about_the_least_replay_for_their_age(moves: list[tuple[str, int]]) -> None:
    """Compared with the lists of all sequences. With forks, a gap may still count at an earlier, larger size."""
    lines = Lines()
    lines.open()
    for move, number in moves:
        line = lines.lines[number % len(lines.lines)]
        if move == "go on":
            lines.go_on(line, 1 + number)
        elif move == "fork" and len(line):
            lines.fork(line, line[number % len(line)])
        elif move == "cut":
            lines.stand_at(line, line[number % len(line)] if len(line) else None)
        elif move == "close":
            lines.stand_at(line, None)
        elif move == "evict":
            _evicts_the_least(lines)
        order = lines.cache.order
        for checkpoint in lines.cache:
            gaps = [most_replayed(line, checkpoint) for line in lines.lines if checkpoint in line]
            assert order.gap(checkpoint) >= max(gaps)
            if not any(move == "fork" for move, _ in moves):
                assert [order.gap(checkpoint)] == gaps
        assert [pool.leased for pool in (lines.pool,)] == [len({c for line in lines.lines for c in line})]


def _evicts_the_least(lines: Lines) -> None:
    order = lines.cache.order
    weight = {c: order.gap(c) / (order.age(c) + 1) for c in lines.cache}
    assert lines.cache.evict() == bool(weight)
    gone = [checkpoint for checkpoint in weight if checkpoint.evicted]
    assert len(gone) == min(1, len(weight))
    for checkpoint in gone:
        assert weight[checkpoint] <= min(weight.values()) * 2 ** (1 / PER_OCTAVE)


@dataclass
class Shape:
    """A usage of the cache: `sessions` that take turns of `tokens`, each of which leaves a checkpoint."""

    budget: int
    sessions: int
    tokens: list[int] = field(default_factory=lambda: [40])


def work_of_evictions(shape: Shape, turns: int) -> float:
    """Returns the entries looked at or moved for each eviction."""
    lines, rng = Lines(shape.budget, slots=shape.budget + shape.sessions + 2), Random(1)
    for _ in range(shape.sessions):
        lines.open()
    for turn in range(turns):
        lines.go_on(lines.lines[turn % shape.sessions], rng.choice(shape.tokens))
        lines.cache.trim()
    assert lines.cache.evicted >= turns - shape.budget - shape.sessions
    return lines.cache.order.looked / lines.cache.evicted


@pytest.mark.parametrize("tokens", [[40], [1, 5, 40, 300, 2000]], ids=["alike", "of all sizes"])
def test_the_work_of_an_eviction_does_not_grow_with_the_cache(tokens: list[int]) -> None:
    """Amortised, since some evictions move entries to their classes. There is one class for every 19% of a gap."""
    small, large = (work_of_evictions(Shape(size, 8, tokens), 8 * size) for size in (60, 1200))
    assert large <= 2 * small
    assert large < 60


def test_checkpoints_removed_without_an_eviction_leave_no_entries_behind() -> None:
    lines = Lines()
    line = lines.open()
    lines.go_on(line, 10)
    for _ in range(500):
        lines.go_on(line, 10)
        lines.stand_at(line, line[0])
    assert len(lines.cache) == 0
    assert sum(len(heap) for heap in lines.cache.order._classes) <= 70
    assert len(line._listed) == 1


def test_a_long_list_forgets_its_evicted_checkpoints() -> None:
    lines = Lines(budget=10)
    line = lines.open()
    for _ in range(500):
        lines.go_on(line, 10)
        lines.cache.trim()
    assert len(line) == 11
    assert len(line._listed) <= 40


def test_a_gap_extends_over_evicted_checkpoints_above() -> None:
    lines = Lines()
    line, branch = lines.open(), None
    for _ in range(2):
        lines.go_on(line, 10)
    lines.fork(line, line[0])  # a branch that keeps the first one's place on a line
    branch = lines.lines[-1]
    lines.go_on(branch, 5)
    first, second = line[0], line[1]
    lines.go_on(line, 10)
    made_at = lines.computed
    lines.go_on(lines.open(), 100)
    lines.cache._evict(second)
    assert lines.cache.order.gap(first) == 30
    assert lines.cache.order.age(first) == lines.computed - made_at


def test_a_checkpoint_whose_gap_has_hardly_grown_is_as_old_as_the_one_above() -> None:
    lines = Lines()
    line, other = lines.open(), lines.open()
    for each in (line, other):
        lines.go_on(each, 1000)
        lines.go_on(each, 100)
    lines.go_on(line, 10)
    lines.cache._evict(line[1])  # so the first now ends where one was made last
    assert lines.cache.order.heads() == [other[0]]


def test_a_checkpoint_whose_gap_has_shrunk_is_ranked_by_its_new_size() -> None:
    lines = Lines()
    older, line = lines.open(), lines.open()
    for each in (older, line):
        lines.go_on(each, 100)
        lines.go_on(each, 100)
    kept = line[0]
    line.cut(200)
    assert lines.cache.order.gap(kept) == 100
    assert kept in lines.cache.order.heads()
