"""Journals of several sessions, left open, ended or killed, and damaged."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

from tenuto.base.options import Policy
from tenuto.session.journal import Journal
from tenuto.session.journal_mending import Damage
from tenuto.session.records import SavedSession
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
    left_open.append(journal)
    return talk.saved()


left_open: list[Journal] = []


def killed(path: Path) -> dict[str, bytes]:
    """Returns the files that a process would leave if it were killed now."""
    return {each.name: each.read_bytes() for each in path.parent.iterdir() if each.is_file()}


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


def harmed_now(path: Path, *statements: str) -> None:
    left_open.pop().close()
    db = sqlite3.connect(path)
    for statement in statements:
        assert db.execute(statement).rowcount
    db.commit()
    db.close()
