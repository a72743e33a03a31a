"""Python runs this module at its start if it finds it: it delays writes to the journal and to memory files, like a slow
disk."""

import time
from collections.abc import Iterable, Mapping, Sequence

from tenuto.memory.tiers.contents import NamedUnit
from tenuto.memory.tiers.disk import Listing, UnitFile
from tenuto.memory.tiers.state_index import StateIndex
from tenuto.memory.tiers.unit_files import UnitFiles
from tenuto.session.changes import Change
from tenuto.session.journal import Journal
from tenuto.session.session import Session

SECONDS = 0.03

_write = Journal.write
_write_units = UnitFiles.write
_apply = StateIndex.apply


def _write_slowly(journal: Journal, changes: Iterable[Change]) -> frozenset[Session]:
    time.sleep(SECONDS)
    return _write(journal, changes)


Journal.write = _write_slowly  # type: ignore[method-assign, assignment]


def _write_units_slowly(files: UnitFiles, units: Mapping[int, Sequence[NamedUnit]], *, cached: bool = True) -> UnitFile:
    time.sleep(SECONDS)
    return _write_units(files, units, cached=cached)


def _apply_slowly(index: StateIndex, changes: Sequence[Listing]) -> None:
    time.sleep(SECONDS)
    _apply(index, changes)


UnitFiles.write = _write_units_slowly  # type: ignore[method-assign, assignment]
StateIndex.apply = _apply_slowly  # type: ignore[method-assign, assignment]
