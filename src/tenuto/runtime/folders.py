"""The directory in which the replicas of a fleet save the state of their sessions, with a folder for each."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Protocol

from tenuto.base.views import SessionKey
from tenuto.memory.tiers.left_state import LeftState
from tenuto.memory.tiers.state_index import SUFFIXES, StateIndex
from tenuto.memory.tiers.unit_files import INDEX, LOCK, UnitReader


class LeftFolders(Protocol):
    """The state that other replicas, or earlier processes, have saved. One thread uses it at a time."""

    def of(self, replica: int, key: SessionKey) -> LeftState:
        """Returns the state that a replica has left of a session, and maybe of others. Raises `IndexUnusable` or
        `DiskFailed`."""

    def tidy(self, needed: Callable[[Collection[int]], Collection[int]]) -> None:
        """Removes state that no session needs any more. `needed`: of some replicas, returns those whose saved state
        sessions may still need."""


class Folders:
    """The folders of a fleet's replicas in a directory. A replica reads those of others and writes only its own.
    Folders of replicas on other machines are missing, unless the directory is shared.

    Invariant: a folder is removed only if no process uses it, and its replica was not `needed` twice in a row.
    """

    def __init__(self, directory: Path, secret: str, number: int) -> None:
        """`secret`: of the fleet, which tells its folders from those of other fleets. `number`: of this replica."""
        self._directory = directory
        self._prefix = prefix_of(secret)
        self._number = number
        self._copy: tuple[int, list[tuple[int, int] | None], StateIndex] | None = None  # of the index read last
        self._unneeded: set[int] = set()

    @property
    def own(self) -> Path:
        """The folder of this replica."""
        return self._folder(self._number)

    def _folder(self, replica: int) -> Path:
        return self._directory / f"{self._prefix}-{replica}"

    def of(self, replica: int, key: SessionKey) -> LeftState:  # noqa: ARG002 - one index has all sessions
        folder = self._folder(replica)
        return LeftState(self._index(replica, folder / INDEX), lambda identity: closing(UnitReader(folder, identity)))

    def _index(self, replica: int, path: Path) -> StateIndex:
        """Returns a copy of an index. Sessions of one replica are often claimed one after the other, so the last copy
        is kept as long as the index has not changed."""
        changed = [_changed(Path(f"{path}{suffix}")) for suffix in SUFFIXES]
        if self._copy is None or self._copy[:2] != (replica, changed):
            if self._copy is not None:
                self._copy[2].close()
                self._copy = None
            self._copy = replica, changed, StateIndex.copy_of(path)
        return self._copy[2]

    def tidy(self, needed: Callable[[Collection[int]], Collection[int]]) -> None:
        there = {number for number in self._numbers() if number != self._number}
        unneeded = there - set(needed(there)) if there else set()
        for number in unneeded & self._unneeded:
            _remove(self._folder(number))
        self._unneeded = unneeded

    def _numbers(self) -> Iterator[int]:
        """Yields the numbers of the replicas of this fleet that have folders."""
        with suppress(OSError):
            yield from numbers((folder.name for folder in self._directory.iterdir()), self._prefix)


def prefix_of(secret: str) -> str:
    """Returns the beginning of the names of all folders of a fleet with this secret."""
    return hashlib.blake2b(secret.encode(), digest_size=8, person=b"tenuto-folders").hexdigest()


def numbers(folders: Iterable[str], prefix: str) -> Iterator[int]:
    """Yields the numbers of the replicas of a fleet whose folders are among these."""
    for folder in folders:
        of, _, number = folder.rpartition("-")
        if of == prefix and number.isdecimal():
            yield int(number)


def _changed(path: Path) -> tuple[int, int] | None:
    """Returns the time of a file's last change in nanoseconds, and its size; `None` if it is missing."""
    with suppress(OSError):
        found = path.stat()
        return found.st_mtime_ns, found.st_size
    return None


def _remove(folder: Path) -> None:
    """Removes the folder of a replica, unless a process uses it."""
    with suppress(OSError):
        lock = os.open(folder / LOCK, os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
