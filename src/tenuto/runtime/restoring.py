"""Restores the sessions of a journal, and reports what a damaged one has lost."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tenuto.base.errors import ConfigError, TenutoError
from tenuto.base.interpreter import without_collections
from tenuto.engine.engine import Engine
from tenuto.session.journal import Journal
from tenuto.session.journal_mending import Damage

log = logging.getLogger("tenuto.runtime")


def restore(journal: Journal, engine: Engine) -> None:
    """Restores all sound sessions of a journal in an engine, and mends the journal meanwhile. Raises `ConfigError` if a
    session does not fit, or the journal cannot be mended."""
    with without_collections(), ThreadPoolExecutor(1) as beside:
        found = list(journal.sessions())
        count = len(found)
        mended = beside.submit(_mend, journal)  # SQLite checks the file without Python's lock
        found.reverse()
        while found:
            saved = found.pop()
            try:
                engine.sessions.restore(saved, journaled=True)
            except TenutoError as error:
                raise ConfigError(f"session {saved.session!r} of {journal.path} does not fit here: {error}") from error
    mended.result()
    if count:
        log.info("sessions restored", extra={"sessions": count, "journal": str(journal.path)})


def _mend(journal: Journal) -> None:
    if (damage := journal.mend()) is not None:
        _log_damage(damage, journal.path)


def _log_damage(damage: Damage, journal: Path) -> None:
    """Logs what a damaged journal has lost."""
    aside = {"journal": str(journal), "aside": str(damage.aside)}
    for each in damage.sessions:
        named = {"tenant": each.tenant, "session": each.name, "reason": each.reason}
        log.error("a damaged session was set aside: it is not served", extra={**named, **aside})
    if damage.missing:
        log.error(
            "sessions are missing in the journal; their names are lost", extra={"sessions": damage.missing, **aside}
        )
    if damage.changes:
        log.error("acknowledged changes of sessions are lost", extra={"changes": damage.changes, **aside})
    log.error("the journal was damaged and has been written anew; the old file is kept", extra=aside)
