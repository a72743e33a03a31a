"""Lanes process the work of tenants in turn."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from tenuto.base.errors import InvalidRequest
from tenuto.base.options import TurnParams
from tenuto.base.tools.grammar import Grammar
from tenuto.base.wire.messages import StartTurn
from tenuto.engine.thread.rendering import Basis
from tenuto.runtime import lanes
from tenuto.runtime.lanes import LARGE, LARGE_GRAMMAR, LONG, MUCH, Lane, Lanes
from tenuto.runtime.preparation import Preparer
from tests.text.test_grammars import compiler


def test_a_tenants_work_runs_in_order_and_waits_for_at_most_one_piece_of_anothers() -> None:
    lane, begun, goes_on, done = Lane("test"), threading.Event(), threading.Event(), list[str]()

    def hold() -> None:
        begun.set()
        goes_on.wait()

    lane.put(1, hold, "greedy")
    begun.wait()
    for number in range(5):
        lane.put(1, partial(done.append, f"greedy {number}"), "greedy")
    for number in range(2):
        lane.put(1, partial(done.append, f"small {number}"), "small")
    goes_on.set()
    lane.close()
    assert done == ["greedy 0", "small 0", "greedy 1", "small 1", "greedy 2", "greedy 3", "greedy 4"]


def test_an_error_in_one_piece_of_work_does_not_end_a_lane() -> None:
    lane, done = Lane("test"), list[int]()
    lane.put(1, lambda: done.append(1 // 0))
    lane.put(1, lambda: done.append(1))
    lane.close()
    assert done == [1]


@pytest.mark.parametrize(
    ("sizes", "times"), [([LARGE, 1, LARGE], 2), ([LARGE - 1] * (2 * MUCH // LARGE + 3), 2), ([1], 0)]
)
def test_free_memory_is_returned_after_large_work_and_after_much_work(
    sizes: list[int], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned: list[int] = []
    monkeypatch.setattr(lanes, "give_back", lambda: returned.append(1))
    lane = Lane("test")
    for size in sizes:
        lane.put(size, lambda: None)
    lane.close()
    assert len(returned) == times


def test_a_small_grammar_does_not_wait_for_large_ones_nor_text_for_grammars() -> None:
    some = Lanes()
    try:
        assert len({some.of(1), some.of(1, 1), some.of(1, LARGE_GRAMMAR), some.of(LONG)}) == 4
    finally:
        some.close()


def test_stop_expressions_are_compiled_and_refused_before_the_engine_gets_the_turn() -> None:
    preparer = Preparer(None, None, None, 64)  # type: ignore[arg-type] # which it does not ask
    start = StartTurn(kind="turn", tenant="", input=[1], params=TurnParams(stop_regex=("(",)))
    with pytest.raises(InvalidRequest, match="stop_regex"):
        preparer.prepare(start, Basis.opening(100))


def test_only_a_grammar_not_yet_compiled_counts_as_work_for_its_lane() -> None:
    preparer = Preparer(None, None, compiler(), 64)  # type: ignore[arg-type] # which it does not ask
    for grammar, characters in ((Grammar("regex", "only here[a-z]"), 14), (Grammar("json_object"), 1)):
        start = StartTurn(kind="turn", tenant="", params=TurnParams(grammar=grammar))
        compiler()._compiled._kept.pop(grammar, None)
        assert preparer.to_compile(start) == characters
        compiler().constraint(grammar)
        assert preparer.to_compile(start) == 0
