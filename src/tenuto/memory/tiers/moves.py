"""Copies of units on their way to the device, or to disk, which other threads carry while steps run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar, cast

import numpy as np

from tenuto.base.errors import InvariantError
from tenuto.base.plan import Bytes, Copier, CopyFailed
from tenuto.memory.pool import Pool
from tenuto.memory.tiers.contents import Content, NamedUnit
from tenuto.memory.tiers.unit_files import Disk, DiskFailed, UnitFile, read_units

THREADS = 2
"""Moves that are carried at once."""


@dataclass(frozen=True, slots=True)
class Target:
    """Unit `unit` of a group is to be filled with `data`, or row `row` of `file`, which has to hold `content`."""

    group: int
    unit: int
    content: Content
    size: int
    data: Bytes | None
    file: UnitFile | None
    row: int


class Job:
    """Something to be copied, piece by piece, in the thread that calls `advance`.

    `cancelled` and `failure` are written by the engine's thread, so that nothing changes while it acts; all else by the
    thread that carries it, before `ended` is set. `failure`: the cause, if it failed; then nothing of it may be used.
    """

    def __init__(self, told: Callable[[Job], None]) -> None:
        """`told` is called with it when it has ended, in the thread that carries it."""
        self._told = told
        self.cancelled = False  # nobody wants it any more
        self.failure = ""
        self._cause = ""  # of its failure
        self.error: BaseException | None = None  # a bug of ours
        self.ended = threading.Event()

    @property
    def usable(self) -> bool:
        """Whether the copies are what they should be, or may still become that."""
        return not (self.cancelled or self.failure)

    def settle(self) -> None:
        """It has ended: note whether it failed."""
        self.failure = self._cause

    def carry(self) -> None:
        """Go on to the end."""
        while self.advance():
            pass

    def advance(self) -> bool:
        """Copy the next piece. False if there was none left, and what it copies may be touched by others."""
        if not self.cancelled:
            try:
                if self._copy_next():
                    return True
            except DiskFailed as error:
                self._cause = error.cause
            except CopyFailed:
                self._cause = "copy"
            except BaseException as error:  # noqa: BLE001 - the engine's thread raises it
                self._cause, self.error = "bug", error
        self.ended.set()
        self._told(self)
        return False

    def _copy_next(self) -> bool:
        """Copy a piece; False if there is none left. Raises `DiskFailed` or `CopyFailed`."""
        raise NotImplementedError


class Write(Job):
    """Writes units, by group, to a new file of the disk: `file`, once it has ended."""

    def __init__(self, units: Mapping[int, Sequence[NamedUnit]], disk: Disk, told: Callable[[Job], None]) -> None:
        super().__init__(told)
        self._units = units
        self._disk = disk
        self.file: UnitFile | None = None

    def _copy_next(self) -> bool:
        self.file = self._disk.write(self._units)
        return False


class Move(Job):
    """Fills units of the device with copies of them.

    `wanted` is written by the engine's thread. `read` and `written`: bytes and seconds.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        copier: Copier,
        disk: Disk | None,
        timer: Callable[[], float],
        piece: int,
        told: Callable[[Job], None],
    ) -> None:
        """`piece`: bytes that are copied at once, or one unit."""
        super().__init__(told)
        self.targets = targets
        self._copier = copier
        self._disk = disk
        self._timer = timer
        self._pieces = _pieces(targets, piece)
        self.wanted = 0  # how many sessions wait for it
        self.read = 0, 0.0
        self.written = 0, 0.0

    def _copy_next(self) -> bool:
        piece = next(self._pieces, None)
        if piece is None:
            return False
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
        return True

    def _read(self, file: UnitFile, piece: Sequence[Target]) -> list[Bytes]:
        if self._disk is None:
            raise InvariantError("units are on disk, and there is no disk")
        return read_units(self._disk, file, piece[0].group, [(target.row, target.content) for target in piece])


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
    """Has jobs advance until they end. `piece`: bytes that a move copies at once: what one that is cancelled may still
    copy."""

    @property
    def piece(self) -> int: ...

    def carry(self, job: Job) -> None:
        """Begin, and return."""
        ...

    def withdraw(self, job: Job) -> None:
        """A job was cancelled: it may end at once if it has not begun, and need not wait for others."""
        ...

    def wait(self, job: Job) -> None:
        """Return when a job that it carries has ended."""
        ...

    def close(self) -> None:
        """Nothing is carried any more; all jobs have ended."""
        ...


class CopyThreads:
    """A `Carrier` with threads of its own."""

    piece = 2**24

    def __init__(self) -> None:
        self._movers = ThreadPoolExecutor(THREADS, "tenuto-copies")
        self._writer = ThreadPoolExecutor(1, "tenuto-writes")  # so that no turn waits for what leaves
        self._futures: dict[Job, Future[None]] = {}

    def carry(self, job: Job) -> None:
        """See `Carrier.carry`."""
        threads = self._writer if isinstance(job, Write) else self._movers
        future = self._futures[job] = threads.submit(job.carry)
        future.add_done_callback(lambda _: self._futures.pop(job, None))

    def withdraw(self, job: Job) -> None:
        """See `Carrier.withdraw`."""
        future = self._futures.get(job)
        if future is not None and future.cancel():
            job.carry()  # which ends it

    def wait(self, job: Job) -> None:
        """See `Carrier.wait`."""
        job.ended.wait()

    def close(self) -> None:
        """See `Carrier.close`."""
        self._movers.shutdown()
        self._writer.shutdown()


J = TypeVar("J", bound=Job)


class Jobs(Generic[J]):
    """Jobs of one kind that are under way, as the engine's thread knows them."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._ended: SimpleQueue[J] = SimpleQueue()
        self._under_way: dict[J, None] = {}
        self.wake: Callable[[], None] = lambda: None  # called when one has ended, in any thread; written by the loop

    def __len__(self) -> int:
        return len(self._under_way)

    def __contains__(self, job: J) -> bool:
        return job in self._under_way

    def carry(self, job: J) -> None:
        """Have it begin."""
        self._under_way[job] = None
        self._carrier.carry(job)

    def tell(self, job: J) -> None:
        """It has ended. Any thread may call this."""
        self._ended.put(job)
        self.wake()

    def take_ended(self) -> list[J]:
        """Those that have ended since the last call. Raises what was raised in their threads if that is a bug."""
        ended: list[J] = []
        while True:
            try:
                job = self._ended.get_nowait()
            except Empty:
                return ended
            del self._under_way[job]
            job.settle()
            if job.error is not None:
                raise job.error
            ended.append(job)

    def wait(self) -> None:
        """Return when all have ended."""
        for job in self._under_way:
            self._carrier.wait(job)

    def cancel(self) -> None:
        """Have all end early."""
        for job in self._under_way:
            job.cancelled = True


class MovesUnderWay(Jobs[Move]):
    """The moves under way. The units that one fills belong to it until `take_ended` has returned it, whoever else holds
    them or held them."""

    def __init__(
        self, pools: Sequence[Pool], copier: Copier, disk: Disk | None, carrier: Carrier, timer: Callable[[], float]
    ) -> None:
        super().__init__(carrier)
        self._pools = pools
        self._copier = copier
        self._disk = disk
        self._timer = timer

    def begin(self, targets: Sequence[Target]) -> Move:
        """Have leased units filled."""
        tell = cast("Callable[[Job], None]", self.tell)
        move = Move(targets, self._copier, self._disk, self._timer, self._carrier.piece, tell)
        for group, units in _by_group(targets).items():
            self._pools[group].copy_begins(units)
        self.carry(move)
        return move

    def take_ended(self) -> list[Move]:
        """See `Jobs.take_ended`. Their units are the pools' again."""
        ended = super().take_ended()
        for move in ended:
            for group, units in _by_group(move.targets).items():
                self._pools[group].copy_ended(units)
        return ended

    def give_up(self, move: Move) -> None:
        """One that waited for the move does not any more. If it was the last, the move ends with the piece at hand."""
        move.wanted -= 1
        move.cancelled = not move.wanted
        if move.cancelled:
            self._carrier.withdraw(move)


def _by_group(targets: Iterable[Target]) -> dict[int, list[int]]:
    units: dict[int, list[int]] = {}
    for target in targets:
        units.setdefault(target.group, []).append(target.unit)
    return units
