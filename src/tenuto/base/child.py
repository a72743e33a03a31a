"""Processes of our own that run a module of ours and end with their standard input."""

from __future__ import annotations

import pickle
import subprocess
import sys
from contextlib import suppress
from typing import Any

ENDED_SECONDS = 5.0
"""Time for a process to end once it has failed or its standard input has ended."""


class Child:
    """A process. Messages and answers are pickled, in pipes that only it and this process have."""

    def __init__(self, module: str) -> None:
        """Starts it. Raises `OSError`."""
        command = [sys.executable, "-m", module]
        self._process = subprocess.Popen(  # noqa: S603 - our own command
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._messages, self._answers = self._process.stdin, self._process.stdout

    def send(self, message: object) -> None:
        """Sends a message. Raises `OSError` if the process has ended."""
        pickle.dump(message, self._messages, pickle.HIGHEST_PROTOCOL)
        self._messages.flush()

    def answer(self) -> Any:
        """Returns the next answer. Raises `OSError` or `EOFError` if the process has ended."""
        return pickle.load(self._answers)  # noqa: S301 - from our own process

    def read(self, size: int) -> bytes:
        """Returns the next `size` bytes, or fewer if the process has ended."""
        return self._answers.read(size)

    def status(self, timeout: float | None = None) -> int:
        """Waits until the process has ended, and returns its exit status: minus the number of the signal, if one ended
        it. Raises `subprocess.TimeoutExpired` after `timeout` seconds."""
        return self._process.wait(timeout)

    def kill(self) -> None:
        """Kills the process. Any thread may call this."""
        self._process.kill()

    def end_input(self) -> None:
        """Ends its standard input, so that it ends soon."""
        with suppress(OSError):
            self._messages.close()

    def close(self) -> None:
        """Ends the process, and kills it if that takes longer than `ENDED_SECONDS`."""
        self.end_input()
        try:
            self.status(ENDED_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            self.status()
        self._answers.close()
