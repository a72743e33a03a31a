"""Parked memory that another thread than the engine's reads, to export it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Self

from tenuto.base.plan import Bytes
from tenuto.base.wire.state_file import CopiedState
from tenuto.memory.tiers.contents import Contents
from tenuto.memory.tiers.disk import Disk, DiskFailed, UnitCopy, read_units
from tenuto.memory.tiers.parked import Parked


@dataclass(eq=False, slots=True)
class LentUnits:
    """The state of a session's first `position` tokens, in the units of `parked`, which the reader may use until the
    engine's thread takes it back. `failure`: the cause if reading failed; written by `read`."""

    position: int
    parked: Parked
    units: Sequence[Sequence[UnitCopy]]
    disk: Disk | None
    failure: str = ""

    @classmethod
    def of(cls, parked: Parked, names: Contents, disk: Disk | None) -> Self:
        """Returns all units of `parked`, whose contents are `names`."""
        units = [
            [unit.copy(content) for unit, content in zip(*pair, strict=True)]
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

    def _group(self, units: Sequence[UnitCopy]) -> list[Bytes]:
        runs = groupby(units, attrgetter("place"))
        return [data for _, same in runs for data in read_units(self.disk, list(same))]
