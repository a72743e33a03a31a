"""The journal of one replica of a fleet, in the database that all replicas share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from threading import Lock

from tenuto.session.changes import Change
from tenuto.session.journal_changes import ChangeTables
from tenuto.session.journal_rows import checksum_of
from tenuto.session.postgres.database import Database
from tenuto.session.records import SavedSession
from tenuto.session.session import Session


class PostgresJournal:
    """Writes the changes of the sessions that one replica owns. One thread uses it at a time.

    Invariant: a change is committed only in a transaction that has found its session owned by this replica, in the
    epoch in which this replica opened or claimed it, and keeps the session's row locked. A replica that claims the
    session changes that row, so no change is committed in an epoch after a later epoch began. No two ownerships have
    the same epoch.
    """

    def __init__(self, db: Database, fingerprint: str, replica: int) -> None:
        """`replica`: the number of this replica. `db`, `fingerprint`: see `Replicas`, which has set up the database."""
        self._db = db
        self._replica = replica
        self._tables = ChangeTables(self._db, fingerprint)
        self._changes = 0  # those known to be committed
        self._attempted: tuple[int, frozenset[Session]] = (
            0,
            frozenset(),
        )  # the number of changes after the last try; its refusals
        self._opened: dict[Session, int] = {}  # the sessions that the last try opened, with their epochs
        self.writing = Lock()  # held while changes are written; otherwise sessions in the database have epochs

    @property
    def path(self) -> str:
        """Where the journal is, for messages."""
        return self._db.place

    def close(self) -> None:
        self._db.close()

    def sessions(self) -> Iterator[SavedSession]:
        """Yields no sessions: each is claimed when it is needed."""
        return iter(())

    def mend(self) -> None:
        """Has nothing to do: a damaged session is found when it is claimed."""

    def forget_erased(self) -> None:
        """Has nothing to do: when bytes of deleted rows are overwritten is up to PostgreSQL."""

    def tidy(self, *, whole: bool = False) -> bool:  # noqa: ARG002 - the same in all journals
        """Has nothing to do: PostgreSQL gives free space back by itself."""
        return False

    def write(self, changes: Iterable[Change]) -> frozenset[Session]:
        """Writes changes of lasting sessions, in order, all or none, except those of sessions that this replica does
        not own any more. Returns these sessions. May be repeated with the same changes after an error, also if they
        were committed. Raises `psycopg.Error`."""
        lasting = [change for change in changes if change.session.policy.lasting]
        if not lasting:
            return frozenset()
        with self.writing:
            return self._write_once(lasting)

    def _write_once(self, changes: list[Change]) -> frozenset[Session]:
        """Writes changes, unless they were committed at the last try. Sessions that were opened then may have been
        claimed since, and only this replica has known their epochs."""
        after = self._changes + len(changes)
        with self._db.transaction():
            if self._committed() == after and self._attempted[0] == after:
                refused = self._attempted[1] | {each for each in self._opened if self._owned(each) is None}
            else:
                refused = self._write_all(changes)
                self._db.execute("UPDATE writers SET changes = ? WHERE replica = ?", (after, self._replica))
                self._attempted = after, refused
        self._changes = after
        for session, epoch in self._opened.items():
            session.epoch = epoch
        return refused

    def _epoch(self, session: Session) -> int:
        return self._opened.get(session, session.epoch)

    def _committed(self) -> int:
        """Waits until no earlier try of this replica is under way. Returns how many of its changes are committed."""
        query = "SELECT changes FROM writers WHERE replica = ? FOR UPDATE"
        if (found := self._db.execute(query, (self._replica,)).fetchone()) is not None:
            return int(found[0])
        self._db.execute("INSERT INTO writers VALUES (?, ?)", (self._replica, self._changes))
        return self._changes

    def _write_all(self, changes: list[Change]) -> frozenset[Session]:
        refused: set[Session] = set()
        erases = False
        self._opened = {}
        for change in changes:
            if change.session in refused or not self._write(change, refused):
                refused.add(change.session)
            elif change.kind == "erase":
                erases = True
        if erases:
            self._tables.cut_all()
        return frozenset(refused)

    def _write(self, change: Change, refused: set[Session]) -> bool:
        """Writes a change, if this replica owns its session; returns whether it does."""
        session = change.session
        if change.kind == "open":
            return self._open(change)
        if (found := self._owned(session)) is None:
            return False
        number, length = found
        self._note_begun(number, change)
        if change.kind in ("begin", "drop"):
            return True
        parent = change.parent
        if parent is not None and (parent in refused or self._owned(parent) is None):
            self._tables.remove(number)  # what it would share is not this replica's
            return False
        if change.kept < length or parent is not None or change.kind in ("close", "erase"):
            self._db.lock_pieces()
        self._tables.write(change)
        if change.records:
            query = "UPDATE records SET epoch = ?, owner = ? WHERE session = ? AND number > ?"
            first = change.turns - len(change.records)
            self._db.execute(query, (self._epoch(session), self._replica, number, 0 if parent is not None else first))
        return True

    def _open(self, change: Change) -> bool:
        """Opens a session, unless there is one of its name; returns whether it did."""
        key = change.session.key
        if self._db.execute("SELECT 1 FROM sessions WHERE tenant = ? AND name = ?", key).fetchone():
            return False
        self._tables.write(change)
        query = "UPDATE sessions SET owner = ? WHERE tenant = ? AND name = ? RETURNING epoch"
        (self._opened[change.session],) = self._db.execute(query, (self._replica, *key)).fetchone()
        return True

    def _note_begun(self, number: int, change: Change) -> None:
        """Records the request of the session's open turn, or that the turn has ended."""
        ends = change.turn is not None and change.turn.recorded
        if ends or change.kind in ("begin", "drop", "close", "erase"):
            self._db.execute("DELETE FROM begun WHERE session = ?", (number,))
        if change.kind == "begin":
            row = number, change.version, change.request
            self._db.insert("begun", (*row, checksum_of(*row)))

    def _owned(self, session: Session) -> tuple[int, int] | None:
        """Locks a session's row, and returns its number and length, if it is this replica's."""
        query = "SELECT id, length, owner, epoch FROM sessions WHERE tenant = ? AND name = ? FOR UPDATE"
        found = self._db.execute(query, session.key).fetchone()
        if found is None or found[2:] != (self._replica, self._epoch(session)):
            return None
        return int(found[0]), int(found[1])
