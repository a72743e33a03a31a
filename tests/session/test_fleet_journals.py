"""Replicas on one database: each session has one owner, and a replica that has lost it commits nothing."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import msgspec
import psycopg
import pytest

from tenuto.base.errors import ConfigError, SessionDamaged
from tenuto.base.options import Policy
from tenuto.session.postgres.database import FORMAT, Database
from tenuto.session.postgres.journal import PostgresJournal
from tenuto.session.postgres.replicas import Owned, Replicas
from tenuto.session.records import SavedSession
from tests.postgres import database
from tests.present import present
from tests.session import test_journal
from tests.session.test_journal import Journaled, opened

KEY = ("", "s")


class Replica(Journaled):
    """An engine that is a replica of a fleet."""

    def __init__(self, url: str, name: str) -> None:
        super().__init__()
        self.replicas = Replicas(Database(url), "tokens")
        self.replicas.join(f"http://{name}", 60)
        self.journal = PostgresJournal(Database(url), "tokens", self.replicas.number)

    def turn(self, session: str, tokens: list[int]) -> None:
        self.begin(self.engine.registry.get(session), tokens, 2)
        self.play()

    def write(self) -> set[str]:
        """Writes all changes, and returns the sessions that belong to others by now."""
        return {session.id for session in self.journal.write(self.new_changes())}

    def take(self, key: tuple[str, str] = KEY) -> SavedSession | None:
        """Claims a session and restores it."""
        saved = self.replicas.claim(key, present(self.replicas.find(key)))
        if saved is not None:
            self.engine.sessions.restore(saved, journaled=True)
        return saved

    def end(self) -> None:
        self.journal.close()
        self.replicas.db.close()


Make = Callable[[str], Replica]


@pytest.fixture
def url() -> str:
    return database()


@pytest.fixture
def make(url: str) -> Iterator[Make]:
    made: list[Replica] = []

    def one(name: str) -> Replica:
        made.append(Replica(url, name))
        return made[-1]

    yield one
    for each in made:
        each.end()


def history(replica: Replica, session: str = "s") -> list[int]:
    return replica.engine.registry.get(session).history.tolist()


def test_an_owner_that_wakes_after_its_session_was_taken_over_commits_nothing(make: Make) -> None:
    old, new = make("a"), make("b")
    old.open()
    old.turn("s", [1, 2, 3])
    old.write()
    acknowledged = history(old)
    old.turn("s", [4])  # committed in memory, and then it pauses
    old.replicas.end()
    saved = present(new.take())
    assert saved.tokens.tolist() == acknowledged
    assert old.write() == {"s"}
    new.turn("s", [5])
    assert new.write() == set()
    old.turn("s", [6])
    assert old.write() == {"s"}
    third = make("c")
    new.replicas.end()
    assert present(third.take()).tokens.tolist() == history(new)


def test_changes_from_before_a_session_left_are_not_written_once_it_is_back(make: Make) -> None:
    first, second = make("a"), make("b")
    session = first.open()
    first.write()
    first.turn("s", [1])
    late = first.new_changes()
    first.replicas.end()
    second.take()
    second.turn("s", [2])
    second.write()
    second.replicas.end()
    first.engine.sessions.leave(session)
    first.take()
    assert first.journal.write(late) == {session}
    first.turn("s", [3])
    assert first.write() == set()
    rows = second.replicas.db.execute("SELECT owner FROM records ORDER BY number").fetchall()
    assert [owner for (owner,) in rows] == [second.replicas.number, first.replicas.number]


def test_the_other_sessions_of_an_owner_that_lost_one_are_written(make: Make) -> None:
    old, new = make("a"), make("b")
    old.open()
    old.engine.sessions.open("t")
    old.write()
    old.replicas.end()
    new.take()
    old.turn("s", [1])
    old.turn("t", [2, 3])
    old.engine.sessions.open("u")
    assert old.write() == {"s"}
    assert present(new.take(("", "t"))).tokens.tolist() == history(old, "t")
    assert present(new.take(("", "u"))).tokens.tolist() == []


def test_a_fork_of_a_session_that_was_taken_over_leaves_nothing(make: Make) -> None:
    old, new = make("a"), make("b")
    old.open()
    old.turn("s", [1, 2])
    old.write()
    old.replicas.end()
    new.take()
    old.turn("s", [3])
    old.engine.sessions.fork("s", child="t")
    assert old.write() == {"s", "t"}
    assert new.replicas.find(("", "t")) is None
    new.engine.sessions.fork("s", child="t")
    assert new.write() == set()


def test_a_session_whose_name_another_replica_has_is_not_opened(make: Make) -> None:
    first, second = make("a"), make("b")
    first.open()
    first.write()
    second.open()
    second.turn("s", [1])
    assert second.write() == {"s"}
    assert present(first.replicas.find(KEY)).owner == first.replicas.number
    first.turn("s", [2])
    assert first.write() == set()


def test_a_session_that_was_closed_and_opened_again_elsewhere_is_not_its_old_owners(make: Make) -> None:
    old, new = make("a"), make("b")
    old.open()
    old.write()
    old.turn("s", [1])
    old.replicas.end()
    new.take()
    new.engine.sessions.close("s")
    new.open()
    assert new.write() == set()
    assert old.write() == {"s"}
    assert present(new.replicas.find(KEY)).owner == new.replicas.number


def test_a_session_is_claimed_only_after_its_owners_lease(make: Make) -> None:
    owner, other = make("a"), make("b")
    owner.open()
    owner.write()
    seen = present(other.replicas.find(KEY))
    assert (seen.owner, seen.live, seen.url) == (owner.replicas.number, True, "http://a")
    assert other.replicas.claim(KEY, seen) is None
    owner.replicas.db.execute(
        "UPDATE replicas SET heartbeat = heartbeat - INTERVAL '61 seconds' WHERE id = ?", (owner.replicas.number,)
    )
    ended = present(other.replicas.find(KEY))
    assert not ended.live
    assert present(owner.replicas.beat()).lost
    assert other.replicas.claim(KEY, ended) is None
    assert present(owner.replicas.beat()).lost
    assert not present(owner.replicas.beat()).lost
    owner.replicas.end()
    assert owner.replicas.beat() is None
    claimed = present(other.replicas.claim(KEY, ended))
    assert claimed.epoch > seen.epoch
    assert other.replicas.epochs() == {KEY: claimed.epoch}
    assert owner.replicas.epochs() == {}


def test_sessions_that_no_live_replica_owns_count_for_their_tenants(make: Make) -> None:
    owner, other = make("a"), make("b")
    opened = owner.engine.sessions.open
    opened("s", policy=Policy(pinned=True))
    opened("u", system="système", policy=Policy(metadata=(("pinned", "true"), ('"pinned":true', '"pinned":true'))))
    opened("v", policy=Policy(tenant="elsewhere"))
    for session, given in (("s", [1, 2, 3]), ("s", [4]), ("u", "Hello")):
        owner.begin(owner.engine.registry.get(session), given, 2)
        owner.play()
    owner.write()
    assert other.replicas.unowned_of([""]) == {}
    counted = owner.engine.registry.counted("")
    results = sum(session.results.size for session in owner.engine.registry)
    owner.replicas.end()
    expected = {"": msgspec.structs.replace(counted, journal_bytes=counted.journal_bytes - results)}
    assert other.replicas.unowned_of(["", "unknown"]) == expected
    assert (counted.sessions, counted.pinned) == (2, 1)
    assert counted.tokens > 8
    owner.replicas.join("http://a", 60)
    other.replicas.give_up(KEY, 0)
    assert other.replicas.unowned_of([""]) == expected
    claimed = other.take(KEY)
    assert claimed is not None
    assert other.replicas.unowned_of([""])[""].sessions == 1
    other.replicas.give_up(KEY, claimed.epoch)
    assert other.replicas.unowned_of([""]) == expected


def test_sessions_whose_time_is_over_are_found_whatever_metadata_others_have(make: Make) -> None:
    owner, other = make("a"), make("b")
    unending = '"ttl":1,', "\0", "\\u0000", "\\\0", "ttl"
    policies = {
        "over": Policy(ttl=50, metadata=(("ttl", "1000"), *((text, text) for text in unending))),
        "soon over": Policy(ttl=1.5e-7, pinned=True),
        "later": Policy(ttl=1e9, metadata=(("ttl", "1"),)),
        "never": Policy(metadata=tuple((text, text) for text in unending)),
        "damaged": Policy(ttl=50),
    }
    for name, policy in policies.items():
        owner.engine.sessions.open(name, policy)
    owner.write()
    owner.replicas.db.execute("UPDATE sessions SET used = used - 100")
    owner.replicas.db.execute("UPDATE sessions SET policy = '\\xff00'::bytea WHERE name = 'damaged'")
    assert other.replicas.expired(10) == []
    owner.replicas.end()
    assert sorted(other.replicas.expired(10)) == [("", "over"), ("", "soon over")]


def test_of_several_replicas_that_claim_a_session_one_gets_it(make: Make) -> None:
    owner, others = make("a"), [make(name) for name in "bcde"]
    owner.open()
    owner.write()
    owner.replicas.end()
    seen: list[Owned] = [present(each.replicas.find(KEY)) for each in others]
    got: list[SavedSession] = []

    def claim(each: Replica, found: Owned) -> None:
        if (saved := each.replicas.claim(KEY, found)) is not None:
            got.append(saved)

    threads = [Thread(target=claim, args=pair) for pair in zip(others, seen, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1


def test_a_session_that_its_owner_gives_up_is_anyones(make: Make) -> None:
    owner, other = make("a"), make("b")
    owner.open()
    owner.turn("s", [1])
    owner.write()
    epoch = owner.engine.registry.get("s").epoch
    owner.replicas.give_up(KEY, epoch + 1)
    assert present(owner.replicas.find(KEY)).owner == owner.replicas.number
    owner.replicas.give_up(KEY, epoch)
    assert present(owner.replicas.find(KEY)).owner is None
    owner.turn("s", [2])
    assert owner.write() == {"s"}
    assert len(present(other.take()).records) == 1


def test_a_replica_is_needed_while_a_session_that_was_given_up_has_state_there(make: Make) -> None:
    owner, full, other = make("a"), make("b"), make("c")
    numbers = left, tried, _ = [each.replicas.number for each in (owner, full, other)]
    for name in ("s", "t"):
        owner.engine.sessions.open(name)
    owner.write()
    owner.replicas.give_up(KEY, owner.engine.registry.get("s").epoch, left)
    owner.replicas.give_up(("", "t"), owner.engine.registry.get("t").epoch)
    owner.replicas.end()
    seen = present(other.replicas.find(KEY))
    assert (seen.owner, seen.saved_by) == (None, left)
    assert present(other.replicas.find(("", "t"))).saved_by is None
    assert other.replicas.needed(numbers) == {*numbers}
    claimed = present(full.replicas.claim(KEY, seen))
    full.replicas.give_up(KEY, claimed.epoch, seen.saved_by)  # it has no room
    full.replicas.end()
    assert other.replicas.needed(numbers) == {*numbers} - {tried}
    other.take()
    assert present(other.replicas.find(KEY)).saved_by == other.replicas.number
    assert other.replicas.needed(numbers) == {other.replicas.number}


def test_owners_of_sessions_that_share_pieces_cut_only_what_nobody_has(make: Make) -> None:
    first, second = make("a"), make("b")
    first.open()
    for token in range(1, 4):
        first.turn("s", [token] * 20)
    first.engine.sessions.fork("s", child="t")
    first.engine.sessions.fork("s", turn=2, child="u")
    first.write()
    first.replicas.end()
    second.take(("", "t"))
    third = make("c")
    third.take(KEY)
    third.take(("", "u"))
    second.engine.sessions.rewind("t", position=50)
    third.engine.sessions.rewind("s", position=30)
    third.turn("s", [9])
    third.turn("u", [8])
    assert third.write() == set()
    assert second.write() == set()
    third.engine.sessions.close("u")
    third.write()
    last = make("d")
    second.replicas.end()
    third.replicas.end()
    assert present(last.take(("", "t"))).tokens.tolist() == history(second, "t")
    assert present(last.take()).tokens.tolist() == history(third)
    assert last.replicas.find(("", "u")) is None


def test_changes_whose_commit_was_not_confirmed_are_not_written_twice(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, other = make("a"), make("b")
    other.open()
    other.write()
    whole = replica.journal._db.transaction

    @contextmanager
    def cut_off() -> Iterator[None]:
        with whole():
            yield
        raise psycopg.OperationalError("the connection broke after the commit")

    replica.open()
    replica.engine.sessions.open("t")
    replica.turn("t", [1, 2])
    changes = replica.new_changes()
    with monkeypatch.context() as broken:
        broken.setattr(replica.journal._db, "transaction", cut_off)
        with pytest.raises(psycopg.OperationalError):
            replica.journal.write(changes)
    assert {session.id for session in replica.journal.write(changes)} == {"s"}
    replica.turn("t", [3])
    assert replica.write() == set()
    replica.replicas.end()
    assert present(other.take(("", "t"))).tokens.tolist() == history(replica, "t")


def test_after_a_broken_connection_the_same_changes_can_be_written(make: Make) -> None:
    replica, other = make("a"), make("b")
    replica.open()
    replica.write()
    replica.turn("s", [1])
    changes = replica.new_changes()
    other.replicas.db.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid != pg_backend_pid()"
        " AND application_name = 'tenuto' AND datname = current_database()"
    )
    with pytest.raises(psycopg.OperationalError):
        replica.journal.write(changes)
    assert replica.journal.write(changes) == frozenset()
    replica.replicas.db.close()
    replica.replicas.end()
    assert present(other.take()).tokens.tolist() == history(replica)


def test_a_database_of_another_model_a_later_format_or_another_program_is_refused(make: Make, url: str) -> None:
    make("a")
    others = Replicas(Database(url), "others")
    with pytest.raises(ConfigError, match="tokens mean something else"):
        others.join("http://b", 1)
    others.db.execute("UPDATE fleet SET format = ?", (FORMAT + 1,))
    others.db.close()
    later = Replicas(Database(url), "tokens")
    with pytest.raises(ConfigError, match=f"format {FORMAT + 1}; supported: 1 to {FORMAT}"):
        later.join("http://b", 1)
    later.db.close()
    foreign = Replicas(Database(database()), "tokens")
    foreign.db.execute("CREATE TABLE mine (x INTEGER)")
    with pytest.raises(ConfigError, match="tables of another program"):
        foreign.join("http://b", 1)
    foreign.db.close()


def test_text_that_postgresql_cannot_store_comes_back_unchanged(make: Make) -> None:
    owner, other = make("a"), make("b")
    system = "nul \0, backslash \\, \\0 and \\\\0"
    owner.engine.sessions.open("s", Policy(), system)
    owner.write()
    owner.replicas.end()
    assert present(other.take()).system == system


@pytest.mark.parametrize("damage", ["sessions SET length = 9", "history SET length = 1", "records SET input_end = 1"])
def test_a_damaged_session_is_not_claimed(make: Make, damage: str) -> None:
    owner, other = make("a"), make("b")
    owner.open()
    owner.turn("s", [1, 2])
    owner.write()
    owner.replicas.db.execute(f"UPDATE {damage}")
    owner.replicas.end()
    with pytest.raises(SessionDamaged):
        other.take()
    assert present(other.replicas.find(KEY)).owner == owner.replicas.number


def test_a_replica_that_starts_again_at_its_address_can_have_its_sessions_at_once(make: Make) -> None:
    killed = make("a")
    killed.open()
    killed.turn("s", [1])
    killed.write()
    assert present(make("a").take()).tokens.tolist() == history(killed)


def test_every_turn_in_the_database_has_the_epoch_and_the_owner_that_committed_it(make: Make) -> None:
    first, second = make("a"), make("b")
    first.open()
    first.turn("s", [1])
    first.turn("s", [2])
    first.write()
    first.replicas.end()
    second.take()
    second.turn("s", [3])
    second.write()
    rows = second.replicas.db.execute("SELECT owner, epoch FROM records ORDER BY number").fetchall()
    owners = [owner for owner, _ in rows]
    assert owners == [first.replicas.number] * 2 + [second.replicas.number]
    assert rows[1][1] < rows[2][1] == second.engine.registry.get("s").epoch


def test_nothing_of_an_erased_session_is_left_except_what_others_use(make: Make) -> None:
    replica = make("a")
    replica.open()
    for token in (1, 2):
        replica.turn("s", [token] * 20)
    replica.engine.sessions.fork("s", position=10, child="t")
    replica.engine.sessions.fork("s", position=5, child="u")
    replica.engine.sessions.close("t")
    replica.engine.erasure.erase("s")
    changes = replica.new_changes()
    assert replica.journal.write(changes) == frozenset()
    assert changes[-1].erased.shared == {"u": 5}
    db = replica.journal._db
    assert [bytes(tokens) for (tokens,) in db.execute("SELECT tokens FROM pieces")] == [array("i", [1] * 5).tobytes()]
    assert db.execute("SELECT count(*) FROM records WHERE session != (SELECT id FROM sessions)").fetchone() == (0,)
    replica.replicas.end()
    assert present(make("b").take(("", "u"))).tokens.tolist() == [1] * 5


@pytest.mark.parametrize(
    "story",
    [
        test_journal.test_a_fork_stores_no_token_again_and_nothing_remains_of_closed_sessions,
        test_journal.test_results_are_kept_for_a_while_and_deleted_with_their_session,
        test_journal.test_hidden_sessions_leave_no_trace,
        test_journal.test_a_session_rewound_within_a_turn_comes_back_without_an_extra_token,
    ],
)
def test_a_journal_in_a_database_keeps_sessions_like_one_in_a_file(
    story: Callable[[Journaled, object], None], tmp_path: Path
) -> None:
    journal = opened("postgres", tmp_path)
    story(Journaled(), journal)
    journal.close()


def test_an_erased_session_leaves_nothing_in_a_database_of_what_it_shared() -> None:
    journal = opened("postgres", Path())
    test_journal.test_what_only_an_erased_session_had_of_a_shared_piece_is_cut_off(Journaled(), journal)
    journal.close()
