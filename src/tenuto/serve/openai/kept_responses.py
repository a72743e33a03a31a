"""Stored responses that can be read again."""

from __future__ import annotations

from collections import OrderedDict

MAX_KEPT = 1000
"""Maximum number of one tenant's responses; the latest are kept."""
MAX_BYTES = 16 * 2**20
"""Maximum size of one tenant's responses as JSON. A larger response is not kept."""


class KeptResponses:
    """The latest stored responses of each tenant. Sessions of older responses stay open.

    Invariant: `_kept` has each tenant's responses as JSON by id, the latest at the end, and `_bytes` their total size.
    """

    def __init__(self) -> None:
        self._kept: dict[str, OrderedDict[str, bytes]] = {}
        self._bytes: dict[str, int] = {}

    def keep(self, tenant: str, name: str, response: bytes) -> None:
        """Stores a response. Above the limits, the tenant's oldest responses are dropped."""
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
