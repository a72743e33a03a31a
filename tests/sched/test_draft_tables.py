"""The pages of a draft model: kept, shared and given up."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from tenuto.base.groups import GroupSpec, Kind, MemorySpec
from tenuto.base.options import Policy
from tenuto.sched.draft_tables import NO_ROW, DraftTable, DraftTables, common
from tenuto.session.session import Session

SPEC = MemorySpec(4, (GroupSpec(Kind.FULL, 1),))


def session(name: str, tenant: str = "") -> Session:
    return Session(name, Policy(tenant=tenant), cast("Any", None), 10**6, 0.0)


def compute(tables: DraftTables, table: DraftTable, tokens: Iterable[int]) -> bool:
    """Lets the table have more tokens, as a step does."""
    more = array("i", tokens)
    (fits,) = tables.take_room([(table, len(more))])
    if fits:
        table.tokens.extend(more)
    return fits


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_common_tokens_are_counted(first: list[int], second: list[int]) -> None:
    found = common(array("i", first), array("i", second))
    assert first[:found] == second[:found]
    assert found == min(len(first), len(second)) or first[found] != second[found]


def test_rows_of_tables_in_the_step_are_not_taken() -> None:
    tables = DraftTables(SPEC, 20, 2)
    a, b, c = (tables.of(session(name), array("i")) for name in "abc")
    for table in (a, b):
        assert compute(tables, table, [1])
    assert tables.take_room([(c, 1), (a, 1)]) == [True, True]  # a had its row for the longest
    assert (b.row, sorted((a.row, c.row))) == (NO_ROW, [0, 1])


def test_pages_of_tables_in_the_step_are_not_taken_and_others_only_if_they_suffice() -> None:
    tables = DraftTables(SPEC, 4, 4)
    a, b, c = (tables.of(session(name), array("i")) for name in "abc")
    for table in (a, b):
        assert compute(tables, table, range(5))
    assert tables.take_room([(a, 0), (c, 9)]) == [True, False]
    assert (len(a.tokens), len(b.tokens)) == (5, 5)
    assert tables.take_room([(a, 0), (c, 8)]) == [True, True]
    assert (len(a.tokens), len(b.tokens), b.pages, c.pages) == (5, 0, 0, 2)


def test_full_pages_are_shared_within_a_scope_until_they_differ() -> None:
    tables, tokens = DraftTables(SPEC, 20, 4), array("i", range(11))
    kept = [session("a"), session("b"), session("c", "another")]
    a = tables.of(kept[0], tokens)
    compute(tables, a, tokens)
    b = tables.of(kept[1], tokens[:10] + array("i", [99]))
    assert b.tokens == tokens[:8]
    assert list(b.units(0)[0]) == list(a.units(0)[0])[:2]
    assert not len(tables.of(kept[2], tokens).tokens)
    assert tables.of(kept[0], tokens[:6]) is a
    assert a.tokens == tokens[:4]  # the second page is the other's, too
    compute(tables, a, [50, 51])
    assert b.tokens == tokens[:8]
    assert list(b.units(0)[0])[1] != list(a.units(0)[0])[1]
    tables.drop(b)
    tables.of(kept[0], a.tokens[:3])
    assert len(a.tokens) == 3  # it reads its page alone again, and may write on in it
    assert compute(tables, a, [7])
    tables.clear()
    assert tables.pools[0].free == 20
