"""The index of a disk tier, which lists the sessions whose memory its files hold, for the next process."""

from __future__ import annotations

import zlib
from array import array

import msgspec

_MAGIC = b"tenuto snapshot 2\n"


class SnapshotUnusable(Exception):
    """Raised if an index cannot be used; `cause`: "damaged", or "foreign" (of another model or memory layout)."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"the snapshot is {cause}")
        self.cause = cause


class Run(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Units in rows [row, row + count) of file number `file`. Their contents follow from the session's tokens, and must
    be the ones that the file names."""

    file: int
    row: int
    count: int


class SavedFile(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A file with `size` bytes of units."""

    name: str
    size: int


class SavedMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The memory of a session's first tokens. `tokens`: int32, little-endian. `groups`: the units of each group, in
    order."""

    tenant: str
    session: str
    tokens: bytes
    groups: list[list[Run]]

    @property
    def history(self) -> array[int]:
        """The tokens as an array."""
        return array("i", self.tokens)


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The list of the contents of a disk tier. `identity`: identifies the model, its weights and the layout of units.
    `unit_bytes`: the size of a unit of each group."""

    identity: str
    unit_bytes: list[int]
    page_size: int
    files: list[SavedFile]
    sessions: list[SavedMemory]

    def encoded(self) -> bytes:
        """Returns the contents of the index file, with a checksum."""
        content = msgspec.msgpack.encode(self)
        return _MAGIC + zlib.crc32(content).to_bytes(4, "little") + content


def decoded(data: bytes, identity: str, unit_bytes: list[int], page_size: int) -> Snapshot:
    """Decodes an index. Raises `SnapshotUnusable` if it is damaged, or of another model or memory layout."""
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
