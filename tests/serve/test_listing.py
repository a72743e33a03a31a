"""Lists of sessions that several servers have."""

from __future__ import annotations

from tenuto.base.views import Listing, SessionInfo, SessionState
from tenuto.serve.shared.listing import merged


def info(name: str, version: int = 0) -> SessionInfo:
    return SessionInfo(name, SessionState.OPEN, None, version, 0, 0, 0, 9, 9, 0, None, 0.0, {}, {})


def listing(names: str, *, more: bool = False, **turns: str) -> Listing:
    return Listing(sessions=[info(name) for name in names], turns=turns, more=more)


def names(found: Listing) -> str:
    return "".join(session.session_id for session in found.sessions)


def test_the_first_sessions_of_all_are_listed_in_order() -> None:
    found = merged([listing("bd"), listing("ace", c="turn"), listing("")], 4)
    assert (names(found), found.more, found.turns["c"]) == ("abcd", True, "turn")
    assert (names(merged([listing("bd"), listing("ace")], 5)), found.more) == ("abcde", True)
    assert not merged([listing("bd"), listing("ace")], 5).more


def test_a_list_ends_where_one_of_them_is_cut() -> None:
    found = merged([listing("ab", more=True), listing("acd"), listing("bx", more=True)], 9)
    assert (names(found), found.more) == ("ab", True)


def test_a_session_that_has_moved_meanwhile_is_listed_once() -> None:
    both = [Listing(sessions=[info("a", version)], turns={"a": f"turn-{version}"}, more=False) for version in (2, 1)]
    found = merged(both, 9)
    assert [session.version for session in found.sessions] == [2]
    assert found.turns == {"a": "turn-2"}
