"""The order in which turns run: priority, raised by waiting; drafts last."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.base.options import Policy, TurnParams
from tenuto.base.turns import TurnState
from tenuto.sched.queue import WaitingQueue
from tenuto.session.turn import Turn
from tests.session.test_turn import make_session

AGING = 10.0
SESSION = make_session()
SESSIONS = {name: make_session(Policy(tenant=name)) for name in "abc"}
"""A session of each tenant."""


def make_turn(
    number: int, priority: int = 0, arrival: float = 0.0, *, draft: bool = False, tenant: str | None = None
) -> Turn:
    turn = Turn(number, SESSIONS[tenant] if tenant is not None else SESSION, 0, TurnParams(priority=priority), arrival)
    if draft:
        turn.state = TurnState.DRAFTING
    return turn


def first(queue: WaitingQueue) -> Turn | None:
    """Returns the next turn to run; all are of one tenant."""
    return next(queue.heads(), None)


def drain(queue: WaitingQueue) -> list[int]:
    numbers = []
    while (turn := first(queue)) is not None:
        numbers.append(turn.number)
        queue.remove(turn)
    return numbers


kinds = st.tuples(st.integers(-3, 3), st.integers(0, 60), st.booleans())


@given(st.lists(kinds, min_size=2, max_size=12), st.integers(60, 500))
def test_the_turn_with_the_highest_priority_and_wait_always_goes_first(some: list, now: int) -> None:
    queue = WaitingQueue(AGING)
    turns = [make_turn(n, priority, float(at), draft=draft) for n, (priority, at, draft) in enumerate(some)]
    for turn in turns:
        queue.push(turn)
    effective = {t.number: t.priority + (now - t.arrival) / AGING for t in turns}
    drafts = {turn.number for turn in turns if turn.state is TurnState.DRAFTING}
    order = drain(queue)
    for earlier, later in pairwise(order):
        assert (earlier in drafts) <= (later in drafts), "a draft went before a submitted turn"
        if (earlier in drafts) == (later in drafts):
            assert effective[earlier] >= effective[later] - 1e-3


@given(
    st.lists(
        st.tuples(st.sampled_from(["push", "remove", "first"]), st.integers(0, 5), st.integers(-2, 2)), max_size=40
    )
)
def test_the_queue_always_equals_a_sorted_list(events: list[tuple[str, int, int]]) -> None:
    queue, turns, naive = WaitingQueue(AGING), [make_turn(n) for n in range(6)], set()
    for event, which, priority in events:
        turn = turns[which]
        if event == "push":
            turn.priority = priority  # a draft submitted with a new priority moves
            queue.push(turn)
            naive.add(which)
        elif event == "remove":
            queue.remove(turn)
            naive.discard(which)
        least = min((turns[n].rank(AGING) for n in naive), default=None)
        found = first(queue)
        assert (None if found is None else found.rank(AGING)) == least
        assert len(queue) == len(naive)
        assert all((turns[n] in queue) == (n in naive) for n in range(6))
    assert drain(queue) == sorted(naive, key=lambda n: turns[n].rank(AGING))


def test_of_equal_turns_the_earliest_goes_first() -> None:
    queue = WaitingQueue(AGING)
    for number in (3, 1, 2):
        queue.push(make_turn(number))
    assert drain(queue) == [1, 2, 3]


@pytest.mark.parametrize(("wait", "order"), [(19.0, [2, 1]), (21.0, [1, 2])])
def test_two_levels_of_priority_are_worth_two_aging_periods(wait: float, order: list[int]) -> None:
    queue = WaitingQueue(AGING)
    queue.push(make_turn(1, priority=0, arrival=0.0))
    queue.push(make_turn(2, priority=2, arrival=wait))
    assert drain(queue) == order


def test_a_draft_that_is_submitted_moves_ahead_of_other_drafts() -> None:
    queue = WaitingQueue(AGING)
    drafts = [make_turn(n, draft=True) for n in (1, 2)]
    for draft in drafts:
        queue.push(draft)
    drafts[1].submit(TurnParams(), now=50.0)
    queue.push(drafts[1])
    assert drain(queue) == [2, 1]


def test_looking_at_the_first_turn_does_not_remove_it() -> None:
    queue = WaitingQueue(AGING)
    queue.push(make_turn(1))
    assert first(queue) is first(queue)
    assert len(queue) == 1


def test_removing_a_turn_that_does_not_wait_does_nothing() -> None:
    queue = WaitingQueue(AGING)
    queue.remove(make_turn(1))
    assert (len(queue), first(queue)) == (0, None)


@given(st.lists(st.tuples(st.sampled_from(["push", "remove"]), st.integers(0, 8), st.integers(-2, 2)), max_size=40))
def test_the_heads_are_the_next_turns_of_each_tenant(events: list[tuple[str, int, int]]) -> None:
    queue, naive = WaitingQueue(AGING), set()
    turns = [make_turn(n, tenant="abc"[n % 3]) for n in range(9)]
    for event, which, priority in events:
        if event == "push":
            turns[which].priority = priority
            queue.push(turns[which])
            naive.add(which)
        else:
            queue.remove(turns[which])
            naive.discard(which)
        expected = [min((turns[n].rank(AGING) for n in naive if n % 3 == i), default=None) for i in range(3)]
        found = {turn.session.policy.tenant: turn.rank(AGING) for turn in queue.heads()}
        assert [found.get(tenant) for tenant in "abc"] == expected


def test_the_queue_forgets_tenants_and_turns_that_no_longer_wait() -> None:
    queue = WaitingQueue(AGING)
    for number in range(1000):
        turn = make_turn(number, tenant="abc"[number % 3])
        queue.push(turn)
        queue.remove(turn)
    assert queue._listed <= 64 + 1
    assert list(queue.heads()) == []
    assert (queue._heaps, queue._listed) == ({}, 0)


@pytest.mark.parametrize("left", [0, 1])
def test_turns_that_leave_the_queue_unstarted_are_not_kept(left: int) -> None:
    queue = WaitingQueue(AGING)
    turns = [make_turn(number) for number in range(1000)]
    for turn in turns:
        queue.push(turn)
    held = [weakref.ref(turn) for turn in turns]
    for turn in turns[left:]:
        queue.remove(turn)
    del turn, turns
    gc.collect()
    alive = [turn() for turn in held if turn() is not None]
    assert len(alive) <= 66 * left
    assert [turn.number for turn in queue.heads()] == [0] * left
