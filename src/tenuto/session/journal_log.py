"""Repair of SQLite's write-ahead log after a damaged frame. Format: https://www.sqlite.org/fileformat2.html#walformat

The checksum of a frame continues that of the frame before, so one flipped bit makes SQLite drop everything after it.
This module computes new checksums over the frames as they are, which recovers all frames. A flipped bit in a frame's
header is corrected. A page with a flipped bit remains damaged, which the checksums of rows reveal.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

_HEADER, _FRAME = 32, 24
_MAGIC = 0x377F0682
"""The magic number of logs whose checksums are over little-endian words; it is one higher for big-endian words."""
_VERSION = 3007000
_FIRST = (1).to_bytes(4, "big")
_Words = npt.NDArray[np.uint32]


_CHANGING = slice(28, 40)
"""The bytes of the first page with the size of the database and its free pages. The rest of the page is the schema,
which never changes in a journal."""


def mended_log(data: bytes, first_page: bytes) -> bytes | None:
    """Returns the log with correct checksums, up to its last commit; `None` if it has no commit. `first_page`: the
    first page of the database, which replaces that in the log, since nothing can be read with a damaged schema."""
    page_size = len(first_page)
    step = _FRAME + page_size
    count = max(0, (len(data) - _HEADER) // step)
    salts = [data[_HEADER + i * step + 8 : _HEADER + i * step + 16] for i in range(count)]
    if not salts:
        return None
    header, noted = data[:24], data[24:_HEADER]
    big = header[3:4] == (_MAGIC | 1).to_bytes(4, "big")[3:4]
    salt = header[16:] if _stored(_checksum(header, (0, 0), big=big)) == noted else salts[0]
    last = max((i for i in range(count) if _is_of(salts[i], salt)), default=-1)
    header = (_MAGIC | big).to_bytes(4, "big") + _VERSION.to_bytes(4, "big") + page_size.to_bytes(4, "big")
    header += data[12:16] + salt
    sums = _checksum(header, (0, 0), big=big)
    frames, whole = [header + _stored(sums)], 1
    for i in range(last + 1):
        begin = _HEADER + i * step
        before, noted = noted, data[begin + 16 : begin + _FRAME]
        page = data[begin + _FRAME : begin + step]
        target = _corrected(data[begin : begin + 8], page, before, noted, big=big)
        if target[:4] == _FIRST:
            page = first_page[: _CHANGING.start] + page[_CHANGING] + first_page[_CHANGING.stop :]
        sums = _checksum(target + page, sums, big=big)
        frames.append(target + salt + _stored(sums) + page)
        if any(target[4:]):  # a commit: the size of the database after it
            whole = len(frames)
    return b"".join(frames[:whole]) if whole > 1 else None


def _is_of(salt: bytes, log: bytes) -> bool:
    """Whether a frame has the salt of the log, although one half of it may be damaged. Frames left from before the log
    was restarted differ in both halves."""
    return salt[:4] == log[:4] or salt[4:] == log[4:]


def _corrected(target: bytes, page: bytes, before: bytes, noted: bytes, *, big: bool) -> bytes:
    """Returns a frame's page number and database size, and corrects one flipped bit in them if the checksum reveals
    it. `before`, `noted`: the checksums in the log for the frame before and for this one."""
    sums = int.from_bytes(before[:4], "big"), int.from_bytes(before[4:], "big")
    if _stored(_checksum(target + page, sums, big=big)) == noted:
        return target
    flips = ((int.from_bytes(target, "big") ^ 1 << bit).to_bytes(8, "big") for bit in range(64))
    return next((each for each in flips if _stored(_checksum(each + page, sums, big=big)) == noted), target)


def _stored(sums: tuple[int, int]) -> bytes:
    return sums[0].to_bytes(4, "big") + sums[1].to_bytes(4, "big")


def _checksum(data: bytes, before: tuple[int, int], *, big: bool) -> tuple[int, int]:
    """Returns SQLite's checksum: for each pair (a, b) of words, first += a + second, then second += b + first, modulo
    2**32. This is linear, so all pairs are summed at once, each with its coefficients."""
    words = np.frombuffer(data, ">u4" if big else "<u4").astype(np.uint32)
    a, b = words[::2], words[1::2]
    later = _powers(len(a))
    own, both = a, a + b
    first = _sum(later[0, 0] * own + later[0, 1] * both)
    second = _sum(later[1, 0] * own + later[1, 1] * both)
    s, t = before
    p, q, r, u = (int(x) for x in _power(len(a)))
    return (first + p * s + q * t) % 2**32, (second + r * s + u * t) % 2**32


def _sum(words: _Words) -> int:
    return int(words.sum(dtype=np.uint64)) % 2**32


@cache
def _power(n: int) -> tuple[int, int, int, int]:
    """Returns [[1, 1], [1, 2]] to the power `n`, modulo 2**32."""
    p, q, r, u = 1, 0, 0, 1
    for _ in range(n):
        p, q, r, u = (p + q) % 2**32, (p + 2 * q) % 2**32, (r + u) % 2**32, (r + 2 * u) % 2**32
    return p, q, r, u


@cache
def _powers(n: int) -> npt.NDArray[np.uint32]:
    """Returns, for each of `n` pairs in order, the power (see `_power`) for the number of pairs after it: [2, 2, n]."""
    found = np.empty((2, 2, n), np.uint32)
    p, q, r, u = 1, 0, 0, 1
    for i in range(n - 1, -1, -1):
        found[:, :, i] = [[p, q], [r, u]]
        p, q, r, u = (p + q) % 2**32, (p + 2 * q) % 2**32, (r + u) % 2**32, (r + 2 * u) % 2**32
    return found
