"""Records of memory off the device: stored units, and the sequences that list them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tenuto.base.errors import InvariantError
from tenuto.base.plan import Bytes
from tenuto.base.views import SessionKey
from tenuto.memory.lineage import Lineage
from tenuto.memory.tiers.contents import Content, Contents
from tenuto.memory.tiers.disk import UnitCopy, UnitFile
from tenuto.memory.tiers.moves import Move

UnitVersion = tuple[int, int]
"""A unit of a pool and its generation; see `Pool.generation`."""
ELSEWHERE: UnitVersion = 0, -1
"""Stands for a unit that is not on the device."""


@dataclass(eq=False, slots=True)
class StoredUnit:
    """A copy of a unit of group `group`: `data` in host memory, or row `row` of `file`, or both. `place`: the unit with
    the same contents on the device, valid while that is leased and of the same generation; with a `move`, the unit that
    the move is filling.

    Invariants: `references` counts the `Parked` that list the copy, and the moves and writes that use it; `hosts`
    counts those of the `Parked` that are to stay in host memory. A copy with a file has `data` only while it has hosts
    or is being written. `content` was derived from its session's tokens when it was copied; row `row` of `file` is used
    only if the file names a content that covers it.
    """

    group: int
    content: Content
    size: int
    data: Bytes | None
    place: UnitVersion
    references: int = 0
    hosts: int = 0
    file: UnitFile | None = None
    row: int = -1
    move: Move | None = None
    leaving: bool = False  # whether it is being written to disk

    def copy(self, content: Content) -> UnitCopy:
        """Returns the description of the copy for a reader that expects `content`."""
        file = self.file if self.data is None else None
        return UnitCopy(self.group, content, self.size, self.data, file, self.row)


def size_of(units: Iterable[StoredUnit]) -> int:
    """Returns the number of bytes of the units."""
    return sum(unit.size for unit in units)


def recounted(found: Mapping[StoredUnit, int], unread: Iterable[Parked]) -> tuple[int, int]:
    """Returns the bytes of stored units in host memory, and those of the files of all units and of `unread` records.
    `found`: the number of references to each unit that were found. Raises `InvariantError` if a unit or a file counts
    another number of references, or a unit is nowhere, or without need in both tiers."""
    files: Counter[UnitFile] = Counter(unit.file for unit in found if unit.file is not None)
    files.update(file for parked in unread for file in parked.unread)
    if any(unit.references != n or (unit.data is None and unit.file is None) for unit, n in found.items()):
        raise InvariantError("a stored unit has a wrong count of references, or is in no tier")
    if any(unit.data is not None and unit.file is not None and not unit.hosts for unit in found):
        raise InvariantError("a stored unit on disk is in host memory too, where nobody needs it")
    if any(file.wanted != n for file, n in files.items()):
        raise InvariantError("a file has a wrong count of units in use")
    return size_of(unit for unit in found if unit.data is not None), sum(file.size for file in files)


@dataclass(eq=False, slots=True)
class Parked:
    """The memory of the first `position` tokens of a sequence, off the device: the units of each group, in order.
    `trial`: it is restored even if that seems slower than computing it, so that restoring is measured again. `pinned`:
    it never makes room for others, because a thread reads it, or units are being added. `lineage`: the weights that
    computed it; empty for a record of saved state, which the weights in use have computed. `key`: the session under
    which the disk's index lists it, if it does. `unread`: the files of an earlier process with its units, which are not
    known until the index is read. `expected`: when it is expected to be used again, if that is known."""

    position: int
    units: list[list[StoredUnit]]
    lineage: Lineage = ()
    trial: bool = False
    pinned: bool = False
    key: SessionKey | None = None
    unread: tuple[UnitFile, ...] = ()
    expected: float | None = None

    def __iter__(self) -> Iterator[StoredUnit]:
        return (unit for group in self.units for unit in group)

    @property
    def staying(self) -> list[StoredUnit]:
        """The units that are not on disk, except those on their way there."""
        return [unit for unit in self if unit.file is None and not unit.leaving]

    @property
    def on_disk(self) -> bool:
        """Whether some of it has to be read from disk."""
        return bool(self.unread) or any(unit.data is None for unit in self)

    def check(self, names: Contents) -> None:
        """Raises `InvariantError` if the first units of each group have other contents than `names`."""
        for stored, held in zip(self.units, names, strict=True):
            wrong = (unit for unit, content in zip(stored, held, strict=False) if not unit.content.covers(content))
            if len(held) > len(stored) or next(wrong, None) is not None:
                raise InvariantError(f"parked memory of {self.position} tokens has the state of other tokens")
