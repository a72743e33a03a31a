"""Erases the copies of units that only one session has, in host memory and on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from tenuto.memory.tiers.disk import DiskFailed, UnitFile
from tenuto.memory.tiers.parked import Parked, StoredUnit
from tenuto.memory.tiers.saves import Saves
from tenuto.memory.tiers.tiers import Tiers

Row = tuple[int, int]
"""A group, and a row of its units in a file."""


@dataclass(slots=True)
class ErasedCopies:
    """The number of erased copies in `host` memory, and of erased rows of files on `disk`. `failed`: the parts that
    could not be overwritten or removed, and why."""

    host: int = 0
    disk: int = 0
    failed: list[str] = field(default_factory=list)


def erase_copies(tiers: Tiers, saves: Saves, records: Collection[Parked], now: float) -> ErasedCopies:
    """Discards these records of one session, with all units that nothing else refers to.

    Afterwards every row of every file has a record that refers to it, or was overwritten, and files without such rows
    are gone. The index has no byte of the records. The discarded copies in host memory hold zeros. No copy may be under
    way.
    """
    erased = ErasedCopies()
    own = Counter(unit for record in records for unit in record)
    sole = {unit for unit, count in own.items() if unit.references == count}
    held = [unit.data for unit in sole if unit.data is not None]
    _overwrite_files(tiers, saves, sole, erased)
    for record in records:
        tiers.forget(record)
    saves.settle(now)
    _empty_log(tiers, erased)
    if saves.unlisted:
        erased.failed.append("the index of the disk tier could not be written; it is tried again")
    for data in held:
        if data.any():
            erased.failed.append("a copy in host memory could not be overwritten")
        else:
            erased.host += 1
    erased.failed += [f"the file {name} could not be removed" for name in sorted(_strays(tiers))]
    return erased


def _overwrite_files(tiers: Tiers, saves: Saves, sole: Collection[StoredUnit], erased: ErasedCopies) -> None:
    """Overwrites all rows of files to which nothing refers but the units in `sole`."""
    disk = tiers.disk
    if disk is None:
        return
    kept: dict[UnitFile, set[Row]] = tiers.copies.rows(sole)
    try:
        for file, rows in saves.unread_rows():
            kept.setdefault(file, set()).update(rows)
        for file, wanted in kept.items():
            if file.units != len(wanted) + file.overwritten:
                erased.disk += disk.overwrite(file, wanted)
    except DiskFailed as error:
        tiers.failures[error.cause] += 1
        erased.failed.append(str(error))


def _empty_log(tiers: Tiers, erased: ErasedCopies) -> None:
    if tiers.disk is None:
        return
    try:
        tiers.disk.index.empty_log()
    except DiskFailed as error:
        tiers.failures[error.cause] += 1
        erased.failed.append(str(error))


def _strays(tiers: Tiers) -> set[str]:
    """Returns the names of files to which no record refers."""
    disk = tiers.disk
    return disk.files() - {file.name for file in tiers.files()} if disk is not None else set()
