"""Peers as processes: started, frozen while another is measured, weighed and ended."""

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
    """A peer did not start, or ended before its time; the message says what it wrote last."""


class Group:
    """A process and those it starts, in a group of their own. What it writes, except to a pipe, goes to `log`."""

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
        """An error that says `what`, and what was written last."""
        lines = self._log.read_text(errors="replace").splitlines()[-5:]
        return PeerFailed("\n".join([f"{what} (status {self.process.poll()})", *lines]))

    def freeze(self) -> None:
        """Take no more time of the processor until `thaw`."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Go on."""
        os.killpg(self.process.pid, signal.SIGCONT)

    def resident_bytes(self) -> int:
        """Memory in use by all of its processes; what several share counts once."""
        return sum(map(_proportional_bytes, _members(self.process.pid)))

    def processor_seconds(self) -> float:
        """Time of the processors that its processes have used."""
        return sum(map(_processor_seconds, _members(self.process.pid)))

    def end(self) -> None:
        """End all of its processes."""
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
                with suppress(BrokenPipeError):  # nobody reads what was still to be written
                    pipe.close()


class Disturbance:
    """How much of the processors others than a group and this process use, from now on."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._began = time.perf_counter()
        self._before = self._seconds()

    def _seconds(self) -> float:
        """Time that anybody used or that was stolen from this machine, less ours (the kernel's `proc.rst`)."""
        user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
        busy = (user + nice + system + irq + softirq + steal) / TICKS
        return busy - self._group.processor_seconds() - time.process_time()

    def share(self) -> float:
        """Of the time of all processors. Negative figures are of clocks that tick."""
        elapsed = time.perf_counter() - self._began
        return max(0.0, (self._seconds() - self._before) / elapsed / (os.cpu_count() or 1))


@contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str], log: Path, *, piped: bool = False
) -> Iterator[Group]:
    """A group while the block runs."""
    group = Group(command, environment, log, piped=piped)
    try:
        yield group
    finally:
        group.end()


def wait_until_ready(group: Group, url: str) -> None:
    """Until `url` answers 200. Raises `PeerFailed`."""
    while time.perf_counter() < group.began + START_SECONDS:
        if group.process.poll() is not None:
            raise group.failure("it ended while starting")
        with suppress(httpx.TransportError):
            if httpx.get(url, timeout=5).status_code == 200:
                return
        time.sleep(POLL_SECONDS)
    raise group.failure(f"it was not ready after {START_SECONDS:.0f} s")


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return int(chosen.getsockname()[1])


def _members(group: int) -> list[int]:
    """The process ids of a group; those that have ended do not count."""
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
    """Those of a process's `stat` from its state on, the third. Raises `OSError` if it has ended."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _proportional_bytes(pid: int) -> int:
    """A process's memory, pages it shares with others divided by their number (the kernel's `proc.rst`)."""
    with suppress(OSError):
        if found := re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE):
            return int(found[1]) * 1024
    return 0
