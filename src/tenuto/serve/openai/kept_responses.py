"""Stored responses that can be read again."""

from __future__ import annotations

from collections import OrderedDict

MAX_KEPT = 1000
"""Maximum number of one tenant's responses; the latest are kept."""
MAX_BYTES = 16 * 2**20
"""Maximum size of one tenant's responses as JSON. A larger response is not kept."""


class KeptResponses:
    """The latest stored responses of a tenant. Sessions of older responses stay open.

    Invariant: `_kept` has the responses as JSON by id, the latest at the end, and `_bytes` is their total size.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    def keep(self, name: str, response: bytes) -> None:
        """Stores a response. Above the limits, the oldest responses are dropped."""
        if len(response) > MAX_BYTES:
            return
        self._kept[name] = response
        self._bytes += len(response)
        while len(self._kept) > MAX_KEPT or self._bytes > MAX_BYTES:
            self.forget(next(iter(self._kept)))

    def find(self, name: str) -> bytes | None:
        return self._kept.get(name)

    def forget(self, name: str) -> None:
        self._bytes -= len(self._kept.pop(name, b""))
