"""Sessions that are not here any more, but may have left something in memory or files."""

from __future__ import annotations

from tenuto.base.views import SessionKey

MOST = 10_000


class Traces:
    """The keys of sessions that have left for another replica, or were to come from one. At most `MOST` keys are kept;
    once there were more, any key may be one of them."""

    def __init__(self) -> None:
        self._keys: set[SessionKey] = set()
        self._any = False

    def __contains__(self, key: SessionKey) -> bool:
        return self._any or key in self._keys

    def add(self, key: SessionKey) -> None:
        """Records that a session has left."""
        if len(self._keys) < MOST or key in self._keys:
            self._keys.add(key)
        else:
            self._any = True

    def erased(self, key: SessionKey) -> None:
        """Records that nothing of a session is left."""
        self._keys.discard(key)
