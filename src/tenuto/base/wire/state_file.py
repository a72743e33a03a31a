"""A session with its state as one file, written and read in pieces.

The file is in the safetensors format (a length, a JSON header, then bytes): a tensor `group N` for each memory group,
uint8 [units, bytes a unit]. Its metadata has the session, as `base.wire.document` writes it, the identity of the state,
a CRC-32 of every unit, and a SHA-256 of all other metadata.
"""

from __future__ import annotations

import errno
import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from tenuto.base.errors import InvalidRequest, NoRoom
from tenuto.base.plan import Bytes
from tenuto.base.private import open_private, open_regular
from tenuto.base.wire.document import SessionDocument, read_document

FORMAT = "tenuto-session-state-1"
_MAX_HEADER = 2**25
"""In bytes: enough for a session of millions of tokens and the checksums of its units."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PREFIX = 8
PIECE = 2**23
"""The number of bytes read or copied at once; one unit if that is larger."""


class StateHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A description of the state in a file, which covers the session's first `position` tokens. `identity`: a digest of
    the model, its weights and the layout of units. `units` and `unit_bytes`: the number and size of units of each
    group. `checksums`: the CRC-32 of each."""

    identity: str
    position: int
    page_size: int
    units: list[int]
    unit_bytes: list[int]
    checksums: list[list[int]]


@dataclass(frozen=True, slots=True)
class CopiedState:
    """The state of a session's first `position` tokens: units of each group, each uint8 [bytes a unit]."""

    position: int
    groups: Sequence[Sequence[Bytes]]


def write_state_file(
    path: Path, document: SessionDocument, identity: str, page_size: int, unit_bytes: Sequence[int], state: CopiedState
) -> None:
    """Writes a signed session and its state. An existing file is replaced once all is written. Raises `InvalidRequest`
    or `NoRoom`, see `replacing`."""
    header = StateHeader(
        identity=identity,
        position=state.position,
        page_size=page_size,
        units=[len(group) for group in state.groups],
        unit_bytes=list(unit_bytes),
        checksums=[[zlib.crc32(_bytes(unit)) for unit in group] for group in state.groups],
    )
    metadata = {
        "format": FORMAT,
        "session": msgspec.json.encode(document).decode(),
        "state": msgspec.json.encode(header).decode(),
    }
    described = {"__metadata__": {**metadata, "sha256": _digest(metadata)}, **_tensors(header)}
    start = msgspec.json.encode(described)
    start += b" " * (-len(start) % _PREFIX)
    with replacing(path) as file:
        file.write(len(start).to_bytes(_PREFIX, "little") + start)
        for group in state.groups:
            for unit in group:
                file.write(_bytes(unit))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yields a file beside `path` that only this user can read. It replaces `path` at the end of the block, or is
    removed if the block raises. Raises `NoRoom` if the disk is full, and `InvalidRequest` if writing fails for another
    reason."""
    partly = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open_private(partly) as file:
            yield file
        partly.replace(path)
    except BaseException as error:
        with suppress(OSError):
            partly.unlink()
        if isinstance(error, OSError):
            kind = NoRoom if error.errno in _FULL else InvalidRequest
            raise kind(f"{path} cannot be written: {error.strerror}") from error
        raise


def _bytes(unit: Bytes) -> memoryview:
    return np.ascontiguousarray(unit).data


def _digest(metadata: dict[str, str]) -> str:
    return hashlib.sha256(msgspec.json.encode(metadata, order="deterministic")).hexdigest()


def _tensors(header: StateHeader) -> dict[str, dict[str, object]]:
    """Returns the description of each group's units in the header, as safetensors writes it."""
    found: dict[str, dict[str, object]] = {}
    begin = 0
    for group, (count, size) in enumerate(zip(header.units, header.unit_bytes, strict=True)):
        end = begin + count * size
        found[f"group {group}"] = {"dtype": "U8", "shape": [count, size], "data_offsets": [begin, end]}
        begin = end
    return found


class StateFile:
    """An open file with a session and its state. Close it."""

    def __init__(self, path: Path, inspect: Callable[[bytes], None] = lambda _: None) -> None:
        """Reads everything except the units. `inspect` receives each JSON text in the file before it is parsed, and may
        raise. Raises `InvalidRequest` if the file has another format or a damaged header."""
        self._inspect = inspect
        try:
            self._file: BinaryIO = open_regular(path)
        except OSError as error:
            raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from error
        try:
            self.document, self.header, self._start = self._read()
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        self._file.close()

    def _read(self) -> tuple[SessionDocument, StateHeader, int]:
        size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._file.read(_PREFIX), "little")
        if not 0 < length <= min(_MAX_HEADER, size - _PREFIX):
            raise _damaged()
        try:
            data = self._file.read(length)
            self._inspect(data)
            described = msgspec.json.decode(data, type=dict[str, dict[str, msgspec.Raw]])
            given = {name: msgspec.json.decode(raw, type=str) for name, raw in described["__metadata__"].items()}
            digest = given.pop("sha256", "")
            if given.get("format") != FORMAT:
                raise InvalidRequest(f"the file's format is {given.get('format')!r}; allowed: {FORMAT!r}")
            if digest != _digest(given):
                raise _damaged()
            for part in ("state", "session"):
                self._inspect(given[part].encode())
            header = msgspec.json.decode(given["state"], type=StateHeader)
            document = read_document(given["session"])
            tensors = {
                name: {key: msgspec.json.decode(raw) for key, raw in one.items()}
                for name, one in described.items()
                if name != "__metadata__"
            }
        except (msgspec.MsgspecError, UnicodeError, KeyError, RecursionError) as error:
            raise _damaged() from error
        counts = [len(group) for group in header.checksums]
        if header.units != counts or len(header.unit_bytes) != len(counts) or min([*header.unit_bytes, 1]) < 1:
            raise _damaged()
        start = _PREFIX + length
        whole = start + sum(n * each for n, each in zip(header.units, header.unit_bytes, strict=True))
        if tensors != _tensors(header) or size != whole:
            raise _damaged()
        return document, header, start

    def check(self, fingerprint: str, identity: str) -> None:
        """Raises `InvalidRequest` unless the session is undamaged and its state is of this model and these weights."""
        self.document.check(fingerprint)
        if self.header.identity != identity:
            raise InvalidRequest(
                "the session's state is of other weights or laid out for other kernels; allowed: state of this "
                "model; export it without state"
            )

    def verify(self) -> None:
        """Reads all units. Raises `InvalidRequest` if one is damaged."""
        for group in range(len(self.header.units)):
            for _ in self.pieces(group):
                pass

    def pieces(self, group: int) -> Iterator[Bytes]:
        """Yields the units of a group, in order, a few at a time: uint8 [units, bytes a unit]. Raises `InvalidRequest`
        if one is damaged, since the file may have changed after it was verified."""
        header = self.header
        count, size = header.units[group], header.unit_bytes[group]
        begin = self._start + sum(n * each for n, each in zip(header.units[:group], header.unit_bytes, strict=False))
        most = max(1, PIECE // size)
        for first in range(0, count, most):
            wanted = min(most, count - first) * size
            try:
                self._file.seek(begin + first * size)
                data = bytearray(self._file.read(wanted))  # writable, so that units can be overwritten
            except OSError as error:
                raise InvalidRequest(f"the file can no longer be read: {error.strerror}") from error
            if len(data) < wanted:
                raise _damaged()
            units = np.frombuffer(data, np.uint8).reshape(-1, size)
            if [zlib.crc32(unit.data) for unit in units] != header.checksums[group][first : first + len(units)]:
                raise _damaged()
            yield units

    def state(self) -> CopiedState:
        """Reads the whole state into memory."""
        groups = range(len(self.header.units))
        return CopiedState(self.header.position, [[u for piece in self.pieces(g) for u in piece] for g in groups])


def is_state_file(start: bytes) -> bool:
    """Whether a file with this beginning may be a state file; sessions without state are JSON objects."""
    return start[_PREFIX : _PREFIX + 1] == b"{" and b"\0" in start[:_PREFIX]  # JSON has no zero bytes


def _damaged() -> InvalidRequest:
    return InvalidRequest("the file is damaged, or not an exported session with state; export it again")
