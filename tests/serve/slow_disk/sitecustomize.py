"""Python runs this module at its start if it finds it: it delays writes to the journal and to memory files, like a slow
disk."""

import time
from collections.abc import Iterable, Mapping, Sequence

from tenuto.memory.tiers.contents import NamedUnit
from tenuto.memory.tiers.unit_files import UnitFile, UnitFiles
from tenuto.session.changes import Change
from tenuto.session.journal import Journal

SECONDS = 0.03

_write = Journal.write
_write_units = UnitFiles.write
_write_index = UnitFiles.write_index


def _write_slowly(journal: Journal, changes: Iterable[Change]) -> None:
    time.sleep(SECONDS)
    _write(journal, changes)


Journal.write = _write_slowly  # type: ignore[method-assign, assignment]


def _write_units_slowly(files: UnitFiles, units: Mapping[int, Sequence[NamedUnit]]) -> UnitFile:
    time.sleep(SECONDS)
    return _write_units(files, units)


def _write_index_slowly(files: UnitFiles, content: bytes) -> None:
    time.sleep(SECONDS)
    _write_index(files, content)


UnitFiles.write = _write_units_slowly  # type: ignore[method-assign, assignment]
UnitFiles.write_index = _write_index_slowly  # type: ignore[method-assign, assignment]
