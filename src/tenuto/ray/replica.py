"""A Ray Serve replica, which runs a replica of the fleet."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

import httpx
import ray
from ray import serve

from tenuto.ray.gateway import Gateway
from tenuto.ray.process import ServerProcess
from tenuto.ray.scaling import load_of

log = logging.getLogger("ray.serve")

READY, METRICS, ENGINE = "/fleet/ready", "/metrics", "/v1/engine"
ASKING_SECONDS = 5.0
LEASE_PATIENCE_SECONDS = 30.0
"""How long a replica may be without its lease before it counts as unhealthy. If the database is away for longer, Ray
restarts all replicas; none of them could acknowledge anything meanwhile."""
SERVER_ENDED = 70
"""The exit status of an actor whose server has ended by itself."""


@serve.ingress(None)
class Replica:
    """A replica: a server in a separate process, and the answers to Ray's questions about it."""

    async def __init__(  # type: ignore[misc] # Ray awaits it
        self, options: Mapping[str, Any]
    ) -> None:
        """`options`: see `settings_at`. Raises `ConfigError` and `EngineStopped`."""
        self._server = ServerProcess(options, ray.util.get_node_ip_address())
        headers = {"authorization": f"Bearer {self._server.key}"} if self._server.key is not None else {}
        self._http = httpx.AsyncClient(base_url=self._server.url, headers=headers, timeout=ASKING_SECONDS)
        self._ending = False
        self._held = time.monotonic()  # when the lease was last seen to be held
        try:
            await asyncio.to_thread(self._server.wait_until_ready)
        except BaseException:
            await asyncio.to_thread(self._server.stop)
            raise
        self._server.watch(self._ended)
        engine = (await self._http.get(ENGINE)).raise_for_status().json()
        self._rows: int = engine["config"]["max_running"]  # turns that run at once

    def __serve_build_asgi_app__(self) -> Gateway:
        return Gateway(self._server.url)

    def _ended(self, status: int) -> None:
        """Ends the actor with its server, so that Ray starts another one at once."""
        if not self._ending:
            log.error("the server of this replica has ended with exit status %d", status)
            os._exit(SERVER_ENDED)

    async def check_health(self) -> None:
        """Called by Ray. Raises `RuntimeError` if the server does not answer, its engine has stopped, or it has been
        without its lease for too long."""
        if (await self._http.get("/health")).status_code != 200:
            raise RuntimeError("the server does not accept requests")
        now = time.monotonic()
        if (await self._http.get(READY)).status_code == 200:
            self._held = now
        elif now - self._held > LEASE_PATIENCE_SECONDS:
            raise RuntimeError(f"the replica has been without its lease for {now - self._held:.0f} seconds")

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Called by Ray once, before it names this replica to the request router. Returns its `url`."""
        return {"url": self._server.url}

    async def record_routing_stats(self) -> dict[str, Any]:
        """Called by Ray. Returns whether this replica is `ready`, for the request router. Without its lease it is
        not."""
        return {"ready": (await self._http.get(READY)).status_code == 200}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Ray. Returns this replica's load, for the autoscaling policy."""
        answer = (await self._http.get(METRICS)).raise_for_status()
        return load_of(answer.text, self._rows)

    async def __del__(self) -> None:
        """Called by Ray once no request is open here. Ends the server in order; its sessions move to other replicas."""
        if not hasattr(self, "_http"):
            return
        self._ending = True
        await self._http.aclose()
        await asyncio.to_thread(self._server.stop)
