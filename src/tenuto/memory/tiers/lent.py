"""Parked memory that another thread than the engine's reads, to export it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from tenuto.base.errors import InvariantError
from tenuto.base.plan import Bytes
from tenuto.base.wire.state_file import CopiedState
from tenuto.memory.tiers.contents import Content, Contents
from tenuto.memory.tiers.parked import Parked
from tenuto.memory.tiers.unit_files import Disk, DiskFailed, UnitFile, read_units


class LentUnit(NamedTuple):
    """A unit in host memory, or in row `row` of `file`, which has to hold `content`."""

    group: int
    content: Content
    data: Bytes | None
    file: UnitFile | None
    row: int


@dataclass(eq=False, slots=True)
class LentUnits:
    """The state of a session's first `position` tokens, in the units of `parked`, which the reader may use until the
    engine's thread takes it back. `failure`: the cause if reading failed; written by `read`."""

    position: int
    parked: Parked
    units: Sequence[Sequence[LentUnit]]
    disk: Disk | None
    failure: str = ""

    @classmethod
    def of(cls, parked: Parked, names: Contents, disk: Disk | None) -> Self:
        """Returns all units of `parked`, whose contents are `names`."""
        units = [
            [LentUnit(each.group, content, each.data, each.file, each.row) for each, content in zip(*pair, strict=True)]
            for pair in zip(parked.units, names, strict=True)
        ]
        return cls(parked.position, parked, units, disk)

    def read(self) -> CopiedState:
        """Reads and returns the whole state, in any thread; if that fails, returns the state of 0 tokens."""
        try:
            return CopiedState(self.position, [self._group(units) for units in self.units])
        except DiskFailed as error:
            self.failure = error.cause
            return CopiedState(0, [[] for _ in self.units])

    def _group(self, units: Sequence[LentUnit]) -> list[Bytes]:
        in_files: dict[UnitFile, list[int]] = {}
        for i, unit in enumerate(units):
            if unit.file is not None:
                in_files.setdefault(unit.file, []).append(i)
        found = {i: unit.data for i, unit in enumerate(units) if unit.data is not None}
        for file, places in in_files.items():
            if self.disk is None:
                raise InvariantError("units are on disk, but there is no disk tier")
            wanted = [(units[i].row, units[i].content) for i in places]
            found.update(zip(places, read_units(self.disk, file, units[places[0]].group, wanted), strict=True))
        return [found[i] for i in range(len(units))]
