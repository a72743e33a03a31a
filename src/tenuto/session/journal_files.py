"""Journals as files, for operators: checked, counted and compacted without a server."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tenuto.base.errors import ConfigError
from tenuto.session.acknowledged import Acknowledged
from tenuto.session.journal_mending import connected
from tenuto.session.journal_rows import APPLICATION, CHECKED, FORMAT, DamagedSession, Header, SessionRows


@dataclass(frozen=True, slots=True)
class Checked:
    """The outcome of a check: the undamaged `sessions` with their `turns` and `tokens`, and what is wrong. `missing`:
    sessions that the journal counts but no row mentions. `lost_changes`: acknowledged changes that are not in the
    journal; a server that starts with it looks for them behind damage in the log. `intact`: whether SQLite finds its
    own structures in order, and the row about the whole journal is undamaged."""

    sessions: int
    turns: int
    tokens: int
    damaged: Sequence[DamagedSession]
    missing: int
    lost_changes: int
    intact: bool

    @property
    def sound(self) -> bool:
        return self.intact and not (self.damaged or self.missing or self.lost_changes)


@dataclass(frozen=True, slots=True)
class Use:
    """The sessions of a tenant in a journal, or of all tenants. `tokens`: of all histories, so that shared ones count
    for each. `oldest`, `newest`: the times of their last use, in seconds since the epoch."""

    tenant: str
    sessions: int
    turns: int
    tokens: int
    oldest: float | None
    newest: float | None


@dataclass(frozen=True, slots=True)
class Statistics:
    """The contents and the size of a journal. `all`: of all tenants. `stored_tokens`: tokens in the file, each shared
    one once. `largest`: tenant, id and tokens of the longest session. `bytes`: of the file and its log."""

    all: Use
    stored_tokens: int
    largest: tuple[str, str, int] | None
    bytes: int
    free_pages: int
    page_bytes: int
    changes: int | None
    tenants: Sequence[Use]


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Opens a journal, and leaves the file and its log as they are. Raises `ConfigError`."""
    beside = [each for each in (Path(f"{path}-wal"), Path(f"{path}-shm")) if not each.exists()]
    if not path.is_file():
        raise ConfigError(f"the journal {path} cannot be read: there is no such file")
    try:
        uri = f"{path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, timeout=0.1, isolation_level=None, uri=True)) as db:
            application, format_ = (
                db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
            )
            if application != APPLICATION:
                raise ConfigError(f"{path} is no journal")
            if not CHECKED <= format_ <= FORMAT:
                raise ConfigError(
                    f"the journal {path} is of format {format_}; supported: {CHECKED} to {FORMAT}, as servers write it"
                )
            yield db
            for each in beside:  # made empty by SQLite; nobody can write while this reads
                each.unlink(missing_ok=True)
    except sqlite3.Error as error:
        raise ConfigError(f"the journal {path} cannot be read, perhaps because a server uses it: {error}") from error


def check(path: Path) -> Checked:
    """Reads every row of a journal and compares all checksums and counts. Raises `ConfigError`."""
    with _reading(path) as db:
        header = SessionRows(db, "").header()
        rows = SessionRows(db, header.fingerprint if header is not None else "")
        turns = tokens = 0
        for saved in rows.read() if header is not None else ():  # without the fingerprint no checksum can be right
            turns += len(saved.records)
            tokens += len(saved.tokens)
        intact = header is not None and _intact(db)
    counted, changes = (header.sessions, header.changes) if header is not None else (0, 0)
    acknowledged = Acknowledged(Path(f"{path}-acknowledged")).read(header.journal if header is not None else None)
    return Checked(
        len(rows.sound),
        turns,
        tokens,
        rows.damaged,
        max(0, counted - len(rows.sound) - len(rows.damaged)),
        max(0, acknowledged - changes),
        intact,
    )


def _intact(db: sqlite3.Connection) -> bool:
    try:
        return bool(db.execute("PRAGMA integrity_check(1)").fetchone() == ("ok",))
    except sqlite3.Error:
        return False


def statistics(path: Path) -> Statistics:
    """Counts what is in a journal, without comparing checksums. Raises `ConfigError`."""
    with _reading(path) as db:
        use = "count(*), ifnull(sum(turns), 0), ifnull(sum(length), 0), min(used), max(used) FROM sessions"
        log = Path(f"{path}-wal")
        header: Header | None = SessionRows(db, "").header()
        return Statistics(
            Use("", *db.execute(f"SELECT {use}").fetchone()),
            db.execute("SELECT ifnull(sum(length(tokens)), 0) / 4 FROM pieces").fetchone()[0],
            db.execute("SELECT tenant, name, length FROM sessions ORDER BY length DESC LIMIT 1").fetchone(),
            path.stat().st_size + (log.stat().st_size if log.exists() else 0),
            db.execute("PRAGMA freelist_count").fetchone()[0],
            db.execute("PRAGMA page_size").fetchone()[0],
            header.changes if header is not None else None,
            [Use(*row) for row in db.execute(f"SELECT tenant, {use} GROUP BY tenant ORDER BY sum(length) DESC")],
        )


def compact(path: Path) -> tuple[int, int]:
    """Rewrites a journal without free space, at once or not at all, and returns its bytes before and after. Raises
    `ConfigError`, also if the journal is damaged, which only a server's start mends, or is in use."""
    if not check(path).sound:
        raise ConfigError(f"the journal {path} is damaged; start a server with it first, which sets damage aside")
    before = statistics(path).bytes
    try:
        with closing(connected(path, 0.1)) as db:
            db.execute("PRAGMA synchronous = FULL")
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            db.execute("VACUUM")
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error as error:
        raise ConfigError(f"the journal {path} cannot be compacted: {error}") from error
    return before, path.stat().st_size
