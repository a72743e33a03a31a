"""Python runs this at its start if it finds it: changes reach the journal as late as on a slow disk."""

import time
from collections.abc import Iterable

from tenuto.session.changes import Change
from tenuto.session.journal import Journal

SECONDS = 0.03

_write = Journal.write


def _write_slowly(journal: Journal, changes: Iterable[Change]) -> None:
    time.sleep(SECONDS)
    _write(journal, changes)


Journal.write = _write_slowly  # type: ignore[method-assign, assignment]
