"""The processes of the ranks after the first one, which call the same methods as that one."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from tenuto.exec.torch_load import Part

ENDED_SECONDS = 5.0
"""Time for a process to end once it has failed or was told to."""


@dataclass(frozen=True, slots=True)
class Start:
    """A follower's first message. `meeting`: see `GroupRanks`."""

    part: Part
    rank: int
    size: int
    meeting: str
    threads: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A follower's answer instead of a result."""

    reason: str


class Followers:
    """The processes. Messages and answers are pickled, in pipes that only they and this process have. Methods raise
    `OSError` or `EOFError` if a process has ended."""

    def __init__(self, starts: Sequence[Start]) -> None:
        command = [sys.executable, "-m", "tenuto.exec.parallel.follower"]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603 - our own command
            for _ in starts
        ]
        for process, start in zip(self._processes, starts, strict=True):
            _send(process.stdin, start)

    def tell(self, name: str, *args: Any) -> None:
        """Tells all to call a method of their forward passes."""
        self.tell_each(name, [args] * len(self._processes))

    def tell_each(self, name: str, args: Sequence[tuple[Any, ...] | None]) -> None:
        """Has each call a method with its own arguments; one with `None` calls nothing."""
        for process, given in zip(self._processes, args, strict=True):
            if given is not None:
                _send(process.stdin, (name, given))

    def answers(self) -> list[Any]:
        """Returns the next answer of each."""
        found = []
        for process in self._processes:
            assert process.stdout is not None
            found.append(pickle.load(process.stdout))  # noqa: S301 - from our own process
        return found

    def ended(self) -> str:
        """Describes the processes that have ended, or end soon; "" if all go on."""
        found = []
        for rank, process in enumerate(self._processes, start=1):
            with suppress(subprocess.TimeoutExpired):
                found.append(f"rank {rank} has ended with status {process.wait(ENDED_SECONDS)}")
        return ", ".join(found)

    def close(self) -> None:
        """Ends all processes."""
        for process in self._processes:
            with suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()  # at its end, they end
        for process in self._processes:
            try:
                process.wait(ENDED_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _send(to: IO[bytes] | None, message: object) -> None:
    assert to is not None
    pickle.dump(message, to, pickle.HIGHEST_PROTOCOL)
    to.flush()
