"""Objects that the edge keeps in memory for a tenant, such as stored responses: the latest ones, within limits."""

from __future__ import annotations

from collections import OrderedDict

MAX_KEPT = 1000
"""Maximum number of one tenant's objects of a kind; the latest are kept."""
MAX_BYTES = 16 * 2**20
"""Maximum size of one tenant's objects of a kind as JSON. A larger object is not kept."""


class Kept:
    """The latest objects of a tenant, of one kind.

    Invariant: `_kept` has the objects as JSON by name, the latest at the end, and `_bytes` is their total size.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    def keep(self, name: str, value: bytes) -> None:
        """Stores an object, in place of one with the same name. Above the limits, the oldest objects are dropped."""
        self.forget(name)
        if len(value) > MAX_BYTES:
            return
        self._kept[name] = value
        self._bytes += len(value)
        while len(self._kept) > MAX_KEPT or self._bytes > MAX_BYTES:
            self.forget(next(iter(self._kept)))

    def find(self, name: str) -> bytes | None:
        return self._kept.get(name)

    def forget(self, name: str) -> None:
        self._bytes -= len(self._kept.pop(name, b""))
