"""The synchronous face: calls wait for the server's answer, and a turn is an iterator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Self, Unpack
from weakref import finalize

from tenuto.base.options import Policy, RemoteOptions
from tenuto.base.turns import Delta, Keep, TurnResult
from tenuto.base.views import AuditReport, SessionInfo
from tenuto.client.core import ServerCore, SessionCore
from tenuto.client.feed import Deliver, Event
from tenuto.client.reader import TurnReader
from tenuto.text.prompt import Input


def connect(url: str, api_key: str | None = None) -> RemoteEngine:
    """The sessions of the server at `url`, as those of a `tenuto.Engine`. Nothing is asked of the server before the
    first operation; each may raise `Unreachable`, `Disconnected` or `Unauthorized` besides its own errors."""
    return RemoteEngine(url, api_key)


class RemoteEngine:
    """A server's engine. Made by `tenuto.connect`; close it, or use it as a context manager."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._core = ServerCore(url, api_key)
        self._closer = finalize(self, self._core.connection.request_stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def context_length(self) -> int:
        """The most tokens a session's history may have."""
        return self._core.context_length().result()

    def session(
        self,
        session_id: str | None = None,
        *,
        system: str | None = None,
        ttl: float | None = None,
        priority: int = 0,
        max_tokens: int | None = None,
    ) -> RemoteSession:
        """See `Engine.session`; without `ttl` the server's own counts. With a name it stays open, and `attach` finds it
        again; without one it closes when the client is closed, or by its `ttl`. Raises `LimitReached`, too."""
        policy = Policy(priority, ttl, max_tokens)
        return RemoteSession(self, self._core.open(session_id, system, policy).result())

    def attach(self, session_id: str) -> RemoteSession:
        """A session that is open. Raises `NotFound`."""
        return RemoteSession(self, self._core.attach(session_id).result())

    def generate(self, input: Input, **options: Unpack[RemoteOptions]) -> RemoteTurnStream:  # noqa: A002 - as in `Engine`
        """One turn without a session to go back to."""
        return RemoteTurnStream(self, lambda deliver: self._core.generate(input, options, deliver))

    def sessions(self) -> list[SessionInfo]:
        """All open sessions of the key's owner."""
        return self._core.sessions().result()

    def audit(self) -> AuditReport:
        """Recount every unit of memory from its holders. Raises `EngineStopped` if anything is amiss; may need an admin
        key."""
        return self._core.audit().result()

    def close(self) -> None:
        """Close the connection, and the sessions, forks and trims that were opened here without a name. Turns still
        open raise `EngineStopped` at their readers."""
        self._closer.detach()
        self._core.connection.close()


class RemoteSession:
    """A conversation that owns its model state, on a server. Made by `RemoteEngine`, `fork` and `trim`."""

    def __init__(self, engine: RemoteEngine, core: SessionCore) -> None:
        self._engine = engine
        self._core = core

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def id(self) -> str:
        return self._core.id

    @property
    def info(self) -> SessionInfo:
        return self._core.info().result()

    @property
    def history(self) -> list[int]:
        """Its committed tokens."""
        return self._core.history().result()

    def turn(self, input: Input = (), **options: Unpack[RemoteOptions]) -> RemoteTurnStream:  # noqa: A002 - as above
        """See `Session.turn`, and `RemoteOptions` for what a broken connection does."""
        return RemoteTurnStream(self._engine, lambda deliver: self._core.turn(input, options, deliver))

    def chat(self, text: str, **options: Unpack[RemoteOptions]) -> RemoteTurnStream:
        """A turn of one user message."""
        return self.turn([{"role": "user", "content": text}], **options)

    def append(self, input: Input, **options: Unpack[RemoteOptions]) -> TurnResult:  # noqa: A002 - as above
        """Append `input`, compute it and commit it, without generating."""
        return self._core.append(input, options).result()

    def regenerate(self, **options: Unpack[RemoteOptions]) -> RemoteTurnStream:
        """Generate the last turn's output again. The old output stays until this turn commits."""
        return RemoteTurnStream(self._engine, lambda deliver: self._core.regenerate(options, deliver))

    def follow(self, turn_id: str) -> RemoteTurnStream:
        """The stream of a turn that runs or ended lately, from its beginning. Dropping it leaves the turn running, if
        that has other readers or is to continue without. Raises `NotFound`."""
        return RemoteTurnStream(self._engine, lambda deliver: self._core.follow(turn_id, deliver))

    def draft(self, input: Input) -> None:  # noqa: A002 - as above
        """See `Session.draft`."""
        self._core.draft(input).result()

    def abort(self) -> None:
        """Roll back the open turn or draft. Raises `IllegalTransition` if there is none."""
        self._core.abort().result()

    def fork(
        self, turn: int | None = None, position: int | None = None, *, session_id: str | None = None
    ) -> RemoteSession:
        """See `Session.fork`."""
        return RemoteSession(self._engine, self._core.fork(turn, position, session_id).result())

    def trim(self, turns: Sequence[int], *, session_id: str | None = None) -> RemoteSession:
        """A new session with those turns of this one, by number; 1 is the oldest."""
        return RemoteSession(self._engine, self._core.trim(turns, session_id).result())

    def rewind(self, turn: int | None = None, position: int | None = None) -> SessionInfo:
        """Cut the history back to its first `turn` turns or `position` tokens."""
        return self._core.rewind(turn, position).result()

    def close(self, *, finish: bool = False) -> None:
        """Close it. An open turn is aborted, or with `finish` may end first."""
        self._core.close(finish=finish).result()


class RemoteTurnStream:
    """As `tenuto.TurnStream`, on a server. One that is dropped or closed before its turn has ended aborts the turn,
    unless that is to continue without."""

    def __init__(self, engine: RemoteEngine, start: Callable[[Deliver], TurnReader]) -> None:
        self._engine = engine  # stays open while a turn of it is read
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._reader = start(self._events.put)
        self._closer = finalize(self, self._reader.disconnect)
        self._closer.atexit = False  # the process's own end sees to that
        self._reader.started.result()  # or its error

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while (event := self._next()) is not None:
            if event.text:
                return event.text
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def tokens(self) -> Iterator[int]:
        """Output token ids as they come, instead of text."""
        while (event := self._next()) is not None:
            yield from event.tokens

    def result(self) -> TurnResult:
        """Wait for the end."""
        while self._next() is not None:
            pass
        result = self._reader.result
        assert result is not None
        return result

    @property
    def turn_id(self) -> str | None:
        """What the server calls the turn; `RemoteSession.follow` finds it by that."""
        return self._reader.turn_id

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
        return self._reader.time_to_first_token

    def abort(self, keep: Keep = None) -> TurnResult:
        """See `TurnStream.abort`."""
        return self._reader.abort(keep).result()

    def close(self) -> None:
        """Read no more. The turn is aborted if it has not ended and is not to continue without."""
        self._closer()

    def _next(self) -> Delta | None:
        return None if self._reader.ended else self._reader.take(self._events.get())
