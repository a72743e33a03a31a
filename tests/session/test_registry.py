"""Session ids, limits, and the expiry of idle sessions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.base.errors import AlreadyExists, InvalidRequest, NotFound, Overloaded, SessionBusy
from tenuto.base.options import Policy, TurnParams
from tenuto.base.turns import EndReason
from tenuto.base.views import SessionState
from tenuto.memory.memory import Memory
from tenuto.session import registry, tenants
from tenuto.session.registry import MAX_ID_LENGTH, Registry
from tenuto.session.session import Session
from tenuto.session.tenants import FEW, Ids
from tenuto.session.turn import Turn
from tests.clock import ManualClock
from tests.engine.stage import Stage
from tests.memory.scribe import FULL, make_shape, make_spec
from tests.present import present


class Office:
    """A registry and its clock."""

    def __init__(self, most: int = 5, pages: int = 20, context: int = 60, seed: int = 0) -> None:
        self.clock = ManualClock()
        memory = Memory(make_spec([FULL]), [pages], make_shape())
        self.registry = Registry(memory, self.clock, Random(seed), context, most)

    def begin(self, session: Session) -> None:
        session.turn = Turn(1, session, 0, TurnParams(), self.clock.now())

    def end(self, session: Session) -> None:
        present(session.turn).abort(EndReason.ABORT, self.clock.now())
        self.registry.watch(session)

    def expired(self) -> list[str]:
        """Returns the ids of expired sessions, after closing them as the engine does."""
        found = self.registry.expired()
        for session in found:
            self.registry.close(session)
        return [session.id for session in found]


def test_a_session_without_an_id_gets_an_unused_one() -> None:
    office = Office(most=100)
    ids = {office.registry.open(None, Policy()).id for _ in range(50)}
    assert len(ids) == 50
    assert all(len(session_id) == 24 for session_id in ids)
    assert Office().registry.open(None, Policy()).id in ids  # injected randomness alone decides


@pytest.mark.parametrize("session_id", ["", "a" * (MAX_ID_LENGTH + 1), "a\nb", "\x00"])
def test_an_unprintable_id_is_refused(session_id: str) -> None:
    with pytest.raises(InvalidRequest, match=f"allowed: 1 to {MAX_ID_LENGTH} printable characters"):
        Office().registry.open(session_id, Policy())


@pytest.mark.parametrize("session_id", [".", "..", "a/..", "./a", "a/./b"])
def test_an_id_that_cannot_stand_in_a_url_is_refused(session_id: str) -> None:
    with pytest.raises(InvalidRequest, match="as a path segment"):
        Office().registry.open(session_id, Policy())
    for similar in ("...", "a..", "..a", "a/.../b"):
        Office().registry.open(similar, Policy())


def test_two_tenants_may_use_the_same_session_id() -> None:
    office = Office()
    mine, theirs = (office.registry.open("s", Policy(tenant=tenant, ttl=5.0)) for tenant in ("ann", "bob"))
    assert (office.registry.get("s", "ann"), office.registry.get("s", "bob")) == (mine, theirs)
    assert office.registry.find("s") is None
    with pytest.raises(AlreadyExists, match="session 's' is open already"):
        office.registry.open("s", Policy(tenant="ann"))
    office.clock.advance(4.0)
    office.begin(theirs)
    office.end(theirs)
    office.clock.advance(2.0)
    assert [session.key for session in office.registry.expired()] == [("ann", "s")]
    office.registry.close(mine)
    assert office.registry.find("s", "ann") is None
    assert office.registry.get("s", "bob") is theirs
    assert (office.registry.use("ann").sessions, office.registry.use("bob").sessions) == (0, 1)


def test_an_id_is_taken_until_its_session_closes() -> None:
    office = Office()
    session = office.registry.open("s", Policy())
    with pytest.raises(AlreadyExists, match="'s' is open already"):
        office.registry.open("s", Policy())
    office.registry.close(session)
    assert session.state is SessionState.CLOSED
    with pytest.raises(NotFound, match="no session 's'"):
        office.registry.get("s")
    assert office.registry.open("s", Policy()) is not session


def test_the_number_of_sessions_is_limited() -> None:
    office = Office(most=2)
    first = office.registry.open(None, Policy())
    office.registry.open(None, Policy())
    with pytest.raises(Overloaded, match="2 sessions are open, the most allowed"):
        office.registry.open(None, Policy())
    office.registry.close(first)
    office.registry.open(None, Policy())


def test_a_session_with_an_open_turn_is_not_closed() -> None:
    office = Office()
    session = office.registry.open("s", Policy())
    office.begin(session)
    with pytest.raises(SessionBusy):
        office.registry.close(session)
    assert office.registry.find("s") is not None


@pytest.mark.parametrize(
    ("own", "context", "pages", "limit"), [(None, 60, 20, 60), (30, 60, 20, 30), (90, 60, 20, 60), (None, 60, 5, 21)]
)
def test_a_sessions_limit_is_the_least_of_its_cap_the_context_and_the_pools(
    own: int | None, context: int, pages: int, limit: int
) -> None:
    assert Office(context=context, pages=pages).registry.open("s", Policy(max_tokens=own)).limit == limit


def test_the_ttl_of_a_session_without_turns_counts_from_its_opening() -> None:
    office = Office()
    office.registry.open("s", Policy(ttl=10.0))
    office.clock.advance(9.9)
    assert office.expired() == []
    office.clock.advance(0.2)
    assert office.expired() == ["s"]


def test_the_ttl_counts_from_the_end_of_the_last_turn() -> None:
    office = Office()
    session = office.registry.open("s", Policy(ttl=10.0))
    office.clock.advance(9.0)
    office.begin(session)
    office.clock.advance(5.0)
    office.end(session)
    office.clock.advance(9.9)
    assert office.expired() == []
    office.clock.advance(0.2)
    assert office.expired() == ["s"]


def test_a_session_never_expires_while_its_turn_is_open() -> None:
    """Known fault: an idle timeout closes a session whose turn is running."""
    office = Office()
    session = office.registry.open("s", Policy(ttl=10.0))
    office.begin(session)
    office.clock.advance(1000.0)
    assert office.expired() == []
    office.end(session)
    assert office.expired() == []
    office.clock.advance(10.0)
    assert office.expired() == ["s"]


def test_a_session_without_a_ttl_never_expires() -> None:
    office = Office()
    office.registry.open("s", Policy())
    office.clock.advance(1e9)
    assert office.expired() == []


def test_a_closing_session_does_not_expire() -> None:
    office = Office()
    office.registry.open("s", Policy(ttl=1.0)).state = SessionState.CLOSING
    office.clock.advance(2.0)
    assert office.expired() == []


def test_a_new_session_does_not_inherit_the_expiry_of_an_old_one_with_its_id() -> None:
    office = Office()
    office.registry.close(office.registry.open("s", Policy(ttl=10.0)))
    office.clock.advance(5.0)
    office.registry.open("s", Policy(ttl=10.0))
    office.clock.advance(6.0)
    assert office.expired() == []
    office.clock.advance(4.0)
    assert office.expired() == ["s"]


events = st.tuples(st.sampled_from(["begin", "end", "wait"]), st.integers(0, 2), st.integers(1, 12))


@given(st.lists(events, max_size=40))
def test_exactly_the_idle_sessions_past_their_ttl_expire(events: list[tuple[str, int, int]]) -> None:
    office = Office()
    ttls = {"s0": 5.0, "s1": 11.0, "s2": None}
    sessions = [office.registry.open(sid, Policy(ttl=ttl)) for sid, ttl in ttls.items()]
    idle_since = dict.fromkeys(ttls, 0.0)
    for event, which, seconds in events:
        session = sessions[which]
        if session.state is SessionState.CLOSED:
            continue
        if event == "begin" and session.turn is None:
            office.begin(session)
            idle_since.pop(session.id)
        elif event == "end" and session.turn is not None:
            office.end(session)
            idle_since[session.id] = office.clock.now()
        else:
            office.clock.advance(float(seconds))
            now = office.clock.now()
            due = {sid for sid, since in idle_since.items() if (ttl := ttls[sid]) is not None and since + ttl <= now}
            assert set(office.expired()) == due
            for sid in due:
                del idle_since[sid]


def test_expiries_of_closed_sessions_do_not_pile_up() -> None:
    """Known fault: entries of closed sessions stayed until their TTL."""
    office = Office(most=10_000)
    for _ in range(2000):
        office.registry.close(office.registry.open("s", Policy(ttl=3600.0)))
    assert len(office.registry._expiries) <= 64
    sessions = [office.registry.open(None, Policy(ttl=3600.0)) for _ in range(2000)]
    for session in sessions[:-1]:
        office.registry.close(session)
    assert len(office.registry._expiries) <= 66
    office.clock.advance(3600.0)
    assert office.expired() == [sessions[-1].id]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 7)), max_size=300))
def test_reopened_sessions_expire_when_they_should(events: list[tuple[int, bool, int]]) -> None:
    """So many are opened and closed that dead entries are removed in between."""
    office, opened = Office(), {}
    for which, reopen, seconds in events * 3:
        session_id = f"s{which}"
        if reopen:
            if session_id in opened:
                office.registry.close(office.registry.get(session_id))
            office.registry.open(session_id, Policy(ttl=10.0))
            opened[session_id] = office.clock.now()
        office.clock.advance(float(seconds))
        due = {sid for sid, since in opened.items() if since + 10.0 <= office.clock.now()}
        assert set(office.expired()) == due
        opened = {sid: since for sid, since in opened.items() if sid not in due}
        assert len(office.registry._expiries) <= 2 * len(opened) + 64


def test_text_that_is_not_unicode_is_refused() -> None:
    registry = Office().registry
    for policy, system in ((Policy(), "a\ud800"), (Policy(metadata=(("k", "\udfff"),)), None)):
        with pytest.raises(InvalidRequest, match="lone surrogate"):
            registry.open("s", policy, system)
    assert len(registry) == 0


def test_sessions_that_expire_together_are_closed_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known fault: one step closed all of them, which took long."""
    monkeypatch.setattr(registry, "MAX_EXPIRED", 4)
    office = Office(most=100)
    for i in range(10):
        office.registry.open(f"s{i}", Policy(ttl=5.0))
    office.clock.advance(6.0)
    found = [office.expired() for _ in range(4)]
    assert [len(ids) for ids in found] == [4, 4, 2, 0]
    assert sorted(chain(*found)) == [f"s{i}" for i in range(10)]
    assert not office.registry.more_expired


def test_an_idle_session_is_listed_once_to_leave_the_device() -> None:
    stage = Stage()
    session = stage.committed("s", ttl=100.0)
    stage.clock.advance(60.0)
    sessions = stage.engine.registry
    assert not sessions.expired()
    assert sessions.take_resting() == [session]
    assert not sessions.expired()
    assert not sessions.take_resting()


@pytest.fixture(scope="module")
def _few_are_many() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tenants, "MANY", 20)
        yield


@pytest.mark.usefixtures("_few_are_many")
@given(st.lists(st.tuples(st.integers(0, 2 * FEW), st.lists(st.text(max_size=3), max_size=3), st.text(max_size=3))))
def test_ids_stay_in_order_however_many_are_added_before_a_look(rounds: list[tuple[int, list[str], str]]) -> None:
    ids, mirror = Ids(), set[str]()
    for number, (more, gone, after) in enumerate(rounds):
        for each in (f"{i * 7 % (more or 1)} {number}" for i in range(more)):
            if each not in mirror:
                ids.add(each)
                mirror.add(each)
        for each in [*gone, f"1 {number}"]:
            if each in mirror:
                ids.remove(each)
                mirror.remove(each)
        assert list(ids.after(after)) == sorted(each for each in mirror if each > after)
