"""The index of a disk tier: which sessions' memory its files hold, so that another process can go on with them."""

from __future__ import annotations

import zlib
from array import array

import msgspec

_MAGIC = b"tenuto snapshot 2\n"


class SnapshotUnusable(Exception):
    """An index cannot be used; `cause`: "damaged", or "foreign" if it is of another model or shape of memory."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"the snapshot is {cause}")
        self.cause = cause


class Run(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Units in rows [row, row + count) of file number `file`. Their contents follow from the session's tokens,
    and the file has to name the same."""

    file: int
    row: int
    count: int


class SavedFile(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A file with `size` bytes of units."""

    name: str
    size: int


class SavedMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The memory of a session's first tokens. `tokens`: int32, little-endian. `groups`: for each group its units, in
    order."""

    tenant: str
    session: str
    tokens: bytes
    groups: list[list[Run]]

    @property
    def history(self) -> array[int]:
        """The tokens."""
        return array("i", self.tokens)


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the files of a disk tier hold. `identity`: of the model, its weights and what a unit is. `unit_bytes`: the
    size of a unit of each group."""

    identity: str
    unit_bytes: list[int]
    page_size: int
    files: list[SavedFile]
    sessions: list[SavedMemory]

    def encoded(self) -> bytes:
        """As it is kept, with a checksum."""
        content = msgspec.msgpack.encode(self)
        return _MAGIC + zlib.crc32(content).to_bytes(4, "little") + content


def decoded(data: bytes, identity: str, unit_bytes: list[int], page_size: int) -> Snapshot:
    """Raises `SnapshotUnusable` unless it is whole and of this model and shape of memory."""
    content = data[len(_MAGIC) + 4 :]
    checksum = data[len(_MAGIC) : len(_MAGIC) + 4]
    if not data.startswith(_MAGIC) or zlib.crc32(content).to_bytes(4, "little") != checksum:
        raise SnapshotUnusable("damaged")
    try:
        found = msgspec.msgpack.decode(content, type=Snapshot)
    except msgspec.MsgspecError as error:
        raise SnapshotUnusable("damaged") from error
    if (found.identity, found.unit_bytes, found.page_size) != (identity, unit_bytes, page_size):
        raise SnapshotUnusable("foreign")
    for saved in found.sessions:
        runs = [run for group in saved.groups for run in group]
        files = range(len(found.files))
        if (
            len(saved.tokens) % 4
            or len(saved.groups) != len(unit_bytes)
            or any(run.file not in files or min(run.row, run.count - 1) < 0 for run in runs)
        ):
            raise SnapshotUnusable("damaged")
    return found
