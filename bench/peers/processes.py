"""Processes of peers, which can be started, suspended while another is measured, weighed and ended."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

START_SECONDS = 600.0
END_SECONDS = 20.0
POLL_SECONDS = 0.02
TICKS = os.sysconf("SC_CLK_TCK")


class PeerFailed(Exception):
    """A peer did not start or ended early; the message includes the end of its log."""


class Group:
    """A process and its children, in their own process group. Output that is not piped goes to `log`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, *, piped: bool) -> None:
        self.began = time.perf_counter()
        self._log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(  # noqa: S603 - a peer's command
                command,
                env={**os.environ, **environment},
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else output,
                stderr=output,
                text=True,
                start_new_session=True,
            )

    def failure(self, what: str) -> PeerFailed:
        """Returns an error with the message `what` and the last lines of the log."""
        lines = self._log.read_text(errors="replace").splitlines()[-5:]
        return PeerFailed("\n".join([f"{what} (status {self.process.poll()})", *lines]))

    def freeze(self) -> None:
        """Suspends all processes until `thaw`."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Resumes all processes."""
        os.killpg(self.process.pid, signal.SIGCONT)

    def resident_bytes(self) -> int:
        """Returns the memory in use by all processes, in bytes; shared memory counts once."""
        return sum(map(_proportional_bytes, _members(self.process.pid)))

    def processor_seconds(self) -> float:
        """Returns the CPU seconds that all processes have used."""
        return sum(map(_processor_seconds, _members(self.process.pid)))

    def end(self) -> None:
        """Ends all processes."""
        for number, seconds in ((signal.SIGTERM, END_SECONDS), (signal.SIGKILL, END_SECONDS)):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
                os.killpg(self.process.pid, signal.SIGCONT)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                if not _members(self.process.pid):
                    self.process.wait()
                    self._close()
                    return
                time.sleep(POLL_SECONDS)
        raise self.failure("it cannot be ended")

    def _close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # buffered input has no reader any more
                    pipe.close()


class Disturbance:
    """Measures the CPU time that processes other than a group and this one use, from now on."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._began = time.perf_counter()
        self._before = self._seconds()

    def _seconds(self) -> float:
        """Returns the CPU seconds used by other processes or stolen from this machine (see the kernel's `proc.rst`)."""
        user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
        busy = (user + nice + system + irq + softirq + steal) / TICKS
        return busy - self._group.processor_seconds() - time.process_time()

    def share(self) -> float:
        """Returns the fraction of all processors' time. Negative values, caused by the clocks' resolution, become 0."""
        elapsed = time.perf_counter() - self._began
        return max(0.0, (self._seconds() - self._before) / elapsed / (os.cpu_count() or 1))


@contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str], log: Path, *, piped: bool = False
) -> Iterator[Group]:
    """Runs a group of processes during the block."""
    group = Group(command, environment, log, piped=piped)
    try:
        yield group
    finally:
        group.end()


def wait_until_ready(group: Group, url: str) -> None:
    """Waits until `url` answers 200. Raises `PeerFailed`."""
    while time.perf_counter() < group.began + START_SECONDS:
        if group.process.poll() is not None:
            raise group.failure("it ended while starting")
        with suppress(httpx.TransportError):
            if httpx.get(url, timeout=5).status_code == 200:
                return
        time.sleep(POLL_SECONDS)
    raise group.failure(f"it was not ready after {START_SECONDS:.0f} s")


def free_port() -> int:
    """Returns a port that is free at present."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return int(chosen.getsockname()[1])


def _members(group: int) -> list[int]:
    """Returns the ids of a group's processes, except those that have ended."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, of = _fields(int(place.name))[:3]
            if int(of) == group and state != "Z":
                found.append(int(place.name))
    return found


def _processor_seconds(pid: int) -> float:
    with suppress(OSError):
        return sum(map(int, _fields(pid)[11:13])) / TICKS
    return 0.0


def _fields(pid: int) -> list[str]:
    """Returns the fields of a process's `stat` from the third, its state, on. Raises `OSError` if it has ended."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _proportional_bytes(pid: int) -> int:
    """Returns a process's proportional set size in bytes: shared pages are divided by the number of processes (see the
    kernel's `proc.rst`)."""
    with suppress(OSError):
        if found := re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE):
            return int(found[1]) * 1024
    return 0
