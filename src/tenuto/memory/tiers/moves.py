"""Jobs that copy units to the device or to disk in other threads, while steps run."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from tenuto.base.plan import Copier, CopyFailed
from tenuto.memory.pool import Pool
from tenuto.memory.tiers.contents import NamedUnit
from tenuto.memory.tiers.disk import Disk, DiskFailed, Listing, UnitCopy, UnitFile, read_units

THREADS = 2
"""The number of moves that run at once."""
WRITER_NICENESS = 10


@dataclass(frozen=True, slots=True)
class Target:
    """Unit `unit` of the group of `copy`, to be filled with it."""

    unit: int
    copy: UnitCopy


class Job:
    """A job that copies units, piece by piece, in the thread that calls `advance`.

    The engine's thread writes `cancelled` and `failure`, so that they do not change while it acts. The carrying thread
    writes all other fields before it sets `ended`. `failure`: the cause if the job failed; its copies may then not be
    used.
    """

    def __init__(self, jobs: Jobs[Any]) -> None:
        """`jobs`: the jobs under way, to which this one belongs. The thread that carries it reports its end to them."""
        self._jobs = jobs
        self.cancelled = False  # whether it should end early
        self.failure = ""
        self._cause = ""  # the cause of its failure
        self.error: BaseException | None = None  # an internal error
        self.ended = threading.Event()

    @property
    def usable(self) -> bool:
        """Whether the copies are correct, or may still become so."""
        return not (self.cancelled or self.failure)

    def settle(self) -> None:
        """Publishes the outcome of the ended job as `failure`."""
        self.failure = self._cause

    def carry(self) -> None:
        """Copies all pieces."""
        while self.advance():
            pass

    def advance(self) -> bool:
        """Copies the next piece. Returns False once the job has ended, after which other code may touch its units."""
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
        self._jobs.tell(self)
        return False

    def _copy_next(self) -> bool:
        """Copies a piece; returns False if no piece is left. Raises `DiskFailed` or `CopyFailed`."""
        raise NotImplementedError


Batch = Mapping[int, Sequence[NamedUnit]]
"""Units for one file, by group."""
Lister = Callable[[Sequence[UnitFile]], Sequence[Listing]]
"""Returns the changes of the index that follow once files have been written."""


class Write(Job):
    """Writes each of `batches` to a new file of the disk tier, and then changes the disk's index as `listed` says.
    `files`: what it has written, or nothing if it has failed."""

    def __init__(self, jobs: Jobs[Any], batches: Sequence[Batch], disk: Disk, listed: Lister | None = None) -> None:
        super().__init__(jobs)
        self._batches = batches
        self._disk = disk
        self._listed = listed
        self.files: list[UnitFile] = []

    @property
    def saves(self) -> bool:
        """Whether it changes the index."""
        return self._listed is not None

    def _copy_next(self) -> bool:
        if len(self.files) < len(self._batches):
            # what is saved stays in memory, too, for now
            self.files.append(self._disk.write(self._batches[len(self.files)], cached=not self.saves))
            return True
        if self._listed is not None:
            self._disk.index.apply(self._listed(self.files))
        return False

    def settle(self) -> None:
        super().settle()
        if self.failure:
            for file in self.files:
                self._disk.remove(file)
            self.files = []


class Move(Job):
    """Fills units of the device from host memory or disk.

    `wanted` is written by the engine's thread. `read` and `written`: bytes and seconds.
    """

    def __init__(self, moves: MovesUnderWay, targets: Sequence[Target]) -> None:
        super().__init__(moves)
        self.targets = targets
        self._copier, self._disk, self._timer = moves.copier, moves.disk, moves.timer
        self._pieces = _pieces(targets, moves.carrier.piece)
        self.wanted = 0  # the number of sessions that wait for it
        self.read = 0, 0.0
        self.written = 0, 0.0

    def _copy_next(self) -> bool:
        piece = next(self._pieces, None)
        if piece is None:
            return False
        group, file = piece[0].copy.place
        began = self._timer()
        data = read_units(self._disk, [target.copy for target in piece])
        size = sum(each.nbytes for each in data)
        if file is not None:
            now = self._timer()
            self.read, began = (self.read[0] + size, self.read[1] + now - began), now
        self._copier.write_units(group, np.array([target.unit for target in piece], np.int32), data)
        self.written = self.written[0] + size, self.written[1] + self._timer() - began
        return True


def _pieces(targets: Iterable[Target], most: int) -> Iterator[list[Target]]:
    """Yields pieces of up to `most` bytes, or of a single unit, each with copies in one place."""
    piece: list[Target] = []
    for target in targets:
        full = (len(piece) + 1) * target.copy.size > most
        if piece and (full or piece[0].copy.place != target.copy.place):
            yield piece
            piece = []
        piece.append(target)
    if piece:
        yield piece


class Carrier(Protocol):
    """Advances jobs until they end. `piece`: the number of bytes that a move copies at once, which is the most that a
    cancelled move still copies."""

    @property
    def piece(self) -> int: ...

    def carry(self, job: Job) -> None:
        """Begins the job, and returns."""

    def withdraw(self, job: Job) -> None:
        """Lets a cancelled job that has not begun end at once, instead of after the jobs before it."""

    def wait(self, job: Job) -> None:
        """Waits until a job that it carries has ended."""

    def close(self) -> None:
        """Waits for all jobs to end; no job is carried afterwards."""


class CopyThreads:
    """A `Carrier` with its own threads."""

    piece = 2**24

    def __init__(self) -> None:
        self._movers = ThreadPoolExecutor(THREADS, "tenuto-copies")
        self._writer = ThreadPoolExecutor(1, "tenuto-writes", _yield_to_others)  # separate: no turn waits for writes
        self._futures: dict[Job, Future[None]] = {}

    def carry(self, job: Job) -> None:
        threads = self._writer if isinstance(job, Write) else self._movers
        future = self._futures[job] = threads.submit(job.carry)
        future.add_done_callback(lambda _: self._futures.pop(job, None))

    def withdraw(self, job: Job) -> None:
        future = self._futures.get(job)
        if future is not None and future.cancel():
            job.carry()  # ends it, since it is cancelled

    def wait(self, job: Job) -> None:
        job.ended.wait()

    def close(self) -> None:
        self._movers.shutdown()
        self._writer.shutdown()


def _yield_to_others() -> None:
    """Lets other threads have the processor first, since those that compute steps would wait for this one."""
    if sys.platform == "linux":  # elsewhere the priority is that of the process
        os.nice(WRITER_NICENESS)


J = TypeVar("J", bound=Job)


class Jobs(Generic[J]):
    """The jobs of one kind that are under way, from the view of the engine's thread."""

    def __init__(self, carrier: Carrier) -> None:
        self.carrier = carrier
        self._ended: SimpleQueue[J] = SimpleQueue()
        self._under_way: dict[J, None] = {}
        self.wake: Callable[[], None] = lambda: None  # called when a job has ended, in any thread; set by the loop

    def __len__(self) -> int:
        return len(self._under_way)

    def __contains__(self, job: J) -> bool:
        return job in self._under_way

    def carry(self, job: J) -> None:
        """Begins a job."""
        self._under_way[job] = None
        self.carrier.carry(job)

    def tell(self, job: J) -> None:
        """Records that a job has ended. Any thread may call this."""
        self._ended.put(job)
        self.wake()

    def take_ended(self) -> list[J]:
        """Returns the jobs that have ended since the last call. Raises the internal error of a job, if it has one."""
        ended: list[J] = []
        while self._under_way:
            try:
                job = self._ended.get_nowait()
            except Empty:
                break
            del self._under_way[job]
            job.settle()
            if job.error is not None:
                raise job.error
            ended.append(job)
        return ended

    def wait(self) -> None:
        """Waits until all jobs have ended."""
        for job in self._under_way:
            self.carrier.wait(job)

    def cancel(self) -> None:
        """Cancels all jobs, so that they end early."""
        for job in self._under_way:
            job.cancelled = True


class MovesUnderWay(Jobs[Move]):
    """The moves under way. Until `take_ended` has returned a move, pools do not lease the units that it fills again,
    even if they are released."""

    def __init__(
        self, pools: Sequence[Pool], copier: Copier, disk: Disk | None, carrier: Carrier, timer: Callable[[], float]
    ) -> None:
        super().__init__(carrier)
        self._pools = pools
        self.copier = copier
        self.disk = disk
        self.timer = timer

    def begin(self, targets: Sequence[Target]) -> Move:
        """Begins a move that fills leased units."""
        move = Move(self, targets)
        for group, units in _by_group(targets).items():
            self._pools[group].copy_begins(units)
        self.carry(move)
        return move

    def take_ended(self) -> list[Move]:
        """See `Jobs.take_ended`. Pools may lease the units of these moves again."""
        ended = super().take_ended()
        for move in ended:
            for group, units in _by_group(move.targets).items():
                self._pools[group].copy_ended(units)
        return ended

    def give_up(self, move: Move) -> None:
        """Records that a session no longer waits for the move. After the last one, the move ends with its current
        piece."""
        move.wanted -= 1
        move.cancelled = not move.wanted
        if move.cancelled:
            self.carrier.withdraw(move)


def _by_group(targets: Iterable[Target]) -> dict[int, list[int]]:
    units: dict[int, list[int]] = {}
    for target in targets:
        units.setdefault(target.copy.group, []).append(target.unit)
    return units
