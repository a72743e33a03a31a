"""Traces of sessions that are not here any more."""

from __future__ import annotations

from tenuto.session import traces
from tenuto.session.traces import Traces


def test_of_more_sessions_than_are_kept_any_may_have_left_something() -> None:
    found = Traces()
    for number in range(traces.MOST):
        found.add(("", str(number)))
    found.add(("", "0"))
    assert ("", "other") not in found
    found.erased(("", "1"))
    assert ("", "1") not in found
    found.add(("", "1"))
    found.add(("", "one too many"))
    assert ("", "other") in found
