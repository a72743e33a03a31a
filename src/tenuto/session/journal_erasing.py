"""The rows of an erased session: counted before they are removed, and looked for afterwards.

Invariant: once an `erase` is acknowledged, neither the journal nor its log has a byte of the session's rows, except the
parts of its history that other sessions use: pieces are cut where the longest of these parts ends. SQLite overwrites
rows when it removes them (`secure_delete`), and the log is emptied into the file and truncated before the change is
acknowledged.
"""

from __future__ import annotations

from dataclasses import dataclass

from tenuto.base.errors import InvariantError
from tenuto.session.changes import ErasedRows
from tenuto.session.journal_rows import Database, checksum_of

_TABLES = (("sessions", "id"), ("history", "session"), ("records", "session"), ("results", "session"))
"""The tables with rows of sessions, and their columns with the session's number."""


@dataclass(frozen=True, slots=True)
class RowsToErase:
    """The rows of session `number`, before they are removed. `rows`: how many there are, including pieces. `pieces`: of
    its history, those that no other session uses. `shared`: the sessions that use the others, by id, with the number of
    tokens in common."""

    number: int
    rows: int
    pieces: list[int]
    shared: dict[str, int]

    @classmethod
    def of(cls, db: Database, number: int) -> RowsToErase:
        """Returns the rows of a session."""
        users = (
            "FROM history AS own JOIN history AS other ON other.piece = own.piece WHERE own.session = ? AND "
            "other.session != own.session"
        )
        used = {piece for (piece,) in db.execute(f"SELECT other.piece {users}", (number,))}
        every = {piece for (piece,) in db.execute("SELECT piece FROM history WHERE session = ?", (number,))}
        least = "CASE WHEN own.length < other.length THEN own.length ELSE other.length END"
        common = f"SELECT other.session AS id, sum({least}) AS tokens {users} GROUP BY other.session"
        query = f"SELECT name, tokens FROM sessions JOIN ({common}) AS common USING (id)"
        shared = {name: int(tokens) for name, tokens in db.execute(query, (number,))}
        pieces = sorted(every - used)
        return cls(number, _count(db, number) + len(pieces), pieces, shared)

    def require_gone(self, db: Database) -> ErasedRows:
        """Returns what was removed. Raises `InvariantError` if any of it is still there."""
        left = _count(db, self.number)
        for piece in self.pieces:
            left += len(db.execute("SELECT 1 FROM pieces WHERE id = ?", (piece,)).fetchall())
        if left:
            raise InvariantError(f"{left} rows of an erased session are left in the journal")
        return ErasedRows(self.rows, self.shared)


def _count(db: Database, number: int) -> int:
    return sum(
        int(db.execute(f"SELECT count(*) FROM {table} WHERE {column} = ?", (number,)).fetchone()[0])
        for table, column in _TABLES
    )


def too_long(db: Database) -> list[int]:
    """Returns the pieces with an end that no session uses."""
    longest = "SELECT piece, max(length) AS most FROM history GROUP BY piece"
    query = f"SELECT id FROM pieces JOIN ({longest}) AS longest ON id = piece WHERE length(tokens) > 4 * most"
    return [piece for (piece,) in db.execute(query).fetchall()]


def cut_to_use(db: Database, piece: int) -> None:
    """Cuts a piece to the longest part that a session uses, unless the piece or one of its uses is damaged."""
    users = db.execute("SELECT session, position, length, checksum FROM history WHERE piece = ?", (piece,)).fetchall()
    kept = 4 * max((length for _, _, length, _ in users), default=0)
    query = "SELECT tokens, checksum FROM pieces WHERE id = ? AND length(tokens) > ?"
    for tokens, content in db.execute(query, (piece, kept)).fetchall():
        sound = (own == checksum_of(session, at, piece, length, content) for session, at, length, own in users)
        if checksum_of(tokens) != content or not all(sound):
            continue
        shorter = checksum_of(tokens[:kept])
        db.execute("UPDATE pieces SET tokens = ?, checksum = ? WHERE id = ?", (tokens[:kept], shorter, piece))
        for session, at, length, _ in users:
            row = checksum_of(session, at, piece, length, shorter), session, at
            db.execute("UPDATE history SET checksum = ? WHERE session = ? AND position = ?", row)
