"""Repair of SQLite's write-ahead log after a damaged frame. Format: https://www.sqlite.org/fileformat2.html#walformat

The checksum of a frame continues that of the frame before, so one flipped bit makes SQLite drop everything after it.
This module computes new checksums over the frames as they are, which recovers all frames. A single flipped bit in a
frame is found by its old checksum and corrected. Larger damage remains, and the checksums of rows reveal it.
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
_Sums = tuple[int, int]


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
    header, noted = data[:24], _sums(data[24:_HEADER])
    big = header[3:4] == (_MAGIC | 1).to_bytes(4, "big")[3:4]
    before = {noted, _checksum(header, (0, 0), big=big)}
    salt = header[16:] if len(before) == 1 else salts[0]
    last = max((i for i in range(count) if _is_of(salts[i], salt)), default=-1)
    header = (_MAGIC | big).to_bytes(4, "big") + _VERSION.to_bytes(4, "big") + page_size.to_bytes(4, "big")
    header += data[12:16] + salt
    sums = _checksum(header, (0, 0), big=big)
    frames, whole, lowest = [header + _stored(sums)], 1, 1
    sizes = sorted(_number(data, _HEADER + i * step + 4) for i in range(last + 1))
    pages = max(_number(first_page, _CHANGING.start), *sizes[-2:-1])  # without the highest, which may be damaged
    for i in range(last + 1):
        begin = _HEADER + i * step
        frame, noted = (
            data[begin : begin + 8] + data[begin + _FRAME : begin + step],
            _sums(data[begin + 16 : begin + 24]),
        )
        frame, before = _corrected(frame, before, noted, range(lowest, pages + 1), big=big)
        target, page = frame[:8], frame[8:]
        if target[:4] == _FIRST:
            page = first_page[: _CHANGING.start] + page[_CHANGING] + first_page[_CHANGING.stop :]
        sums = _checksum(target + page, sums, big=big)
        frames.append(target + salt + _stored(sums) + page)
        lowest = _number(target, 0) + 1  # pages of a transaction are in order
        if any(target[4:]):  # a commit: the size of the database after it
            whole, lowest = len(frames), 1
    return b"".join(frames[:whole]) if whole > 1 else None


def _is_of(salt: bytes, log: bytes) -> bool:
    """Whether a frame has the salt of the log, although one half of it may be damaged. Frames left from before the log
    was restarted differ in both halves."""
    return salt[:4] == log[:4] or salt[4:] == log[4:]


def _corrected(
    frame: bytes, before: set[_Sums], noted: _Sums, allowed: range, *, big: bool
) -> tuple[bytes, set[_Sums]]:
    """Returns a frame without its salt and checksum, and the possible checksums up to its end. A single flipped bit,
    which changes both sums by its word's coefficients, is corrected, unless the checksum itself may have it.
    `before`: the possible checksums of the frame before. `noted`: the checksum in this frame. `allowed`: page
    numbers that can follow."""
    found = {_checksum(frame, sums, big=big) for sums in before}
    bits_wrong = [sum((a ^ b).bit_count() for a, b in zip(sums, noted, strict=True)) for sums in found]
    if min(bits_wrong) <= 1 or len(found) > 1:
        return frame, {noted} if not min(bits_wrong) else {noted, *found}
    ((first, second),) = found
    wrong = np.array([noted[0] - first, noted[1] - second], np.int64).astype(np.uint32)
    words = np.frombuffer(frame, ">u4" if big else "<u4").astype(np.uint32)
    later = _powers(len(words) // 2)
    coefficients = np.stack([later[:, 0] + later[:, 1], later[:, 1]], axis=2).reshape(2, -1, 1)
    bits = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32))
    changes = coefficients * np.where(words[:, None] & bits, -bits, bits)
    flipped = np.argwhere((changes == wrong[:, None, None]).all(axis=0)).tolist()
    if len(flipped) > 1:  # the checksum does not tell high bits of several words apart
        page, size = _number(frame, 0), _number(frame, 4)
        wrong_word = 0 if page not in allowed else 1 if 0 < size < page or size >= allowed.stop else -1
        flipped = [each for each in flipped if each[0] == wrong_word]
    if len(flipped) != 1:
        return frame, {noted, *found}
    word, bit = flipped[0]
    words[word] ^= bits[bit]
    return words.astype(">u4" if big else "<u4").tobytes(), {noted}


def _number(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "big")


def _sums(stored: bytes) -> _Sums:
    return _number(stored, 0), _number(stored, 4)


def _stored(sums: _Sums) -> bytes:
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
    ((p, q), (r, u)) = _powers(len(a) + 1)[:, :, 0].tolist()
    return (first + p * s + q * t) % 2**32, (second + r * s + u * t) % 2**32


def _sum(words: _Words) -> int:
    return int(words.sum(dtype=np.uint64)) % 2**32


@cache
def _powers(n: int) -> npt.NDArray[np.uint32]:
    """Returns, for each of `n` pairs in order, [[1, 1], [1, 2]] to the power of the number of pairs after it, modulo
    2**32: [2, 2, n]."""
    found = np.empty((2, 2, n), np.uint32)
    p, q, r, u = 1, 0, 0, 1
    for i in range(n - 1, -1, -1):
        found[:, :, i] = [[p, q], [r, u]]
        p, q, r, u = (p + q) % 2**32, (p + 2 * q) % 2**32, (r + u) % 2**32, (r + 2 * u) % 2**32
    return found
