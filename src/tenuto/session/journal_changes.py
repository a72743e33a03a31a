"""Changes written to the tables of a journal: only their new tokens and rows.

A history consists of pieces, which forks share. A piece never changes, except that its end is cut off if no session
uses that.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from tenuto.base.views import SessionKey
from tenuto.session.changes import Change
from tenuto.session.journal_erasing import RowsToErase, cut_to_use, too_long
from tenuto.session.journal_rows import RECORD, UNSOUND, Database, checksum_of
from tenuto.session.records import TurnRecord
from tenuto.session.session import Session

_PIECES = (
    "SELECT session, position, piece, length, history.checksum, pieces.checksum FROM history JOIN pieces ON id = piece"
)
_RECORDS = f"records ({RECORD}, checksum)"


class ChangeTables:
    """Writes changes to the tables of `db`, in the caller's transaction.

    Invariant: a piece that only one session uses has no tokens beyond that session's part.
    """

    def __init__(self, db: Database, fingerprint: str) -> None:
        """`fingerprint`: see `Journal`."""
        self._db = db
        self._fingerprint = fingerprint
        # Pieces that several sessions use, and whose ends perhaps none uses. `None`: not known, until the caller has
        # committed a `cut_all`, and empties the set.
        self.untrimmed: set[int] | None = None

    def write(self, change: Change) -> None:
        """Writes a change of a lasting session."""
        session = change.session
        if change.kind == "open":
            columns = "tenant, name, policy, system, version, used, length, turns, results, checksum"
            number = self._db.insert(
                f"sessions ({columns})", (*self._about(session), 0, change.used, 0, 0, 0, UNSOUND), "id"
            )
            self._seal(number, 0, change, 0, 0, 0)
            return
        number, results = self._number(session.key)
        if change.kind == "erase":
            rows = RowsToErase.of(self._db, number)
            self.remove(number)
            gone = rows.require_gone(self._db)
            change.erased.rows, change.erased.shared = gone.rows, gone.shared
            return
        if change.kind == "close":
            self.remove(number)
            return
        if change.parent is not None:
            self._share(change, change.parent, number)
        else:
            self._cut(number, change.kept)
        self._append(number, change.kept, change.tokens)
        self._replace_records(number, change.turns, change.records)
        results += self._keep_result(number, change)
        self._seal(number, change.version, change, change.length, change.turns, results)

    def cut_all(self) -> None:
        """Cuts each piece to the longest part that a session still uses, after a session was erased."""
        for piece in too_long(self._db) if self.untrimmed is None else self.untrimmed:
            cut_to_use(self._db, piece)

    @staticmethod
    def _about(session: Session) -> tuple[str, str, bytes, str | None]:
        """Returns the columns of a session that never change."""
        return (*session.key, msgspec.json.encode(session.policy), session.system)

    def remove(self, session: int) -> None:
        """Deletes all rows of a session."""
        self._cut(session, 0)
        for table, column in (("records", "session"), ("results", "session"), ("sessions", "id")):
            self._db.execute(f"DELETE FROM {table} WHERE {column} = ?", (session,))

    def _seal(self, session: int, version: int, change: Change, length: int, turns: int, results: int) -> None:
        """Writes a session's row with its counts and its checksum. All values come from memory, since the row in the
        file may have been damaged."""
        born = msgspec.msgpack.encode((change.session.birth, change.session.origin))
        row = (*self._about(change.session), version, float(change.used), length, turns, results, born)
        self._db.execute(
            "UPDATE sessions SET tenant = ?, name = ?, policy = ?, system = ?, version = ?, used = ?, length = ?, "
            "turns = ?, results = ?, born = ?, checksum = ? WHERE id = ?",
            (*row, checksum_of(self._fingerprint, session, *row), session),
        )

    def _keep_result(self, session: int, change: Change) -> int:
        """Adds and removes the change's kept results. Returns by how many their number has grown."""
        more = 0
        for key in change.forgotten:
            more -= self._db.execute("DELETE FROM results WHERE session = ? AND key = ?", (session, key)).rowcount
        if change.result is not None:
            row = session, *change.result, UNSOUND
            number = self._db.insert("results (session, key, turn, checksum)", row, "number")
            content = checksum_of(number, session, *change.result)
            self._db.execute("UPDATE results SET checksum = ? WHERE number = ?", (content, number))
            more += 1
        return more

    def _number(self, key: SessionKey) -> tuple[int, int]:
        """Returns a session's number, and the number of its results."""
        query = "SELECT id, results FROM sessions WHERE tenant = ? AND name = ?"
        number, results = self._db.execute(query, key).fetchone()
        return int(number), int(results)

    def _cut(self, session: int, length: int) -> None:
        """Cuts the history to its first `length` tokens."""
        beyond = "FROM history WHERE session = ? AND position >= ?"
        gone = self._db.execute(f"SELECT piece {beyond}", (session, length)).fetchall()
        self._db.execute(f"DELETE {beyond}", (session, length))
        self._shorten(session, length)
        for (piece,) in gone:
            self._trim(piece)

    def _shorten(self, session: int, length: int) -> None:
        """Shortens the use of the last piece so that the history has at most `length` tokens."""
        query = f"{_PIECES} WHERE session = ? ORDER BY position DESC LIMIT 1"
        for _, position, piece, count, own, content in self._db.execute(query, (session,)).fetchall():
            if position + count > length:
                row = session, position, piece, length - position
                sound = own == checksum_of(session, position, piece, count, content)
                self._db.execute(
                    "UPDATE history SET length = ?, checksum = ? WHERE session = ? AND position = ?",
                    (length - position, checksum_of(*row, content) if sound else UNSOUND, session, position),
                )
                self._trim(piece)

    def _trim(self, piece: int) -> None:
        """Deletes the part of a piece that no session uses any more: all of it, or, if only one session uses it, the
        end behind its part. A damaged piece is left as it is."""
        users = self._db.execute(f"{_PIECES} WHERE piece = ? LIMIT 2", (piece,)).fetchall()
        if not users:
            self._db.execute("DELETE FROM pieces WHERE id = ?", (piece,))
        if len(users) > 1 and self.untrimmed is not None:
            self.untrimmed.add(piece)
        if len(users) != 1:
            return
        ((session, position, _, length, own, content),) = users
        longer = "SELECT tokens FROM pieces WHERE id = ? AND length(tokens) > ?"
        for (tokens,) in self._db.execute(longer, (piece, 4 * length)).fetchall():
            row = session, position, piece, length
            if checksum_of(tokens) == content and checksum_of(*row, content) == own:
                kept = tokens[: 4 * length]
                content = checksum_of(kept)
                self._db.execute("UPDATE pieces SET tokens = ?, checksum = ? WHERE id = ?", (kept, content, piece))
                self._db.execute(
                    "UPDATE history SET checksum = ? WHERE session = ? AND position = ?",
                    (checksum_of(*row, content), session, position),
                )

    def _share(self, change: Change, parent: Session, number: int) -> None:
        """Gives a fork its parent's pieces and records. Copies of damaged rows are marked as damaged."""
        shared, _ = self._number(parent.key)
        query = f"{_PIECES} WHERE session = ? AND position < ?"
        for _, position, piece, count, own, content in self._db.execute(query, (shared, change.kept)).fetchall():
            row = number, position, piece, min(count, change.kept - position)
            sound = own == checksum_of(shared, position, piece, count, content)
            self._db.insert("history", (*row, checksum_of(*row, content) if sound else UNSOUND))
        query = f"SELECT {RECORD}, checksum FROM records WHERE session = ? AND number <= ?"
        for *old, own in self._db.execute(query, (shared, change.turns - len(change.records))).fetchall():
            row = (number, *old[1:])
            self._db.insert(_RECORDS, (*row, checksum_of(*row) if own == checksum_of(*old) else UNSOUND))

    def _append(self, session: int, position: int, tokens: array[int]) -> None:
        if tokens:
            data = tokens.tobytes()
            content = checksum_of(data)
            piece = self._db.insert("pieces (tokens, checksum)", (data, content), "id")
            row = session, position, piece, len(tokens)
            self._db.insert("history", (*row, checksum_of(*row, content)))

    def _replace_records(self, session: int, turns: int, records: Sequence[TurnRecord]) -> None:
        """Replaces the last records, so that there are `turns` records and the last are `records`."""
        first = turns - len(records) + 1
        self._db.execute("DELETE FROM records WHERE session = ? AND number >= ?", (session, first))
        for number, record in enumerate(records, first):
            about = msgspec.json.encode(record.conversation) if record.conversation is not None else None
            made = msgspec.msgpack.encode(record.made) if record.made is not None else None
            row = (session, number, record.start, record.input_end, record.end, about, int(record.cut), made)
            self._db.insert(_RECORDS, (*row, checksum_of(*row)))
