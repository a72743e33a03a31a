"""The journal contains exactly the committed state: whatever happens to sessions, they come back from it unchanged."""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.base.errors import ConfigError, TenutoError
from tenuto.base.options import Policy, TurnParams
from tenuto.base.wire.messages import StartTurn
from tenuto.engine.engine import StepReport
from tenuto.engine.thread.journaling import AnyJournal
from tenuto.session.changes import Change
from tenuto.session.journal import Journal
from tenuto.session.journal_rows import StoredSessions
from tenuto.session.postgres.database import Database
from tenuto.session.postgres.journal import PostgresJournal
from tenuto.session.postgres.replicas import Replicas
from tenuto.session.records import SavedSession
from tenuto.session.results import MAX_RESULTS
from tests.engine.test_saved_sessions import STEPS, Talk, take
from tests.postgres import database

ENDINGS = ("close", "ephemeral", "branch")


class Journaled(Talk):
    """A talk whose changes are kept for a journal."""

    def __init__(self, context_length: int = 2000) -> None:
        super().__init__(context_length)
        self._changes: list[Change] = []
        self._step = self.engine.step
        self.engine.step = self._step_and_note  # type: ignore[method-assign] # stories step, too

    def _step_and_note(self) -> StepReport:
        report = self._step()
        self._changes += report.changes
        return report

    def new_changes(self) -> list[Change]:
        changes = self._changes + self.engine.outcomes.take_changes()
        self._changes = []
        return changes

    def saved(self) -> list[SavedSession]:
        return [session.saved() for session in self.engine.registry if not session.policy.ephemeral]


def opened(kind: str, path: Path) -> AnyJournal:
    """Returns a new journal: in a file at `path`, or of a fleet's only replica."""
    if kind == "sqlite":
        return Journal(path, "tokens")
    url = database()
    replicas = Replicas(Database(url), "tokens")
    replicas.join("http://a", 60)
    replicas.db.close()
    return PostgresJournal(Database(url), "tokens", replicas.number)


def all_in(journal: Any) -> list[SavedSession]:
    """Returns all sessions in a journal, in the order in which they were opened."""
    if isinstance(journal, Journal):
        return list(journal.sessions())
    numbers = [number for (number,) in journal._db.execute("SELECT id FROM sessions ORDER BY id")]
    stored = StoredSessions(journal._db, "tokens")
    return [saved for number in numbers for saved in stored.together([number])]


def reopened(path: Path) -> list[SavedSession]:
    journal = Journal(path, "tokens")
    try:
        return list(journal.sessions())
    finally:
        journal.close()


KINDS = ("sqlite", "postgres")


def end(talk: Journaled, ending: str, n: int) -> None:
    """Ends or opens other sessions than the story's."""
    sessions = list(talk.engine.registry)
    if ending == "close" and len(sessions) > 1:
        talk.engine.sessions.close(sessions[n % (len(sessions) - 1) + 1].id)
    elif ending == "ephemeral":
        talk.begin(talk.engine.sessions.open(None, Policy(ephemeral=True)), [1, 2], n)
    elif ending == "branch":
        passing = talk.engine.sessions.open(None, Policy(ephemeral=True))
        talk.engine.sessions.adopt(passing.id, [1, 2, 3], [4])
        talk.engine.sessions.fork(passing.id, position=n % 5)
        talk.engine.sessions.close(passing.id)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from((*STEPS, *ENDINGS)), st.integers(0, 9)), max_size=14),
    together=st.integers(1, 5),
)
def test_sessions_come_back_as_they_were_committed(kind: str, steps: list[tuple[str, int]], together: int) -> None:
    talk = Journaled()
    session = talk.open("Be brief.")
    with TemporaryDirectory() as directory:
        path = Path(directory) / "journal"
        journal = opened(kind, path)
        for number, (step, n) in enumerate([("chat", 3), *steps]):
            try:
                if step in ENDINGS:
                    end(talk, step, n)
                else:
                    session = take(talk, session, step, n, f"message {number}")
            except TenutoError:  # not possible here; nothing has changed then
                continue
            finally:
                talk.play()
            if session.id not in {one.id for one in talk.engine.registry}:
                session = next(iter(talk.engine.registry))
            if number % together == 0:
                journal.write(talk.new_changes())
                assert all_in(journal) == talk.saved()
        journal.write(talk.new_changes())
        assert all_in(journal) == talk.saved()
        journal.close()
        assert kind == "postgres" or reopened(path) == talk.saved()


@pytest.fixture
def talk() -> Journaled:
    return Journaled()


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    opened = Journal(path, "tokens")
    yield opened
    opened.close()


def counts(journal: Any) -> dict[str, int]:
    """Returns the number of rows of each table."""
    tables = ("sessions", "pieces", "history", "records")
    return {table: journal._db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables}


def test_a_fork_stores_no_token_again_and_nothing_remains_of_closed_sessions(talk: Journaled, journal: Any) -> None:
    session = talk.open()
    for _ in range(10):
        talk.begin(session, [1] * 50, 5)
        talk.play()
    journal.write(talk.new_changes())
    before = counts(journal)
    talk.engine.sessions.fork("s", child="t")
    talk.engine.sessions.rewind("s", turn=4)
    journal.write(talk.new_changes())
    assert counts(journal)["pieces"] == before["pieces"] == 10
    talk.engine.sessions.close("t")
    journal.write(talk.new_changes())
    assert counts(journal)["pieces"] == 4
    talk.engine.sessions.close("s")
    journal.write(talk.new_changes())
    assert counts(journal) == dict.fromkeys(before, 0)


def test_changes_that_cannot_all_be_written_leave_the_journal_unchanged(talk: Journaled, journal: Journal) -> None:
    session = talk.open()
    journal.write(talk.new_changes())
    committed = talk.saved()
    (pages,) = journal._db.execute("PRAGMA page_count").fetchone()
    journal._db.execute(f"PRAGMA max_page_count = {pages}")  # like a full disk
    for _ in range(3):
        talk.begin(session, [7] * 600, 3)
        talk.play()
    changes = talk.new_changes()
    with pytest.raises(sqlite3.OperationalError, match="full"):
        journal.write(changes)
    assert list(journal.sessions()) == committed
    journal._db.execute("PRAGMA max_page_count = 1000000")
    journal.write(changes)
    assert list(journal.sessions()) == talk.saved()


def test_a_journal_is_used_by_one_process_at_a_time(
    journal: Journal, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.session.journal._LOCK_SECONDS", 0.01)
    with pytest.raises(ConfigError, match="is locked"):
        Journal(path, "tokens")
    assert list(journal.sessions()) == []


def test_a_journal_of_other_tokens_of_a_later_format_or_of_no_format_is_refused(path: Path) -> None:
    Journal(path, "tokens").close()
    with pytest.raises(ConfigError, match="tokens mean something else"):
        Journal(path, "others")
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 6")
    db.close()
    with pytest.raises(ConfigError, match="format 6; supported: 1 to 5"):
        Journal(path, "tokens")
    other = path.with_name("notes.txt")
    other.write_text("These are notes and no journal. " * 100)
    with pytest.raises(ConfigError, match="not a database"):
        Journal(other, "tokens")
    assert other.read_text().startswith("These are notes")
    foreign = path.with_name("foreign.db")
    db = sqlite3.connect(foreign)
    db.execute("CREATE TABLE mine (x)")
    db.close()
    before = foreign.read_bytes()
    with pytest.raises(ConfigError, match="database of another program"):
        Journal(foreign, "tokens")
    assert foreign.read_bytes() == before
    with pytest.raises(ConfigError, match="unable to open"):
        Journal(path / "below" / "a file", "tokens")


FORMAT_1 = """
CREATE TABLE model (fingerprint TEXT NOT NULL);
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL, policy BLOB NOT NULL, system TEXT,
    version INTEGER NOT NULL, UNIQUE (tenant, name)
);
CREATE TABLE pieces (id INTEGER PRIMARY KEY, tokens BLOB NOT NULL);
CREATE TABLE history (
    session INTEGER NOT NULL, position INTEGER NOT NULL, piece INTEGER NOT NULL, length INTEGER NOT NULL,
    PRIMARY KEY (session, position)
) WITHOUT ROWID;
CREATE INDEX users_of_pieces ON history (piece);
CREATE TABLE records (
    session INTEGER NOT NULL, number INTEGER NOT NULL, start INTEGER NOT NULL, input_end INTEGER NOT NULL,
    end INTEGER NOT NULL, conversation BLOB, cut INTEGER NOT NULL, PRIMARY KEY (session, number)
) WITHOUT ROWID;
INSERT INTO model VALUES ('tokens');
INSERT INTO sessions VALUES (1, '', 's', '{"priority": 3}', 'Be brief.', 1);
INSERT INTO pieces VALUES (1, x'0100000002000000');
INSERT INTO history VALUES (1, 0, 1, 2);
INSERT INTO records VALUES (1, 1, 0, 1, 2, NULL, 0);
PRAGMA user_version = 1;
PRAGMA application_id = 1413828181;
"""


def test_a_journal_of_an_earlier_format_is_upgraded(talk: Journaled, path: Path) -> None:
    db = sqlite3.connect(path)
    db.executescript(FORMAT_1)
    db.close()
    (saved,) = reopened(path)
    assert (saved.session, saved.policy.priority, saved.tokens.tolist(), saved.used) == ("s", 3, [1, 2], None)
    for _ in range(2):
        journal = Journal(path, "tokens")
        assert next(journal.sessions()) == saved
        talk.engine.sessions.open(None)
        journal.write(talk.new_changes())
        journal.close()
    assert len(reopened(path)) == 3


def test_what_only_an_erased_session_had_of_a_shared_piece_is_cut_off(talk: Journaled, journal: Any) -> None:
    talk.begin(talk.open(), [1] * 20, 0)
    talk.play()
    for kept, child in ((10, "t"), (5, "u")):
        talk.engine.sessions.fork("s", position=kept, child=child)
    journal.write(talk.new_changes())
    talk.engine.erasure.erase("s")
    journal.write(talk.new_changes())
    ((tokens,),) = journal._db.execute("SELECT tokens FROM pieces").fetchall()
    assert bytes(tokens) == array("i", [1] * 10).tobytes()


def test_results_are_kept_for_a_while_and_deleted_with_their_session(talk: Journaled, journal: Any) -> None:
    session = talk.open()
    for number in range(MAX_RESULTS + 5):
        command = StartTurn(
            kind="turn", tenant="", session="s", params=TurnParams(max_new_tokens=2), once=(f"key {number}", b"digest")
        )
        prepared = talk.renderer.prepare(talk.dispatcher.basis(command), talk.prompt([number]), generate=True)
        talk.dispatcher.execute(command, prepared)
        talk.play()
        journal.write(talk.new_changes())
    (saved,) = all_in(journal)
    assert saved == session.saved()
    assert [key for key, _ in saved.results] == [f"key {number}" for number in range(5, MAX_RESULTS + 5)]
    restored = Talk().engine.sessions.restore(saved)
    for number in (4, 5, MAX_RESULTS + 4):
        found = restored.results.find(f"key {number}")
        if number == 4:
            assert found is None
            continue
        assert found is not None
        record = session.records[number]
        assert list(found.output.tokens) == session.history[record.input_end : record.end].tolist()
        assert found.output.result is not None
        assert found.output.result.version == number + 1
    talk.engine.sessions.fork("s", child="t")
    assert not talk.engine.registry.get("t").results.all()
    talk.engine.sessions.close("s")
    journal.write(talk.new_changes())
    assert not journal._db.execute("SELECT count(*) FROM results").fetchone()[0]


def test_hidden_sessions_leave_no_trace(talk: Journaled, journal: Any) -> None:
    hidden = talk.engine.sessions.open("hidden", Policy(hidden=True))
    talk.begin(hidden, [1, 2, 3], 2)
    talk.play()
    journal.write(talk.new_changes())
    assert counts(journal) == dict.fromkeys(("sessions", "pieces", "history", "records"), 0)


def test_every_write_is_flushed(journal: Journal) -> None:
    assert journal._db.execute("PRAGMA synchronous").fetchone() == (2,)
    assert journal._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_session_rewound_within_a_turn_comes_back_without_an_extra_token(talk: Journaled, journal: Any) -> None:
    session = talk.open()
    talk.begin(session, [1] * 50, 5)
    talk.play()
    talk.engine.sessions.rewind("s", position=20)
    journal.write(talk.new_changes())
    assert [list(one.tokens) for one in all_in(journal)] == [[1] * 20]
