"""The number of acknowledged changes of a journal, in a file beside it.

SQLite treats a damaged end of its log as if it had never been written, and drops it silently. So the number of durable
changes is also written here, after every flush: if the journal has fewer, acknowledged changes are lost.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from pathlib import Path

from tenuto.base.private import create_private, open_regular

log = logging.getLogger("tenuto.journal")

ID_BYTES = 16
_FIELDS = struct.Struct(f"<{ID_BYTES}sQ")
_SUM = struct.Struct("<I")


class Acknowledged:
    """The file with the number for one journal. It is not flushed: after a loss of power the number may be too small,
    but never too large."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._failed = False

    def read(self, journal: bytes | None) -> int:
        """Returns the number of acknowledged changes of the journal with this id, or of any journal if it is `None`; 0
        if the number is unknown."""
        try:
            with open_regular(self._path) as file:
                data = file.read(_FIELDS.size + _SUM.size)
        except OSError:
            return 0
        if (
            len(data) < _FIELDS.size + _SUM.size
            or zlib.crc32(data[: _FIELDS.size]) != _SUM.unpack(data[_FIELDS.size :])[0]
        ):
            return 0
        owner, changes = _FIELDS.unpack(data[: _FIELDS.size])
        return int(changes) if journal in (owner, None) else 0

    def write(self, journal: bytes, changes: int) -> None:
        """Writes the number. A failure is only logged, once."""
        fields = _FIELDS.pack(journal, changes)
        try:
            if self._file is None:
                create_private(self._path)
                self._file = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
            os.pwrite(self._file, fields + _SUM.pack(zlib.crc32(fields)), 0)
        except OSError as error:
            if not self._failed:
                log.warning("%s cannot be written: %s; lost changes would not be detected", self._path, error)
            self._failed = True

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
