"""The journal of a world: the next engine begins with exactly what the last one committed, even from a damaged file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from tenuto.session.changes import Change
from tenuto.session.journal import Journal
from tenuto.session.journal_mending import Damage
from tenuto.session.records import SavedSession
from tenuto.session.session import Session
from tests.sim.found import Found

DAMAGED = 0.5
"""The probability that a bit of the files is flipped before the next engine reads them."""
TIDIED = 0.3
"""The probability that the journal gives free space back after a write."""
PAGE = 4096
"""In bytes. The first page identifies the file; a journal without it is refused."""
WINDOW = 48
"""In bytes: 12 tokens, which have to be found in no file if nobody has them any more."""
_MEMORY = Path("/dev/shm")


class WorldJournal:
    """A journal in real files. They are written when an engine ends, in a few transactions, so that worlds stay
    fast."""

    def __init__(self, seed: int, *, ends: bool) -> None:
        """`ends`: whether engines of the world ever end."""
        self._ends = ends
        self._chance = Random(seed * 13 + 5)
        self._folder: TemporaryDirectory[str] | None = None
        self._generation = 0
        self._changes: list[Change] = []
        self._journal: Journal | None = None
        self.erased: dict[Session, bytes] = {}  # the histories of erased sessions, until that is written
        self.harmed = False  # whether a bit was flipped before the last start

    def note(self, changes: Sequence[Change]) -> None:
        """Notes changes that have been committed."""
        if self._ends:
            self._changes += changes

    def begin_again(self) -> tuple[list[SavedSession], Damage | None]:
        """Kills the process, and sometimes damages its files. Returns the sessions that the next engine begins with,
        and the losses that the journal reports."""
        path = self._path()
        journal = self._journal or Journal(path, "tokens")
        while self._changes:
            count = self._chance.choice((1, 5, 30, 200))
            journal.write(self._changes[:count])
            journal.forget_erased()
            self._check_erased(journal, self._changes[:count])
            del self._changes[:count]
            if self._chance.random() < TIDIED:
                journal.tidy(whole=True)
        left = {each.name: each.read_bytes() for each in path.parent.iterdir() if "damaged" not in each.name}
        journal.close()
        self._generation += 1
        path = self._path()
        for name, content in self._harmed(left).items():
            (path.parent / name).write_bytes(content)
        self._journal = Journal(path, "tokens")
        return list(self._journal.sessions()), self._journal.mend()

    def _check_erased(self, journal: Journal, changes: Sequence[Change]) -> None:
        """Checks that the files have only tokens of sessions that the journal still has."""
        if any(change.kind == "close" and change.session in self.erased for change in changes):
            raise Found("erased", "a session that was erased is only closed in the journal")
        erased = [self.erased.pop(change.session, b"") for change in changes if change.kind == "erase"]
        if not any(erased):
            return
        files = [each.read_bytes() for each in self._path().parent.iterdir() if "damaged" not in each.name]
        present = [saved.tokens.tobytes() for saved in journal.sessions()]
        for history in erased:
            for first in range(0, len(history) - WINDOW + 1, WINDOW):
                window = history[first : first + WINDOW]
                if any(window in each for each in files) and not any(window in each for each in present):
                    raise Found("erased", f"the journal still has {window.hex()} of an erased session")

    def _path(self) -> Path:
        if self._folder is None:
            self._folder = TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None)
        folder = Path(self._folder.name, str(self._generation))
        folder.mkdir(exist_ok=True)
        return folder / "journal"

    def _harmed(self, files: dict[str, bytes]) -> dict[str, bytes]:
        self.harmed = False
        if self._chance.random() < DAMAGED:
            name, first = self._chance.choice((("journal", PAGE), ("journal-wal", 0)))
            content = bytearray(files.get(name, b""))
            if len(content) > first:
                content[self._chance.randrange(first, len(content))] ^= 1 << self._chance.randrange(8)
                self.harmed = True
                return {**files, name: bytes(content)}
        return files
