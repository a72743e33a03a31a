"""The server of a replica, in a separate process."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from tenuto.base.errors import ConfigError, EngineStopped
from tenuto.cli.options import SERVER
from tenuto.cli.settings import ServerSettings

_LISTENING = re.compile(r"listening +(http://\S+)")
NOT_GIVEN = frozenset(("port", "advertise", "journal"))
"""Options that follow from where Ray places a replica, so nobody gives them."""
WILDCARD = "0.0.0.0"  # noqa: S104 - compared, not listened on
"""The host that stands for all addresses of a machine."""
END_SECONDS = 15.0
"""How long a server may take to end in order, besides the time for turns and snapshots."""


class ServerProcess:
    """A server of a fleet, started by a child of this process. It ends in order when this process ends, in whatever way
    that happens.

    The server runs outside this process so that its event loop, memory and signals are the same as anywhere else, and
    no client's stream waits for Ray. `url`: the server's address.
    """

    def __init__(self, options: Mapping[str, Any], address: str) -> None:
        """Starts the server on a free port of this machine. `address`: of the machine; the server listens there unless
        the options name another `host`. `options`: see `settings_at`. Raises `ConfigError`."""
        if options.get("host", WILDCARD) not in (WILDCARD, "::"):
            address = options["host"]
        port = _free_port(address)
        settings = settings_at(options, address, port)
        place: dict[str, Any] = {"host": settings.serve.host, "port": port, "advertise": settings.worker.advertise}
        self.key: str | None = None
        """A key with all rights, if the server has keys."""
        if settings.serve.tenants:
            self.key = place["admin_api_key"] = settings.serve.admin_api_key or secrets.token_hex(24)
        self.url = f"http://{address}:{port}"
        self._patience = settings.serve.drain_seconds + settings.worker.snapshot_seconds + END_SECONDS
        self._child = subprocess.Popen(
            # When Ray kills an actor, it kills its children too. The server has to outlive them, so it is a shell's
            # child. Because of the `exit`, the shell does not replace itself with the server.
            ["/bin/sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-m", "tenuto.ray.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that no signal to this process's group ends it
        )
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read, name="tenuto-output", daemon=True)
        self._reader.start()
        with suppress(BrokenPipeError):  # it has ended already
            assert self._child.stdin is not None
            self._child.stdin.write(f"{json.dumps({**options, **place})}\n")
            self._child.stdin.flush()

    def wait_until_ready(self) -> None:
        """Waits until the server accepts requests. Raises `EngineStopped` if it ends before."""
        self._listening.wait()
        if (status := self._child.poll()) is not None:
            raise EngineStopped(f"the server ended with exit status {status} before it was ready; its log says why")

    def watch(self, ended: Callable[[int], None]) -> None:
        """Calls `ended` with the exit status, in a thread, once the server has ended."""
        threading.Thread(target=lambda: ended(self._child.wait()), name="tenuto-watch", daemon=True).start()

    def stop(self) -> int:
        """Ends the server in order, or kills it if that takes too long. Returns its exit status."""
        if self._child.stdin is not None:
            with suppress(BrokenPipeError):
                self._child.stdin.close()
        try:
            return self._child.wait(self._patience)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(self._child.pid, signal.SIGKILL)
            return self._child.wait()

    def _read(self) -> None:
        """Passes the server's output on to that of this process."""
        assert self._child.stdout is not None
        with self._child.stdout as lines:
            for line in lines:
                sys.stdout.write(line)
                if _LISTENING.match(line):
                    self._listening.set()
        self._child.wait()
        self._listening.set()


def settings_at(options: Mapping[str, Any], address: str, port: int) -> ServerSettings:
    """Resolves the settings of a replica at an address. `options`: those of `tenuto serve` by name, with values as in a
    file, before those of the environment. Raises `ConfigError`."""
    check(options)
    given = {"host": address, **options, "port": port, "advertise": f"http://{address}:{port}"}
    return ServerSettings.resolve({}, None, given)


def _free_port(address: str) -> int:
    """Returns a port that is free now. If another process takes it, the server does not start, and Ray tries again."""
    with socket.create_server((address, 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def check(options: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for options that no server has, that a replica on Ray cannot have, or with wrong values."""
    if found := sorted(options.keys() & NOT_GIVEN):
        raise ConfigError(f"the option {found[0]} is given; allowed on Ray: others, since Ray says where replicas are")
    for name, value in options.items():
        if name not in SERVER:
            raise ConfigError(f"there is no option {name!r}; allowed: {', '.join(sorted(SERVER.keys() - NOT_GIVEN))}")
        SERVER[name].read(value, "options", text=False)
