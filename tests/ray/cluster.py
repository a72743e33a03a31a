"""A fleet on a Ray cluster of this machine, reached through Ray's proxy or HAProxy."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from tests.eventually import eventually
from tests.serve.server import free_port
from tests.serve.test_fleet import forwarded

END_SECONDS = 120
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # otherwise it writes a token into the home directory
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_worker_niceness": "0",  # otherwise its processes wait for all others of a busy machine
}


class Replica:
    """A replica: its address, and the processes of its actor and of its server."""

    def __init__(self, url: str) -> None:
        self.url = url
        engine = httpx.get(f"{url}/v1/engine", timeout=60).json()["pid"]
        self.server = parent_of(engine)
        self.actor = parent_of(parent_of(self.server))

    def kill(self) -> None:
        """Kills the actor as Ray does, with its children, but not with theirs."""
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                if parent_of(int(entry.name)) == self.actor:
                    os.kill(int(entry.name), signal.SIGKILL)
        with suppress(ProcessLookupError):  # it has noticed
            os.kill(self.actor, signal.SIGKILL)

    def forwarded(self) -> int:
        with httpx.Client(base_url=self.url, timeout=60) as http:
            return forwarded(http)


class Cluster:
    """The cluster, and its fleet once it is `run`. `database`: the URL of the fleet's. `haproxy`: if HAProxy takes the
    place of Ray's proxy, variables that change how."""

    def __init__(self, database: str, *, haproxy: Mapping[str, str] | None = None) -> None:
        self.has_haproxy = haproxy is not None
        self._scratch = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets need a short path
        proxying = {**haproxy_in(self._scratch), **haproxy} if haproxy is not None else {}
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self._log = (self._scratch / "driver.log").open("w")
        self._driver = subprocess.Popen(
            [sys.executable, "-m", "tests.ray.driver", str(port), str(self._scratch / "ray"), database],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
            env={**os.environ, **ENVIRONMENT, **proxying},
        )

    def run(self, name: str = "fleet", *, server: Mapping[str, Any] | None = None, **deployment: Any) -> None:
        """Runs the fleet with the example's options of the deployment and of its servers, and these. If it runs
        already, all its replicas are replaced. `name`: of the application, which takes the place of one with another
        name."""
        assert self._driver.stdin is not None
        self._driver.stdin.write(f"{json.dumps([name, deployment, dict(server or {})])}\n")
        self._driver.stdin.flush()
        self.wait()

    def wait(self) -> None:
        """Waits until the example, or the last change of the fleet, runs."""
        assert self._driver.stdout is not None
        if "running\n" not in iter(self._driver.stdout.readline, ""):  # Ray may write other lines
            raise RuntimeError((self._scratch / "driver.log").read_text())

    def client(self) -> httpx.Client:
        """Returns a client of the proxy."""
        return httpx.Client(base_url=self.url, timeout=60)

    def live(self, http: httpx.Client) -> list[str]:
        """Returns the addresses of the replicas that accept requests, as one of them sees them; none if that one ends
        just then."""
        try:
            answer = http.get("/fleet")
        except httpx.TransportError:  # HAProxy closes a connection that it has used before, instead of answering 500
            return []
        known = answer.json()["replicas"] if answer.status_code == 200 else []
        return [each["url"] for each in known if each["live"] and is_ready(each["url"])]

    def replicas(self, http: httpx.Client, count: int) -> list[Replica]:
        """Waits until so many replicas are live, and returns them."""
        eventually(lambda: len(self.live(http)) == count)
        return [Replica(url) for url in self.live(http)]

    def close(self) -> list[str]:
        """Ends the cluster in order. Returns the commands of processes that are left, which are killed."""
        assert self._driver.stdin is not None
        self._driver.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._driver.wait(END_SECONDS)
        with suppress(AssertionError):
            eventually(lambda: not self._processes())
        left = self._processes()
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._driver.wait(END_SECONDS)
        assert self._driver.stdout is not None
        self._driver.stdout.close()
        self._log.close()
        shutil.rmtree(self._scratch, ignore_errors=True)
        return list(left.values())

    def _processes(self) -> dict[int, str]:
        """Returns the processes of the cluster: those with its folder in their environment, or started by such."""
        found = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                process = int(entry.name)
                told = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
                if process != os.getpid() and str(self._scratch).encode() in told:
                    found[process] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found


@contextmanager
def clusters(database: str, *, haproxy: Mapping[str, str] | None = None) -> Iterator[Cluster]:
    """Runs a cluster inside the context, of which nothing is left behind. For its arguments, see `Cluster`."""
    cluster = Cluster(database, haproxy=haproxy)
    try:
        yield cluster
    finally:
        left = cluster.close()
    assert not left


def haproxy_in(folder: Path) -> dict[str, str]:
    """Returns the variables with which HAProxy takes the place of Ray's proxy, and keeps its files in a folder."""
    files = {
        "CONFIG_FILE_LOC": "haproxy.cfg",
        "SOCKET_PATH": "admin.sock",
        "SERVER_STATE_BASE": "",
        "SERVER_STATE_FILE": "server-state",
        "METRICS_SOCKET_PATH": "metrics.sock",
    }
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        **{f"RAY_SERVE_HAPROXY_{name}": str(folder / file) for name, file in files.items()},
        **{f"RAY_SERVE_HAPROXY_{name}_PORT": str(free_port()) for name in ("METRICS", "STATS")},
    }


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def is_running(process: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/fleet/ready", timeout=60).status_code == 200
    except httpx.TransportError:
        return False
