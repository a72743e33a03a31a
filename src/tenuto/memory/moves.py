"""Copies of units on their way to the device, which other threads carry while steps run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

import numpy as np

from tenuto.base.errors import InvariantError
from tenuto.base.plan import Bytes, Copier, CopyFailed
from tenuto.memory.pool import Pool
from tenuto.memory.unit_files import Disk, DiskFailed, UnitFile

THREADS = 2
"""Moves that are carried at once."""


@dataclass(frozen=True, slots=True)
class Target:
    """Unit `unit` of a group is to be filled with `data`, or row `row` of `file`."""

    group: int
    unit: int
    size: int
    data: Bytes | None
    file: UnitFile | None
    row: int


class Move:
    """Fills units of the device with copies of them, piece by piece, in the thread that calls `advance`.

    `wanted` and `cancelled` are written by the engine's thread; all else by the thread that carries it, before `ended`
    is set. `failure`: the cause, if it failed; then nothing of it may be used. `read` and `written`: bytes and seconds.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        copier: Copier,
        disk: Disk | None,
        timer: Callable[[], float],
        piece: int,
        told: Callable[[Move], None],
    ) -> None:
        """`piece`: bytes that are copied at once, or one unit. `told` is called with it when it has ended, in the
        thread that carries it."""
        self.targets = targets
        self._copier = copier
        self._disk = disk
        self._timer = timer
        self._told = told
        self._pieces = _pieces(targets, piece)
        self.wanted = 0  # how many sessions wait for it
        self.cancelled = False  # nobody does any more
        self.failure = ""
        self.error: BaseException | None = None  # a bug of ours
        self.read = 0, 0.0
        self.written = 0, 0.0
        self.ended = threading.Event()

    @property
    def usable(self) -> bool:
        """Whether the units are what they should be, or may still become that."""
        return not (self.cancelled or self.failure)

    def carry(self) -> None:
        """Go on to the end."""
        while self.advance():
            pass

    def advance(self) -> bool:
        """Copy the next piece. False if that was the last, and what it has filled may be touched by others."""
        piece = next(self._pieces, None) if not self.cancelled else None
        if piece is not None:
            try:
                self._copy(piece)
            except DiskFailed as error:
                self.failure = error.cause
            except CopyFailed:
                self.failure = "copy"
            except BaseException as error:  # noqa: BLE001 - the engine's thread raises it
                self.failure, self.error = "bug", error
            if not self.failure:
                return True
        self.ended.set()
        self._told(self)
        return False

    def _copy(self, piece: Sequence[Target]) -> None:
        """Raises `DiskFailed` or `CopyFailed`."""
        file, began = piece[0].file, self._timer()
        if file is not None:
            data = self._read(file, piece)
            size = sum(target.size for target in piece)
            now = self._timer()
            self.read, began = (self.read[0] + size, self.read[1] + now - began), now
        else:
            data = [target.data for target in piece if target.data is not None]
        self._copier.write_units(piece[0].group, np.array([target.unit for target in piece], np.int32), data)
        size = sum(each.nbytes for each in data)
        self.written = self.written[0] + size, self.written[1] + self._timer() - began

    def _read(self, file: UnitFile, piece: Sequence[Target]) -> list[Bytes]:
        if self._disk is None:
            raise InvariantError("units are on disk, and there is no disk")
        group = piece[0].group
        return self._disk.read(file, {group: [target.row for target in piece]})[group]


def _pieces(targets: Iterable[Target], most: int) -> Iterator[list[Target]]:
    """What is of one group, and in one file or in host memory, up to `most` bytes."""
    piece: list[Target] = []
    for target in targets:
        full = (len(piece) + 1) * target.size > most
        if piece and (full or (piece[0].group, piece[0].file) != (target.group, target.file)):
            yield piece
            piece = []
        piece.append(target)
    if piece:
        yield piece


class Carrier(Protocol):
    """Has moves advance until they end. `piece`: bytes that are copied at once: what a move that is cancelled may still
    copy."""

    @property
    def piece(self) -> int: ...

    def carry(self, move: Move) -> None:
        """Begin, and return."""
        ...

    def wait(self, move: Move) -> None:
        """Return when a move that it carries has ended."""
        ...

    def close(self) -> None:
        """Nothing is carried any more; all moves have ended."""
        ...


class CopyThreads:
    """A `Carrier` with threads of its own."""

    piece = 2**24

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "tenuto-copies")

    def carry(self, move: Move) -> None:
        """See `Carrier.carry`."""
        self._threads.submit(move.carry)

    def wait(self, move: Move) -> None:
        """See `Carrier.wait`."""
        move.ended.wait()

    def close(self) -> None:
        """See `Carrier.close`."""
        self._threads.shutdown()


class Moves:
    """The moves under way. The units that one fills belong to it until `take_ended` has returned it, whoever else holds
    them or held them."""

    def __init__(
        self, pools: Sequence[Pool], copier: Copier, disk: Disk | None, carrier: Carrier, timer: Callable[[], float]
    ) -> None:
        self._pools = pools
        self._copier = copier
        self._disk = disk
        self._carrier = carrier
        self._timer = timer
        self._ended: SimpleQueue[Move] = SimpleQueue()
        self._under_way: dict[Move, None] = {}
        self.wake: Callable[[], None] = lambda: None  # called when one has ended, in any thread; written by the loop

    def __len__(self) -> int:
        return len(self._under_way)

    def __contains__(self, move: Move) -> bool:
        return move in self._under_way

    def begin(self, targets: Sequence[Target]) -> Move:
        """Have leased units filled."""
        move = Move(targets, self._copier, self._disk, self._timer, self._carrier.piece, self._tell)
        for group, units in _by_group(targets).items():
            self._pools[group].copy_begins(units)
        self._under_way[move] = None
        self._carrier.carry(move)
        return move

    def _tell(self, move: Move) -> None:
        self._ended.put(move)
        self.wake()

    def take_ended(self) -> list[Move]:
        """Those that have ended since the last call. Raises what was raised in their threads if that is a bug."""
        ended: list[Move] = []
        while True:
            try:
                move = self._ended.get_nowait()
            except Empty:
                return ended
            del self._under_way[move]
            for group, units in _by_group(move.targets).items():
                self._pools[group].copy_ended(units)
            if move.error is not None:
                raise move.error
            ended.append(move)

    def give_up(self, move: Move) -> None:
        """One that waited for the move does not any more. If it was the last, the move ends with the piece at hand."""
        move.wanted -= 1
        move.cancelled = not move.wanted

    def wait(self) -> None:
        """Return when all have ended."""
        for move in self._under_way:
            self._carrier.wait(move)

    def close(self) -> None:
        """Nothing is moved any more."""
        for move in self._under_way:
            move.cancelled = True
        self._carrier.close()


def _by_group(targets: Iterable[Target]) -> dict[int, list[int]]:
    units: dict[int, list[int]] = {}
    for target in targets:
        units.setdefault(target.group, []).append(target.unit)
    return units
