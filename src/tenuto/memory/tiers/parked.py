"""Records of memory off the device: stored units, and the sequences that list them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tenuto.base.errors import InvariantError
from tenuto.base.plan import Bytes
from tenuto.memory.tiers.contents import Content, Contents
from tenuto.memory.tiers.moves import Move
from tenuto.memory.tiers.unit_files import UnitCopy, UnitFile

UnitVersion = tuple[int, int]
"""A unit of a pool and its generation; see `Pool.generation`."""
ELSEWHERE: UnitVersion = 0, -1
"""Stands for a unit that is not on the device."""


@dataclass(eq=False, slots=True)
class StoredUnit:
    """A copy of a unit of group `group`: `data` in host memory, or row `row` of `file`. `place`: the unit with the same
    contents on the device, valid while that is leased and of the same generation; with a `move`, the unit that the move
    is filling.

    Invariants: exactly one of `data` and `file` is set. `references` counts the `Parked` that list the copy, and the
    moves and writes that use it. `content` was derived from its session's tokens when it was copied; row `row` of
    `file` is used only if the file names a content that covers it.
    """

    group: int
    content: Content
    size: int
    data: Bytes | None
    place: UnitVersion
    references: int = 0
    file: UnitFile | None = None
    row: int = -1
    move: Move | None = None
    leaving: bool = False  # whether it is being written to disk

    def copy(self, content: Content) -> UnitCopy:
        """Returns the description of the copy for a reader that expects `content`."""
        return UnitCopy(self.group, content, self.size, self.data, self.file, self.row)


def size_of(units: Iterable[StoredUnit]) -> int:
    """Returns the number of bytes of the units."""
    return sum(unit.size for unit in units)


def recounted(found: Mapping[StoredUnit, int]) -> tuple[int, int, int]:
    """Returns the bytes of stored units in host memory and on disk, and the bytes of their files. `found`: the number
    of references to each that were found. Raises `InvariantError` if a unit counts another number, or is in both tiers
    or in neither."""
    if any(unit.references != n or (unit.data is None) == (unit.file is None) for unit, n in found.items()):
        raise InvariantError("a stored unit has a wrong count of references, or is in both tiers or neither")
    host, disk = (size_of(unit for unit in found if (unit.data is None) is gone) for gone in (False, True))
    return host, disk, sum(file.size for file in {unit.file for unit in found if unit.file is not None})


@dataclass(eq=False, slots=True)
class Parked:
    """The memory of the first `position` tokens of a sequence, off the device: the units of each group, in order.
    `trial`: it is restored even if that seems slower than computing it, so that restoring is measured again. `pinned`:
    it never makes room for others, because an index for the next process lists it, or a thread reads it."""

    position: int
    units: list[list[StoredUnit]]
    trial: bool = False
    pinned: bool = False

    def __iter__(self) -> Iterator[StoredUnit]:
        return (unit for group in self.units for unit in group)

    @property
    def staying(self) -> list[StoredUnit]:
        """The units in host memory that are not on their way to disk."""
        return [unit for unit in self if unit.data is not None and not unit.leaving]

    @property
    def on_disk(self) -> bool:
        """Whether some of it has to be read from disk."""
        return any(unit.file is not None for unit in self)

    @property
    def in_host(self) -> bool:
        """Whether some of it is in host memory."""
        return any(unit.data is not None for unit in self)

    def check(self, names: Contents) -> None:
        """Raises `InvariantError` if the first units of each group have other contents than `names`."""
        for stored, held in zip(self.units, names, strict=True):
            wrong = (unit for unit, content in zip(stored, held, strict=False) if not unit.content.covers(content))
            if len(held) > len(stored) or next(wrong, None) is not None:
                raise InvariantError(f"parked memory of {self.position} tokens has the state of other tokens")
