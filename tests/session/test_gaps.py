"""Guesses of the time that tools take."""

from __future__ import annotations

from tenuto.session import gaps
from tenuto.session.gaps import ToolGaps


def test_the_guess_is_the_lower_quartile_of_the_last_times() -> None:
    known = ToolGaps()
    assert known.guess("ann", ("search",)) is None
    for seconds in (900.0, 5.0, 4.0, 8.0, 6.0, 7.0, 3.0, 2.0, 1.0):
        known.note("ann", ("search",), seconds)
    assert known.guess("ann", ("search",)) == 2.0


def test_tools_that_were_never_called_together_take_as_long_as_the_slowest() -> None:
    known = ToolGaps()
    known.note("ann", ("read",), 1.0)
    known.note("ann", ("build",), 60.0)
    assert known.guess("ann", ("build", "read")) == 60.0
    assert known.guess("ann", ("build", "unknown")) == 60.0
    known.note("ann", ("build", "read"), 30.0)
    assert known.guess("ann", ("build", "read")) == 30.0


def test_no_tenant_learns_from_another() -> None:
    known = ToolGaps()
    known.note("ann", ("search",), 3.0)
    assert known.guess("bob", ("search",)) is None


def test_what_is_remembered_is_bounded() -> None:
    known = ToolGaps()
    for tenant in range(gaps.TENANTS + 5):
        known.note(str(tenant), ("search",), 1.0)
    for number in range(gaps.SETS + 5):
        known.note("last", (str(number),), 1.0)
    assert len(known._tenants) == gaps.TENANTS
    assert len(known._tenants["last"]) == gaps.SETS
    assert known.guess("last", ("0",)) is None
    assert known.guess("last", (str(gaps.SETS),)) == 1.0
