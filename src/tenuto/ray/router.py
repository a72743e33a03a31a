"""The request router: chooses the Ray replica that gets a request."""

from __future__ import annotations

import asyncio
import logging
import math
import pickle
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica
from starlette.datastructures import Headers

from tenuto.serve.fleet import names
from tenuto.serve.fleet.peers import Broken, NotSent, Peers
from tenuto.serve.shared.runs import RUN_HEADERS

log = logging.getLogger("ray.serve")

LOAD_FACTOR = 1.25
"""How many times the mean number of open requests a replica may have before new sessions go to the next one."""
OWNER_SECONDS = 5.0
"""How long an owner is remembered. A replica that does not own a session any more forwards its requests."""
MAX_OWNERS = 100_000
ASKING_SECONDS = 1.0
_CREDENTIALS = ("authorization", "x-api-key")


class Wanted(NamedTuple):
    """The properties of a request that decide where it goes. `session`: the one it is for, if its path names it. `key`:
    the text that is hashed. `credentials`: headers that identify the session's tenant."""

    session: str | None
    key: str | None
    credentials: tuple[tuple[str, str], ...]


def wanted_by(scope: dict[str, Any]) -> Wanted:
    """Returns the properties of the request with this ASGI scope. Its body is not read."""
    headers = Headers(scope=scope)
    root, path = scope.get("root_path", ""), scope["path"]
    used, _ = names.in_path({**scope, "path": path.removeprefix(root)})
    run = next((headers[name] for name in RUN_HEADERS if headers.get(name)), None)
    credentials = tuple((name, headers[name]) for name in _CREDENTIALS if name in headers)
    return Wanted(used[0] if used else None, used[0] if used else run, credentials)


class SessionRouter(ConsistentHashRouter):
    """Sends each request to the replica that owns its session. If none does, or no session is named, the replicas are
    ranked by Ray's ring of consistent hashes with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018): first those
    whose number of open requests stays within `load_factor` times the mean, then the others.

    A wrong choice costs only a hop, since the chosen replica forwards the request to the owner.
    """

    def initialize_state(
        self, *, load_factor: float = LOAD_FACTOR, owner_seconds: float = OWNER_SECONDS, **ring: Any
    ) -> None:
        """Called by Ray with `request_router_kwargs`. `ring`: see `ConsistentHashRouter`."""
        super().initialize_state(**{"num_fallback_replicas": 1_000_000, **ring})
        self._load_factor = load_factor
        self._owner_seconds = owner_seconds
        self._peers = Peers()
        self._owners: OrderedDict[Wanted, tuple[float, str | None]] = OrderedDict()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Implements Ray's `RequestRouter.choose_replicas`: ranks of one replica each."""
        if not candidate_replicas or pending_request is None:
            chosen: list[list[RunningReplica]] = await super().choose_replicas(candidate_replicas, pending_request)
            return chosen
        pending_request.routing_context.should_backoff = True
        wanted = _wanted(pending_request)
        key = wanted.key if wanted is not None else None
        ranked = self._bounded(self._lookup_ranked_replicas(key or self._routing_key(pending_request)))
        owner = await self._owner(wanted, ranked) if wanted is not None and wanted.session is not None else None
        first = [replica for replica in ranked if owner is not None and _url(replica) == owner]
        return [[replica] for replica in dict.fromkeys([*first, *ranked])]

    def _bounded(self, ranked: Sequence[ReplicaID]) -> list[RunningReplica]:
        """Returns the replicas in their order, but those with too many open requests, or without a lease, last."""
        there = [replica for each in ranked if (replica := self._replicas.get(each)) is not None]
        loads = {replica: self._replica_queue_len_cache.get(replica.replica_id) or 0 for replica in there}
        most = math.ceil(self._load_factor * (sum(loads.values()) + 1) / max(1, len(there)))

        def rank(replica: RunningReplica) -> tuple[bool, bool]:
            return not replica.routing_stats.get("ready", True), loads[replica] >= most

        return sorted(there, key=rank)

    async def _owner(self, wanted: Wanted, replicas: Sequence[RunningReplica]) -> str | None:
        """Asks a replica for the session's owner, and returns its URL. `None` if the session has no owner, or the asked
        replica does not answer."""
        now = time.monotonic()
        known = self._owners.get(wanted)
        urls = [url for replica in replicas if (url := _url(replica)) is not None]
        if known is not None and now - known[0] < self._owner_seconds and known[1] in urls:
            return known[1]
        if not urls:
            return None
        try:
            async with asyncio.timeout(ASKING_SECONDS):
                owner = await self._ask(urls[0], wanted)
        except (Broken, NotSent, TimeoutError) as error:
            log.warning("no replica says who owns a session: %r", error)
            return None
        self._owners[wanted] = now, owner
        self._owners.move_to_end(wanted)
        if len(self._owners) > MAX_OWNERS:
            self._owners.popitem(last=False)
        return owner

    async def _ask(self, url: str, wanted: Wanted) -> str | None:
        """Asks the replica at `url` for a session's owner. Returns `None` if the session has no owner. Raises `Broken`
        and `NotSent`."""
        path = f"/fleet/sessions/{quote(wanted.session or '', safe='')}"
        lines = [f"GET {path} HTTP/1.1", f"host: {url.removeprefix('http://')}"]
        lines += [f"{name}: {value}" for name, value in wanted.credentials]
        async with self._peers.ask(url, "\r\n".join([*lines, "", ""]).encode("latin-1")) as reply:
            await reply.begun()
            body = b""
            while piece := await reply.piece():
                body += piece
        if reply.status != 200:  # no valid key, as the replica will say
            return None
        owner: str | None = msgspec.json.decode(body)["url"]
        return owner


def _url(replica: RunningReplica) -> str | None:
    """Returns the address of a replica's server, see `Replica.record_replica_metadata`; `None` for replicas of earlier
    versions, which do not report it so."""
    url: str | None = replica.replica_metadata.get("url")
    return url


def _wanted(request: PendingRequest) -> Wanted | None:
    """Returns the properties of a request of Ray's proxy; `None` for other requests."""
    if not (request.metadata.is_http_request and request.args and isinstance(request.args[0], bytes)):
        return None
    return wanted_by(pickle.loads(request.args[0]).asgi_scope)  # noqa: S301 - Ray's proxy has written it
