"""The disk tier as its users see it: files of units, and the index of sessions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

from tenuto.base.errors import InvariantError
from tenuto.base.plan import Bytes
from tenuto.base.views import SessionKey
from tenuto.memory.tiers.contents import Content, NamedUnit


class DiskFailed(Exception):
    """Raised if units could not be written or read; `cause`: "full", "write", "read", "foreign" (of another model),
    "content" (of other tokens) or "checksum"."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(eq=False, slots=True)
class UnitFile:
    """A file with `size` bytes of units, `wanted` of which are still in use. `units`: the number of all of them, 0 if
    it is not known; `overwritten`: of those that `Disk.overwrite` has overwritten."""

    name: str
    size: int
    wanted: int
    units: int = 0
    overwritten: int = 0


class IndexUnusable(Exception):
    """Raised if an index cannot be used; `cause`: "damaged", "unreadable", or "foreign" (of another model or memory
    layout)."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"the index is {cause}")
        self.cause = cause


class Run(NamedTuple):
    """Units [first, first + number) of a session in `group`: rows [row, row + number) of that group in a file. `marks`
    has `Content.mark` of each unit."""

    group: int
    first: int
    file: str
    row: int
    number: int
    marks: bytes


class Listing(NamedTuple):
    """A change of the index: the state of session `key`, resumable at `position`, keeps the first `stay` listed units
    of each group, which `runs` follow, in files of these `sizes`. Without a `position`, the session is no longer
    listed."""

    key: SessionKey
    position: int | None
    stay: Sequence[int] = ()
    runs: Sequence[Run] = ()
    sizes: Mapping[str, int] = MappingProxyType({})


class Listed(NamedTuple):
    """A listed session without its runs: the position, and the files that have its units, as (name, size)."""

    position: int
    files: Sequence[tuple[str, int]]


class ReadableIndex(Protocol):
    """The sessions whose state some files have."""

    def meaning(self) -> str:
        """Returns the identity of the units for which sessions are listed. Raises `DiskFailed`."""

    def find(self, key: SessionKey) -> Listed | None:
        """Returns a listed session, or `None`. Raises `DiskFailed`, and `ValueError` for a damaged row."""

    def runs(self, key: SessionKey) -> Sequence[Run]:
        """Returns the runs of a session, by group and in order. Raises `DiskFailed`."""


class Index(ReadableIndex, Protocol):
    """The sessions whose state the files of a disk have, for the process that uses the disk next. The engine's thread
    reads it, and the thread that writes files changes it."""

    def begin(self, identity: str) -> dict[SessionKey, Listed]:
        """Returns the sessions that an earlier process has listed for units with this `identity`. From now on, only
        sessions for such units are listed. Raises `IndexUnusable`; then the index is empty, if it can be written."""

    def apply(self, changes: Sequence[Listing]) -> None:
        """Makes changes, all or none. Raises `DiskFailed`."""

    def empty_log(self) -> None:
        """Leaves no byte of listings that were removed. Raises `DiskFailed`."""

    def clear(self, identity: str) -> None:
        """Removes all listings; units have this `identity` from now on. Raises `DiskFailed`."""


class Watcher(Protocol):
    """Is told what has changed on a disk, by the thread that has changed it."""

    def listed(self, keys: Iterable[SessionKey]) -> None:
        """The index lists other state of these sessions, or none any more."""

    def cleared(self) -> None:
        """The index lists no session any more."""

    def overwritten(self, file: str) -> None:
        """Units of a file were overwritten, or may have been."""


class Readable(Protocol):
    """A store of files of units that can be read. Several threads may do so at once."""

    def read(self, file: UnitFile, rows: Mapping[int, Sequence[int]]) -> dict[int, list[NamedUnit]]:
        """Reads units of a file, by group and row, with the contents that the file names; `read_units` compares these.
        Raises `DiskFailed`."""


class Disk(Readable, Protocol):
    """A store of files of units. Several threads may read and write at once."""

    @property
    def budget(self) -> int:
        """The most bytes of units."""

    @property
    def index(self) -> Index:
        """The sessions whose state the files hold, for the process that uses the store next."""

    def become(self, identity: str, *, keep: bool = False) -> None:
        """Changes the identity of units that are written from now on. Older units are never read again, unless this
        process has written or taken over their files (`keep`)."""

    def write(self, units: Mapping[int, Sequence[NamedUnit]], *, cached: bool = True) -> UnitFile:
        """Writes units by group; `cached`: whether they may be read again soon. Raises `DiskFailed`, having kept
        nothing."""

    def overwrite(self, file: UnitFile, kept: Collection[tuple[int, int]]) -> int:
        """Overwrites all units of a file, and the names of their contents, except those `kept`, by group and row. Notes
        in `file` how many that are, and returns it. Nobody reads the file meanwhile. Raises `DiskFailed`."""

    def remove(self, file: UnitFile) -> None:
        """Removes a file that is no longer needed."""

    def files(self) -> set[str]:
        """Returns the names of all files of units, once those removed before are gone."""

    def take_over(self, files: Iterable[UnitFile]) -> None:
        """Keeps these files of those that another process has left, and removes all others. The last of them may be
        read soon."""

    def close(self, *, keep: bool = False) -> None:
        """Ends all use of the store, and removes all files unless `keep` is set."""


class UnitCopy(NamedTuple):
    """A copy of a unit of `group`, of `size` bytes: `data` in host memory, or row `row` of `file`, which has to hold
    `content`."""

    group: int
    content: Content
    size: int
    data: Bytes | None
    file: UnitFile | None
    row: int

    @property
    def place(self) -> tuple[int, UnitFile | None]:
        """The place from which the copy is read. Copies with equal places, in the same file or in host memory, can be
        read in one call."""
        return self.group, self.file


def read_units(disk: Readable | None, copies: Sequence[UnitCopy]) -> list[Bytes]:
    """Returns the units, all in one place, and checks that those from a file have the wanted contents. All reads use
    this function: only the file itself determines its contents, not its name and not an index. Raises `DiskFailed`."""
    group, file = copies[0].place
    if file is None:
        in_host = [copy.data for copy in copies if copy.data is not None]
        if len(in_host) < len(copies):
            raise InvariantError(f"a unit of group {group} is neither in host memory nor in a file")
        return in_host
    if disk is None:
        raise InvariantError("units are on disk, but there is no disk tier")
    found = disk.read(file, {group: [copy.row for copy in copies]})[group]
    for copy, unit in zip(copies, found, strict=True):
        if not unit.content.covers(copy.content):
            raise DiskFailed(
                "content", f"unit {copy.row} of group {group} in {file.name} holds the state of other tokens"
            )
    return [unit.data for unit in found]
