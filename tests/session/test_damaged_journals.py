"""No damage to a journal changes a session's history or makes a session disappear silently."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from tenuto.base.errors import ConfigError
from tenuto.base.options import Policy
from tenuto.session import journal_rows
from tenuto.session.journal import Journal
from tenuto.session.journal_mending import Damage
from tenuto.session.records import SavedSession
from tests.present import present
from tests.session.journals import SESSIONS, began, harmed_now, killed, left_open, put, written
from tests.session.test_journal import Journaled


def stopped(path: Path) -> dict[str, bytes]:
    """Returns the files of a process that has ended."""
    left_open.pop().close()
    return killed(path)


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


def test_one_flipped_bit_in_the_log_is_corrected_unless_it_is_a_high_bit_of_a_word(path: Path, tmp_path: Path) -> None:
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
        assert not lost or at % 4 == 3  # the high bits of a word
    assert whole > 20


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
    """The last frame holds the last commit. Without its page number, size or salt, everything since the previous commit
    would be lost."""
    saved = written(path)
    files = killed(path)
    log, frame = files["journal-wal"], 24 + 4096
    frames = range(32, len(log), frame)
    for at in (*range(32), *range(frames[-1], frames[-1] + 24), *range(frames[1], frames[1] + 24)):
        found, damage = began(put({**files, "journal-wal": flipped(log, at, at % 8)}, tmp_path / "harmed"))
        assert found == saved
        assert damage is None or not damage.changes


def test_a_flipped_bit_under_the_log_and_one_in_it_lose_nothing(path: Path, tmp_path: Path) -> None:
    """The row about the whole journal is in the log, so damage to the file's own copy shows if the log has some."""
    saved = written(path)
    files = killed(path)
    row = files["journal"].index(b"tokens", 4096)
    journal, log = flipped(files["journal"], row, 3), flipped(files["journal-wal"], 32 + 24 + 2000, 1)
    found, damage = began(put({**files, "journal": journal, "journal-wal": log}, tmp_path / "harmed"))
    assert found == saved
    assert not present(damage).changes


def test_a_flipped_bit_in_a_salt_does_not_bring_older_frames_back(path: Path, tmp_path: Path) -> None:
    """SQLite restarts a log at its beginning, over frames whose changes are already in the database."""
    saved, journal, talk = written(path), left_open[-1], Journaled()
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
    left_open.pop().close()
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


def test_sessions_are_read_some_at_a_time_and_a_damaged_one_only_loses_itself(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = written(path)
    monkeypatch.setattr(journal_rows, "TOGETHER", 2)
    harmed_now(path, HARMS["tokens"], "DELETE FROM records WHERE session = 6")
    found, damage = began(path)
    assert found == [saved[number] for number in (0, 1, 3, 4)]
    assert [each.name for each in present(damage).sessions] == [SESSIONS[2], SESSIONS[5]]


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


def test_a_session_without_its_row_is_named_by_number_and_one_without_a_trace_is_counted(path: Path) -> None:
    saved = written(path)
    harmed_now(path, "DELETE FROM sessions WHERE id = 2")
    found, damage = began(path)
    assert len(found) == len(saved) - 1
    assert [each.name for each in present(damage).sessions] == ["number 2"]
    assert present(damage).missing == 0
    where = "WHERE session = 4"
    left_open.append(Journal(path, "tokens"))
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
