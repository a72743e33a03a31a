"""A digest of a model's files that identifies its weights."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

from tenuto.formats.mapped import mapped
from tenuto.models.store import PART, ModelFiles

_OF_MODELS = frozenset({".json", ".safetensors"})
_PIECE = 1 << 24
"""Bytes that one thread hashes at a time."""


class Stamp(NamedTuple):
    """A file's identity and the time of its last write. The system updates `changed` (ctime) at every write and
    programs cannot set it, so a file that is written again always gets a different stamp."""

    path: Path
    device: int
    inode: int
    size: int
    modified: int
    changed: int

    @classmethod
    def of(cls, path: Path) -> Stamp:
        """Returns the stamp of a file in its present state."""
        now = path.stat()
        return cls(path, now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)


class WeightsDigest:
    """The digest of the weights in a model's files.

    It covers every byte of every file. Samples would be faster, but two models may differ in a single matrix (a merged
    adapter), and one would then use state computed by the other. Hashing takes as long as reading the files, so it
    is done only when needed: at the start for a disk tier, otherwise for the first export or import of a session.

    Create it before the weights are read. If the files change or vanish later, the loaded weights can no longer be
    identified; `value` is then random and equals no other digest, so saved state is recomputed, never used with the
    wrong weights.
    """

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self.stamps = tuple(map(Stamp.of, _paths(files)))
        """Stamps of all files; they change whenever a file is written."""

    def again(self) -> WeightsDigest:
        """Returns a digest of the same files in their present state."""
        return WeightsDigest(self._files)

    @cached_property
    def value(self) -> str:
        """The digest in hexadecimal digits, or "changed-" and random digits if the files have changed."""
        try:
            found = _hashed([stamp.path for stamp in self.stamps])
            if self.stamps and self.stamps == self.again().stamps:
                return found
        except OSError:  # the files are gone
            pass
        return f"changed-{token_hex(32)}"


def _paths(files: ModelFiles) -> list[Path]:
    """Returns the files that hold a model's description and weights, sorted."""
    if files.path.is_dir():
        return sorted(path for path in files.path.iterdir() if path.suffix in _OF_MODELS)
    parts = PART.search(files.path.stem)
    pattern = PART.sub("", glob.escape(files.path.stem)) + (f"-*-of-{parts[1]}.gguf" if parts else ".gguf")
    return sorted(files.path.parent.glob(pattern))


def _hashed(paths: list[Path]) -> str:
    """Returns a SHA-256 over the SHA-256s of all pieces, which threads compute in parallel without Python's lock."""
    whole = hashlib.sha256()
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
        for path in paths:
            whole.update(f"{path.suffix} {path.stat().st_size}\n".encode())
            for piece in pool.map(_digest_of, _pieces(path)):
                whole.update(piece)
    return whole.hexdigest()


def _digest_of(piece: memoryview) -> bytes:
    return hashlib.sha256(piece).digest()


def _pieces(path: Path) -> Iterator[memoryview]:
    if not path.stat().st_size:
        return
    content = mapped(path).data
    for at in range(0, len(content), _PIECE):
        yield content[at : at + _PIECE]
