"""The rule by which replicas spread load, as a function of what their heartbeats say."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.base.fleet_views import OwnedSession
from tenuto.base.turns import TurnState
from tenuto.serve.fleet.balance import FULL, MORE_MEMORY, MOST, Shift, chosen, level_memory, level_turns

TURNS = st.dictionaries(st.integers(1, 99), st.integers(0, 200), max_size=6)
USED = st.dictionaries(st.integers(1, 99), st.floats(0, 1), max_size=6)


def after(loads: Mapping[int, float], shifts: list[Shift]) -> dict[int, float]:
    left = dict(loads)
    for each in shifts:
        left[each.source] -= each.turns or each.memory
        left[each.target] += each.turns or each.memory
    return left


@given(TURNS)
def test_leveling_turns_ends_and_never_makes_the_balance_worse(turns: dict[int, int]) -> None:
    shifts = level_turns(turns)
    left = after(turns, shifts)
    assert sum(left.values()) == sum(turns.values())
    assert all(each.turns > 0 and each.memory == 0 for each in shifts)
    assert not {each.source for each in shifts} & {each.target for each in shifts}
    if shifts:
        assert max(left.values()) - min(left.values()) < 2
        assert level_turns({number: int(count) for number, count in left.items()}) == []
        for each in shifts:  # each alone makes it no worse, in whatever order they are carried out
            one = after(turns, [each])
            assert max(one.values()) <= max(turns.values())
            assert min(one.values()) >= min(turns.values())


@given(USED)
def test_leveling_memory_ends_and_never_makes_the_balance_worse(used: dict[int, float]) -> None:
    shifts = level_memory(used)
    left = after(used, shifts)
    assert sum(left.values()) == pytest.approx(sum(used.values()))
    assert all(each.memory > 0 and each.turns == 0 for each in shifts)
    if shifts:
        assert level_memory(left) == []
        assert max(used.values()) >= FULL
        assert max(left.values()) <= max(used.values())
        assert min(left.values()) >= min(used.values())


@pytest.mark.parametrize("turns", [{}, {1: 9}, {1: 1, 2: 0}, {1: 5, 2: 4, 3: 4}, {1: 9, 2: 7}, {1: 100, 2: 80}])
def test_nothing_moves_while_no_replica_has_many_more_turns(turns: dict[int, int]) -> None:
    assert level_turns(turns) == []


@pytest.mark.parametrize("used", [{}, {1: 1.0}, {1: FULL, 2: FULL - 0.9 * MORE_MEMORY}, {1: FULL - 0.01, 2: 0.0}])
def test_nothing_moves_while_there_is_memory_or_the_others_have_as_little(used: dict[int, float]) -> None:
    assert level_memory(used) == []


def test_all_at_one_replica_become_even() -> None:
    assert level_turns({1: 4, 2: 0}) == [Shift(1, 2, turns=2)]
    assert level_turns({1: 0, 2: 8, 3: 0}) == [Shift(2, 1, turns=3), Shift(2, 3, turns=2)]
    assert level_memory({1: 0.25, 2: 1.0}) == [Shift(2, 1, memory=0.375)]


def session(name: str, turn: TurnState | None = None, **other: float) -> OwnedSession:
    known = {"units": 1, "share": 0.1, "rested": 1.0, "pinned": False} | other
    return OwnedSession(tenant="", session=name, turn=turn, **known)  # type: ignore[arg-type]


def names(sessions: list[OwnedSession]) -> list[str]:
    return [each.session for each in sessions]


def test_waiting_turns_move_before_running_ones_and_those_with_little_state_before_others() -> None:
    owned = [
        session("large", TurnState.RUNNING, units=9),
        session("small", TurnState.RUNNING, units=2),
        session("waiting", TurnState.QUEUED, units=99),
        session("idle"),
        session("typing", TurnState.DRAFTING),
        session("pinned", TurnState.QUEUED, pinned=True),
        session("new", TurnState.QUEUED),
    ]
    assert names(chosen(owned, Shift(1, 2, turns=2), {("", "new")})) == ["waiting", "small"]
    assert names(chosen(owned, Shift(1, 2, turns=9), {("", "new")})) == ["waiting", "small", "large"]


def test_idle_sessions_move_least_recently_used_first_and_no_more_than_their_share() -> None:
    owned = [
        session("recent", rested=1),
        session("old", rested=9),
        session("older and large", rested=10, share=0.5),
        session("without state", rested=11, share=0),
        session("busy", TurnState.RUNNING, rested=12),
    ]
    assert names(chosen(owned, Shift(1, 2, memory=0.15), set())) == ["old"]
    assert names(chosen(owned, Shift(1, 2, memory=0.65), set())) == ["older and large", "old"]


@given(st.lists(st.tuples(st.floats(0, 0.2), st.floats(0, 99)), max_size=60), st.floats(0.01, 1))
def test_no_more_moves_than_asked_for(shares: list[tuple[float, float]], memory: float) -> None:
    owned = [session(str(n), share=share, rested=rested) for n, (share, rested) in enumerate(shares)]
    found = chosen(owned, Shift(1, 2, memory=memory), set())
    assert sum(each.share for each in found) <= memory + 1e-9
    assert len(found) <= MOST
