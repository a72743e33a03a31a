"""The engine's process, from start to end. This module imports little, so that the engine can be started first."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import suppress
from types import TracebackType
from typing import Self

import msgspec

from tenuto.base.config import WorkerSettings
from tenuto.base.wire.frames import frame


class EngineProcess:
    """A child process that loads its model. `connection` is our end of a socket pair: when either process ends, the
    other notices at once. The child may use up to `snapshot_seconds` to save memory before it exits. Leaving the `with`
    block kills it if it still runs."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.connection, theirs = socket.socketpair()
        self.snapshot_seconds = settings.snapshot_seconds
        with theirs:
            self._child = subprocess.Popen(  # noqa: S603 - our own command
                [sys.executable, "-m", "tenuto.runtime.worker", str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )
        with suppress(OSError):  # if it has ended already, the reader of `connection` notices
            self.connection.sendall(b"".join(frame(msgspec.msgpack.encode(settings))))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.connection.close()
        self.kill()
        self.wait()

    @property
    def pid(self) -> int:
        return self._child.pid

    def wait(self) -> int:
        """Waits for the process to end. Returns its exit status, or the negative number of the signal that killed
        it."""
        return self._child.wait()

    def kill(self) -> None:
        """Kills the process if it still runs."""
        self._child.kill()
