"""The order in which things make room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tenuto.base.use_order import UseOrder
from tests.clock import ManualClock

Item = tuple[float, float | None]  # when it was used, and when it is expected
MOMENTS = st.floats(0, 100)


def test_what_rests_longest_comes_first() -> None:
    clock = ManualClock()
    order: UseOrder[str] = UseOrder(clock.now)
    order.add("old")
    clock.advance(10)
    order.add("late", clock.now() + 30)
    order.add("soon", clock.now() + 2)
    order.add("passed", clock.now() + 1)
    clock.advance(5)
    order.add("used")
    assert list(order.longest_first()) == ["late", "old", "passed", "soon", "used"]
    assert list(order.longest_first(4)) == ["late", "old", "passed"]
    order.add("late")
    order.discard("old")
    assert list(order.longest_first()) == ["passed", "soon", "used", "late"]
    assert "old" not in order


@given(st.lists(st.tuples(MOMENTS, st.none() | MOMENTS), max_size=12), st.data())
def test_the_order_is_that_of_the_distance_to_the_last_or_the_next_use(items: list[Item], data: st.DataObject) -> None:
    clock = ManualClock()
    order: UseOrder[int] = UseOrder(clock.now)
    began = clock.now()
    items.sort(key=lambda item: item[0])
    for number, (used, expected) in enumerate(items):
        clock.advance(max(0.0, began + used - clock.now()))
        order.add(number, None if expected is None else began + expected)
    gone = set(data.draw(st.lists(st.integers(0, 11))))
    for number in gone:
        order.discard(number)
    clock.advance(max(0.0, began + 100 - clock.now()))
    kept = [number for number in range(len(items)) if number not in gone]
    rests = {n: abs(clock.now() - (began + (items[n][0] if items[n][1] is None else items[n][1]))) for n in kept}  # type: ignore[operator]
    found = [rests[number] for number in order.longest_first()]
    assert found == sorted(rests.values(), reverse=True)
    assert len(order) == len(kept)
    assert sorted(order) == kept
