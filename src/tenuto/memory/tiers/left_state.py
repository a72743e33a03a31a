"""The state of sessions that another process has left on disk, for the process that takes these sessions over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tenuto.base.plan import Bytes
from tenuto.base.views import SessionKey
from tenuto.memory.tiers.contents import Contents
from tenuto.memory.tiers.copies import Place
from tenuto.memory.tiers.disk import DiskFailed, Readable, ReadableIndex, UnitCopy, UnitFile, read_units
from tenuto.memory.tiers.runs import usable_places


@dataclass(frozen=True, slots=True)
class Wanted:
    """The state that a session lacks, of the first `position` tokens of its history at `version`. `names`: the contents
    of its units, and `unit_bytes` their sizes, by group. `whole`: see `Saves.recover`. `meaning`: the identity of units
    with their layout, and `identity` without it."""

    version: int
    position: int
    names: Contents
    unit_bytes: Sequence[int]
    page_size: int
    whole: bool
    meaning: str
    identity: str


class LeftState:
    """The index and the files of another process, which may be gone, or still change them. They are only read.

    Invariant: the units that `read` returns hold the contents that the caller names, whatever the index says, and
    whatever has become of the files.
    """

    def __init__(self, index: ReadableIndex, reading: Callable[[str], AbstractContextManager[Readable]]) -> None:
        """`reading`: opens the files, of which those with units of an identity are read."""
        self._index = index
        self._reading = reading

    def reaches(self, key: SessionKey) -> int:
        """Returns the number of tokens of a session whose state is listed. Raises `DiskFailed`."""
        try:
            listed = self._index.find(key)
        except (TypeError, ValueError) as error:
            raise _malformed(error) from error
        return listed.position if listed is not None else 0

    def read(self, key: SessionKey, wanted: Wanted) -> tuple[int, list[list[Bytes]]]:
        """Returns the wanted state of a session, or the part that is listed: the number of tokens, and the units of
        each group. Raises `DiskFailed`."""
        try:
            listed = self._index.find(key) if self._index.meaning() == wanted.meaning else None
            files = [UnitFile(name, size, 0) for name, size in listed.files] if listed is not None else []
            places, pages = usable_places(self._index.runs(key), files, wanted.names, whole=wanted.whole)
        except (LookupError, TypeError, ValueError) as error:
            raise _malformed(error) from error
        position = wanted.position if pages is None else pages * wanted.page_size
        if not position:
            return 0, [[] for _ in places]
        with self._reading(wanted.identity) as opened:
            return position, [list(_units(opened, found, wanted.unit_bytes)) for found in places]


def _units(opened: Readable, places: Sequence[Place], unit_bytes: Sequence[int]) -> Iterator[Bytes]:
    """Yields units of one group, in order. Raises `DiskFailed`."""
    found: dict[tuple[UnitFile, int], Bytes] = {}
    copies = [UnitCopy(group, content, 0, None, file, row) for file, group, row, content in places]
    for file in dict.fromkeys(file for file, *_ in places):
        same = [copy for copy in copies if copy.file is file]
        found |= {(file, copy.row): unit for copy, unit in zip(same, read_units(opened, same), strict=True)}
    for file, group, row, _ in places:
        unit = found[file, row]
        if unit.nbytes != unit_bytes[group]:
            raise DiskFailed("read", f"{file.name} has units of another size")
        yield unit


def _malformed(error: Exception) -> DiskFailed:
    return DiskFailed("read", f"the index is malformed: {error}")
