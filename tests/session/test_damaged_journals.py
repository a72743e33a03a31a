"""No damage to a journal changes a session's history or makes a session disappear silently."""

from __future__ import annotations

import resource
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from tenuto.base.errors import ConfigError
from tenuto.base.options import Policy
from tenuto.session.journal import VACUUMED, Journal
from tenuto.session.journal_mending import Damage
from tenuto.session.journal_rows import APPLICATION
from tenuto.session.records import SavedSession
from tests.present import present
from tests.session.test_journal import Journaled

SESSIONS = [f"session {i}" for i in range(6)]


def written(path: Path) -> list[SavedSession]:
    """Writes a journal of six sessions, two of which are forks, change by change, and leaves it open."""
    talk = Journaled()
    journal = Journal(path, "tokens")
    for number, name in enumerate(SESSIONS[:4]):
        talk.engine.sessions.open(name, Policy(metadata=(("number", str(number)),)))
        journal.write(talk.new_changes())
    for turn in range(4):
        for number, name in enumerate(SESSIONS[:4]):
            talk.begin(talk.engine.registry.get(name), [1 + number, 2 + turn] * 30, 5)
            talk.play()
            journal.write(talk.new_changes())
    for name, turn in zip(SESSIONS[4:], (2, 3), strict=True):
        talk.engine.sessions.fork(SESSIONS[0], turn=turn, child=name)
    talk.engine.sessions.rewind(SESSIONS[1], position=100)
    journal.write(talk.new_changes())
    _open.append(journal)
    return talk.saved()


_open: list[Journal] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _open:
        _open.pop().close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def killed(path: Path) -> dict[str, bytes]:
    """Returns the files that a process would leave if it were killed now."""
    return {each.name: each.read_bytes() for each in path.parent.iterdir() if each.is_file()}


def stopped(path: Path) -> dict[str, bytes]:
    """Returns the files of a process that has ended."""
    _open.pop().close()
    return killed(path)


def put(files: dict[str, bytes], directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return directory / "journal"


def began(path: Path) -> tuple[list[SavedSession], Damage | None]:
    """Returns the sessions with which a process begins, and its report of the others."""
    journal = Journal(path, "tokens")
    try:
        found = list(journal.sessions())
        damage = journal.mend()
        assert list(journal.sessions()) == found
        assert journal.mend() is None
    finally:
        journal.close()
    return found, damage


def flipped(content: bytes, at: int, bit: int) -> bytes:
    return content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :]


def check(found: Sequence[SavedSession], damage: Damage | None, saved: Sequence[SavedSession]) -> set[str]:
    """Returns the names of missing sessions, checked to have all been named or counted."""
    assert [each for each in saved if each in found] == found
    lost = {each.session for each in saved} - {each.session for each in found}
    if lost and (damage is None or not (damage.missing or damage.changes)):
        named = {each.name for each in present(damage).sessions}
        assert lost <= named or len(named) >= len(lost)
    if damage is not None:
        assert damage.aside.exists()
    return lost


def test_one_flipped_bit_loses_at_most_its_own_session_which_is_named(path: Path, tmp_path: Path) -> None:
    saved, rng = written(path), Random(5)
    files = stopped(path)
    refused, lost = 0, 0
    for _ in range(120):
        at, bit = rng.randrange(len(files["journal"])), rng.randrange(8)
        harmed = put({**files, "journal": flipped(files["journal"], at, bit)}, tmp_path / "harmed")
        try:
            found, damage = began(harmed)
        except ConfigError:
            refused += 1
            assert at < 4096  # the first page identifies the file
            continue
        lost += bool(check(found, damage, saved))
    assert refused < 12
    assert lost > 5


def test_one_flipped_bit_in_the_log_loses_at_most_its_own_part(path: Path, tmp_path: Path) -> None:
    saved, rng = written(path), Random(6)
    files = killed(path)
    assert len(files["journal-wal"]) > 100_000
    whole = 0
    for _ in range(24):
        at, bit = rng.randrange(len(files["journal-wal"])), rng.randrange(8)
        harmed = put({**files, "journal-wal": flipped(files["journal-wal"], at, bit)}, tmp_path / "harmed")
        found, damage = began(harmed)
        lost = check(found, damage, saved)
        assert not present(damage).changes
        whole += not lost
        assert len(lost) <= 4
    assert whole > 8


def test_a_flipped_bit_in_the_logs_copy_of_the_schema_loses_nothing(path: Path, tmp_path: Path) -> None:
    """Without a schema SQLite reads no row; the schema in the database itself never changes."""
    saved, rng = written(path), Random(7)
    files = killed(path)
    log, frame = files["journal-wal"], 24 + 4096
    places = [at for at in range(32, len(log), frame) if log[at : at + 4] == (1).to_bytes(4, "big")]
    assert places
    for _ in range(24):
        at, bit = rng.choice(places) + 24 + rng.randrange(4096), rng.randrange(8)
        found, damage = began(put({**files, "journal-wal": flipped(log, at, bit)}, tmp_path / "harmed"))
        assert found == saved
        assert not present(damage).changes


def test_a_flipped_bit_in_the_header_of_the_log_or_of_a_frame_loses_nothing(path: Path, tmp_path: Path) -> None:
    """The last frame holds the last commit. Without its page number, size or salt everything since the one before would
    be lost."""
    saved = written(path)
    files = killed(path)
    log, frame = files["journal-wal"], 24 + 4096
    frames = range(32, len(log), frame)
    for at in (*range(32), *range(frames[-1], frames[-1] + 24), *range(frames[1], frames[1] + 24)):
        found, damage = began(put({**files, "journal-wal": flipped(log, at, at % 8)}, tmp_path / "harmed"))
        assert found == saved
        assert damage is None or not damage.changes


def test_a_flipped_bit_in_a_salt_does_not_bring_older_frames_back(path: Path, tmp_path: Path) -> None:
    """SQLite writes a log anew from its beginning, over frames whose changes are in the database."""
    saved, journal, talk = written(path), _open[-1], Journaled()
    journal._db.execute("PRAGMA wal_checkpoint(RESTART)")
    talk.engine.sessions.open("another", Policy())
    journal.write(talk.new_changes())
    saved, files = saved + talk.saved(), killed(path)
    log, frame = files["journal-wal"], 24 + 4096
    assert log[16:24] == log[40:48] != log[-frame + 8 : -frame + 16]
    for at in (*range(16, 24), *range(40, 48)):
        for bit in range(8):
            found, damage = began(put({**files, "journal-wal": flipped(log, at, bit)}, tmp_path / "harmed"))
            assert found == saved
            assert damage is None or not damage.changes


@pytest.mark.parametrize("harm", ["cut", "gone", "of nothing but zeros"])
def test_a_lost_log_is_noticed_and_the_lost_changes_are_counted(harm: str, path: Path, tmp_path: Path) -> None:
    saved = written(path)
    files = killed(path)
    log = files.pop("journal-wal")
    if harm == "cut":
        files["journal-wal"] = log[: len(log) // 2]
    elif harm == "of nothing but zeros":
        files["journal-wal"] = bytes(len(log))
    found, damage = began(put(files, tmp_path / "harmed"))
    assert present(damage).changes > 0
    check([each for each in found if each in saved], damage, saved)


def test_a_transaction_unfinished_when_the_process_was_killed_is_not_damage(path: Path, tmp_path: Path) -> None:
    saved = written(path)
    files = killed(path)
    torn = files["journal-wal"] + files["journal-wal"][-4120:-2000]
    found, damage = began(put({**files, "journal-wal": torn}, tmp_path / "harmed"))
    assert (found, damage) == (saved, None)


def test_a_new_journal_in_place_of_a_lost_one_is_logged(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(path)
    _open.pop().close()
    path.write_bytes(b"")
    assert began(path) == ([], None)
    assert "the journal that was there before, with 25 changes, is gone" in caplog.text


HARMS = {
    "tokens": "UPDATE pieces SET tokens = zeroblob(length(tokens)) "
    "WHERE id = (SELECT min(piece) FROM history WHERE session = 3)",
    "another piece": "UPDATE history SET piece = piece + 1 WHERE session = 3 AND position = 0",
    "a piece is gone": "DELETE FROM history WHERE session = 3 AND position > 180",
    "a turn is gone": "DELETE FROM records WHERE session = 3 AND number = 4",
    "the order of turns": "UPDATE records SET input_end = input_end + 1 WHERE session = 3 AND number = 2",
    "policy": "UPDATE sessions SET policy = replace(policy, '2', '3') WHERE id = 3",
    "another's": "UPDATE sessions SET tenant = 'another' WHERE id = 3",
    "version": "UPDATE sessions SET version = version - 1 WHERE id = 3",
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_session_is_set_aside_and_named_and_the_rest_continues(harm: str, path: Path) -> None:
    saved = written(path)
    harmed_now(path, HARMS[harm])
    found, damage = began(path)
    assert found == [each for each in saved if each.session != SESSIONS[2]]
    (named,) = present(damage).sessions
    assert (named.name, named.tenant) == (SESSIONS[2], "another" if harm == "another's" else "")
    assert sqlite3.connect(present(damage).aside).execute("SELECT count(*) FROM sessions").fetchone() == (6,)
    talk = Journaled()
    journal = Journal(path, "tokens")
    talk.engine.sessions.open(SESSIONS[2])
    journal.write(talk.new_changes())  # its name is free
    assert len(list(journal.sessions())) == 6
    journal.close()


def test_a_damaged_journal_is_kept_where_files_cannot_be_linked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    written(path)
    harmed_now(path, HARMS["tokens"])
    monkeypatch.setattr(Path, "hardlink_to", refuse)
    assert len(began(path)[0]) == 5
    db = sqlite3.connect(f"{path}.damaged-1")
    assert db.execute("SELECT count(*) FROM sessions").fetchone() == (6,)
    db.close()


def harmed_now(path: Path, *statements: str) -> None:
    _open.pop().close()
    db = sqlite3.connect(path)
    for statement in statements:
        assert db.execute(statement).rowcount
    db.commit()
    db.close()


def test_a_session_without_its_row_is_named_by_number_and_one_without_a_trace_is_counted(path: Path) -> None:
    saved = written(path)
    harmed_now(path, "DELETE FROM sessions WHERE id = 2")
    found, damage = began(path)
    assert len(found) == len(saved) - 1
    assert [each.name for each in present(damage).sessions] == ["number 2"]
    assert present(damage).missing == 0
    where = "WHERE session = 4"
    _open.append(Journal(path, "tokens"))
    harmed_now(
        path, *(f"DELETE FROM {table} {where}" for table in ("history", "records")), "DELETE FROM sessions WHERE id = 4"
    )
    found, damage = began(path)
    assert (len(found), len(present(damage).sessions), present(damage).missing) == (len(saved) - 2, 0, 1)


def test_writing_does_not_make_rows_damaged_in_use_look_whole(path: Path) -> None:
    """A fork or a rewind of damaged rows leaves damaged rows."""
    talk = Journaled()
    journal = Journal(path, "tokens")
    for name in ("s", "t"):
        talk.begin(talk.engine.sessions.open(name), [1, 2, 3] * 10, 4)
        talk.play()
    journal.write(talk.new_changes())
    journal._db.execute("UPDATE history SET length = 33 WHERE session = 1")
    journal._db.execute("UPDATE records SET input_end = 29 WHERE session = 1")
    talk.engine.sessions.fork("s", child="fork")
    talk.engine.sessions.rewind("s", position=20)
    journal.write(talk.new_changes())
    journal.close()
    found, damage = began(path)
    assert [each.session for each in found] == ["t"]
    assert {each.name for each in present(damage).sessions} == {"s", "fork"}


def test_a_journal_is_not_rewritten_if_its_damaged_file_cannot_be_kept(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(path)
    harmed_now(path, HARMS["tokens"])
    before = path.read_bytes()

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tenuto.session.journal_mending.create_private", no_room)
    journal = Journal(path, "tokens")
    list(journal.sessions())
    with pytest.raises(ConfigError, match=r"damaged \('session 2'\).*No space left"):
        journal.mend()
    journal.close()
    assert path.read_bytes() == before
    monkeypatch.undo()
    assert len(began(path)[0]) == 5


def test_the_journal_of_another_model_is_not_mistaken_for_a_damaged_one(path: Path) -> None:
    written(path)
    harmed_now(path, "UPDATE journal SET changes = changes + 1")
    journal = Journal(path, "other tokens")
    assert list(journal.sessions()) == []
    with pytest.raises(ConfigError, match="of another model"):
        journal.mend()
    journal.close()
    assert len(began(path)[0]) == 6


# -- formats

FORMAT_2 = """
CREATE TABLE model (fingerprint TEXT NOT NULL);
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL, policy BLOB NOT NULL, system TEXT,
    version INTEGER NOT NULL, used REAL, UNIQUE (tenant, name)
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
CREATE TABLE results (
    number INTEGER PRIMARY KEY, session INTEGER NOT NULL, key TEXT NOT NULL, turn BLOB NOT NULL, UNIQUE (session, key)
);
"""


def as_format_2(path: Path, older: Path) -> None:
    """Rewrites a journal as the previous release wrote it."""
    _open.pop().close()
    db = sqlite3.connect(older)
    db.execute("PRAGMA journal_mode = WAL")
    db.executescript(FORMAT_2)
    db.execute("ATTACH ? AS later", (str(path),))
    db.execute("INSERT INTO model SELECT fingerprint FROM later.journal")
    for table, columns in (
        ("sessions", "id, tenant, name, policy, system, version, used"),
        ("pieces", "id, tokens"),
        ("history", "session, position, piece, length"),
        ("records", "session, number, start, input_end, end, conversation, cut"),
        ("results", "number, session, key, turn"),
    ):
        db.execute(f"INSERT INTO {table} SELECT {columns} FROM later.{table}")
    db.commit()
    db.execute(f"PRAGMA application_id = {APPLICATION}")
    db.execute("PRAGMA user_version = 2")
    db.close()


def test_a_journal_of_the_previous_format_is_rewritten_with_checksums(path: Path, tmp_path: Path) -> None:
    saved = written(path)
    older = tmp_path / "older"
    as_format_2(path, older)
    assert began(older) == (saved, None)
    db = sqlite3.connect(older)
    assert db.execute("PRAGMA user_version").fetchone() == (3,)
    assert db.execute("SELECT count(*) FROM pieces").fetchone() == (14,)  # forks share them as before
    db.close()
    assert began(older) == (saved, None)
    assert sorted(each.name for each in tmp_path.iterdir() if "older" in each.name and each.stat().st_size) == ["older"]


def test_a_damaged_session_does_not_keep_a_journal_of_the_previous_format_from_opening(
    path: Path, tmp_path: Path
) -> None:
    saved = written(path)
    older = tmp_path / "older"
    as_format_2(path, older)
    db = sqlite3.connect(older)
    db.execute("DELETE FROM history WHERE session = 2 AND position = 0")
    db.commit()
    db.close()
    journal = Journal(older, "tokens")
    assert list(journal.sessions()) == [each for each in saved if each.session != SESSIONS[1]]
    assert [each.name for each in present(journal.mend()).sessions] == [SESSIONS[1]]
    journal.close()
    assert (tmp_path / "older.damaged-1").exists()


@pytest.mark.parametrize("killed_in", ["written_anew", "take_place"])
def test_a_process_killed_while_it_rewrites_a_journal_loses_nothing(
    killed_in: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = written(path)
    older = tmp_path / "older"
    as_format_2(path, older)

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    if killed_in == "written_anew":
        monkeypatch.setattr("tenuto.session.journal_mending.write_header", kill)
    else:
        monkeypatch.setattr("tenuto.session.journal.take_place", kill)
    with pytest.raises(KeyboardInterrupt):
        Journal(older, "tokens")
    monkeypatch.undo()
    assert began(older) == (saved, None)


# -- room


@contextmanager
def no_room() -> Iterator[None]:
    """Makes every write to a file fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_killed_processs_journal_is_opened_though_the_disk_is_full(path: Path, tmp_path: Path) -> None:
    saved = written(path)
    files = killed(path)
    left = put(files, tmp_path / "left")
    with no_room():
        journal = Journal(left, "tokens")
        assert list(journal.sessions()) == saved
        assert journal.mend() is None
        talk = Journaled()
        talk.engine.sessions.open("new")
        changes = talk.new_changes()
        with pytest.raises(sqlite3.OperationalError):
            journal.write(changes)
    journal.write(changes)
    assert len(list(journal.sessions())) == len(saved) + 1
    journal.close()


def fill(talk: Journaled, journal: Journal, sessions: int) -> None:
    for number in range(sessions):
        name = f"large {number}"
        talk.engine.sessions.open(name)
        for _ in range(4):
            talk.engine.sessions.adopt(name, [7] * 2000, [8])
        journal.write(talk.new_changes())


@pytest.mark.parametrize("ending", ["close", "rewind"])
def test_the_space_of_deleted_sessions_is_reclaimed(ending: str, path: Path) -> None:
    talk = Journaled(10_000)
    journal = Journal(path, "tokens")
    kept = talk.engine.sessions.open("kept")
    fill(talk, journal, 60)
    while journal.tidy():
        pass
    full = path.stat().st_size + Path(f"{path}-wal").stat().st_size
    for number in range(60):
        if ending == "close":
            talk.engine.sessions.close(f"large {number}")
        else:
            talk.engine.sessions.rewind(f"large {number}", position=0)
    journal.write(talk.new_changes())
    pieces = 0
    while journal.tidy():
        pieces += 1
    assert pieces > 0
    assert path.stat().st_size + Path(f"{path}-wal").stat().st_size < full // 4
    assert {each.session for each in journal.sessions()} == {session.id for session in talk.engine.registry}
    assert journal.mend() is None
    assert kept.id == "kept"
    journal.close()


def test_a_file_that_cannot_shrink_is_left_as_it_is(path: Path) -> None:
    Journal(path, "tokens").close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA auto_vacuum = NONE")
    db.execute("VACUUM")
    db.close()
    talk = Journaled(10_000)
    journal = Journal(path, "tokens")
    fill(talk, journal, 60)
    for number in range(60):
        talk.engine.sessions.close(f"large {number}")
    journal.write(talk.new_changes())
    assert not journal.tidy()
    journal.close()


def test_a_little_free_space_is_left(path: Path) -> None:
    talk = Journaled()
    journal = Journal(path, "tokens")
    talk.begin(talk.engine.sessions.open("s"), [1] * 100, 2)
    talk.play()
    talk.engine.sessions.close("s")
    journal.write(talk.new_changes())
    assert not journal.tidy()
    assert VACUUMED > 100
    journal.close()
