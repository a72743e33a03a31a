"""Stored responses that can be read again."""

from __future__ import annotations

from collections import OrderedDict

MAX_KEPT = 1000
"""Responses of one tenant, the latest."""
MAX_BYTES = 16 * 2**20
"""Of one tenant's responses, as JSON. A response that is larger alone is not kept."""


class KeptResponses:
    """The latest stored responses of each tenant. Their sessions live on without them.

    Invariant: `_kept` has a tenant's responses as JSON by id, the latest at the end, and `_bytes` their size in all.
    """

    def __init__(self) -> None:
        self._kept: dict[str, OrderedDict[str, bytes]] = {}
        self._bytes: dict[str, int] = {}

    def keep(self, tenant: str, name: str, response: bytes) -> None:
        """The tenant's oldest are forgotten if there are too many."""
        if len(response) > MAX_BYTES:
            return
        kept = self._kept.setdefault(tenant, OrderedDict())
        kept[name] = response
        self._bytes[tenant] = self._bytes.get(tenant, 0) + len(response)
        while len(kept) > MAX_KEPT or self._bytes[tenant] > MAX_BYTES:
            self.forget(tenant, next(iter(kept)))

    def find(self, tenant: str, name: str) -> bytes | None:
        kept = self._kept.get(tenant)
        return kept.get(name) if kept is not None else None

    def forget(self, tenant: str, name: str) -> None:
        kept = self._kept.get(tenant)
        if kept is not None and name in kept:
            self._bytes[tenant] -= len(kept.pop(name))
