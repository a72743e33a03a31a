"""Common base classes of the synchronous and the asynchronous client."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import finalize

from tenuto.base.tools.definitions import ToolCall
from tenuto.client.core import EngineCore, SessionCore, TurnReader
from tenuto.client.transport import Deliver, Transport


class ClientBase:
    """A client of the engine behind `transport`. The transport stops when this object is garbage-collected."""

    def __init__(self, transport: Transport) -> None:
        self._core = EngineCore(transport)
        self._closer = finalize(self, transport.request_stop)


class SessionBase:
    """A conversation that owns its model state, created by an engine, `fork` or `trim`."""

    def __init__(self, engine: ClientBase, core: SessionCore) -> None:
        self._engine = engine  # keeps the engine open while the session is in use
        self._core = core

    @property
    def id(self) -> str:
        return self._core.id


class TurnStreamBase:
    """A turn in progress, read through `_reader`."""

    def __init__(self, engine: ClientBase, start: Callable[[Deliver], TurnReader], deliver: Deliver) -> None:
        self._engine = engine  # keeps the engine open while the turn is read
        self._reader = start(deliver)
        self._unread: deque[int] = deque()  # token ids of the last delta, which the caller has not taken yet
        self._closer: finalize[[], Any] = finalize(self, self._reader.running.disconnect)
        self._closer.atexit = False  # the engine's finalizer takes care of it

    @property
    def reader(self) -> TurnReader:
        """The part that has been read so far."""
        return self._reader

    @property
    def text(self) -> str:
        """All text read so far, unparsed."""
        return self._reader.text

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The tool calls read so far, if the turn was given `tools`."""
        return list(self._reader.said.calls)

    @property
    def reasoning(self) -> str:
        """The model's reasoning read so far, if the turn was given `tools`."""
        return self._reader.said.reasoning

    @property
    def message(self) -> dict[str, Any]:
        """The answer read so far as an assistant's message; its `content` is `None` if it only has tool calls."""
        return self._reader.said.message()

    @property
    def token_ids(self) -> list[int]:
        """All output token ids read so far."""
        return list(self._reader.token_ids)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from starting the turn to the arrival of its first token; `None` until then."""
        return self._reader.running.time_to_first_token

    def close(self) -> None:
        """Stops reading. An open turn is aborted, except on a server if `on_disconnect` says otherwise."""
        self._closer()
