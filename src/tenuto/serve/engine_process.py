"""The engine in a process of its own, from its start to its end. Few imports, so that it can be started first."""

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
    """A child process that loads its model, and `connection`, our end of the pair of sockets between us: when either
    side ends, the other notices at once. It may take `snapshot_seconds` longer to end than others. Leaving the `with`
    block ends it if it still runs."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.connection, theirs = socket.socketpair()
        self.snapshot_seconds = settings.snapshot_seconds
        with theirs:
            self._child = subprocess.Popen(  # noqa: S603 - our own command
                [sys.executable, "-m", "tenuto.runtime.worker", str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )
        with suppress(OSError):  # if it has ended already, whoever reads sees that
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
        """Wait until it has ended, and return its exit status, or the negative number of the signal that killed it."""
        return self._child.wait()

    def kill(self) -> None:
        """End it at once, if it still runs."""
        self._child.kill()
