"""What the synchronous and the asynchronous face have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import finalize

from tenuto.client.core import EngineCore, SessionCore, TurnReader
from tenuto.client.transport import Deliver, Transport


class ClientBase:
    """An engine, by way of a transport that is closed when nobody has this any more."""

    def __init__(self, transport: Transport) -> None:
        self._core = EngineCore(transport)
        self._closer = finalize(self, transport.request_stop)


class SessionBase:
    """A conversation that owns its model state. Made by an engine, `fork` and `trim`."""

    def __init__(self, engine: ClientBase, core: SessionCore) -> None:
        self._engine = engine  # stays open while there are sessions of it
        self._core = core

    @property
    def id(self) -> str:
        return self._core.id


class TurnStreamBase:
    """A turn in progress, of which `_reader` has read some."""

    def __init__(self, engine: ClientBase, start: Callable[[Deliver], TurnReader], deliver: Deliver) -> None:
        self._engine = engine  # stays open while a turn of it is read
        self._reader = start(deliver)
        self._closer: finalize[[], Any] = finalize(self, self._reader.running.disconnect)
        self._closer.atexit = False  # the engine's own end sees to that

    @property
    def text(self) -> str:
        """All text read so far."""
        return self._reader.text

    @property
    def token_ids(self) -> list[int]:
        """All output token ids read so far."""
        return list(self._reader.token_ids)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from the call that opened the turn to its first token's arrival, once that is there."""
        return self._reader.running.time_to_first_token

    def close(self) -> None:
        """Read no more. The turn is aborted if it has not ended, unless a server was told to continue without."""
        self._closer()
