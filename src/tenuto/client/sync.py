"""The synchronous face: calls wait for the engine's answer, and a turn is an iterator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import ClassVar, Generic, Self, TypeVar, Unpack

from tenuto.base.options import Policy, TurnOptions
from tenuto.base.turns import Delta, Input, Keep, TurnKind, TurnResult
from tenuto.base.views import AuditReport, SessionInfo
from tenuto.client.core import TurnReader
from tenuto.client.faces import ClientBase, SessionBase, TurnStreamBase
from tenuto.client.transport import Deliver, Event, Options

SessionT = TypeVar("SessionT", bound="Session")


class Closing(ABC):
    """Closes itself at the end of a `with` block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Nobody uses it any more."""


class Client(Closing, ClientBase, Generic[SessionT]):
    """The sessions of one engine, wherever that runs. Close it, or use it as a context manager."""

    session_type: type[SessionT]

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
    ) -> SessionT:
        """Open a session. `system` is put before the first messages. After `ttl` seconds without a turn it closes
        itself. `max_tokens` caps its history. Raises `AlreadyExists`, `Overloaded` or `InvalidRequest`.

        On a server its own TTL counts if there is none here, and a session with a name stays open when the client is
        closed: `attach` finds it again. Raises `LimitReached`, too."""
        policy = Policy(priority, ttl, max_tokens)
        return self.session_type(self, self._core.open(session_id, system, policy).result())

    def attach(self, session_id: str) -> SessionT:
        """A session that is open. Raises `NotFound`."""
        return self.session_type(self, self._core.attach(session_id).result())

    def generate(self, input: Input, **options: Unpack[TurnOptions]) -> TurnStream:  # noqa: A002 - the natural name
        """One turn without a session to go back to."""
        return self.session_type.stream_type(self, partial(self._core.start, None, "turn", input, options))

    def sessions(self) -> list[SessionInfo]:
        """All open sessions, by id; on a server, those of the key's owner."""
        return self._core.sessions().result()

    def audit(self) -> AuditReport:
        """Recount every unit of memory from its holders. Raises `EngineStopped` if anything is amiss. A server may want
        an admin key."""
        return self._core.audit().result()

    def close(self) -> None:
        """Stop the engine in this process; of a server, close what was opened here without a name. Turns still open
        raise `EngineStopped` at their readers."""
        self._closer.detach()
        self._core.transport.close()


class TurnStream(TurnStreamBase, Closing):
    """A turn in progress. Iterating yields text as it is delivered; it can be left and taken up again.

    A stream that is dropped or closed before its turn has ended aborts the turn, unless a server was told to continue
    without. One thread may read it; any may abort it.
    """

    def __init__(self, engine: ClientBase, start: Callable[[Deliver], TurnReader]) -> None:
        self._events: SimpleQueue[Event] = SimpleQueue()
        super().__init__(engine, start, self._events.put)
        self._reader.running.started.result()  # or its error

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while (event := self._next()) is not None:
            if event.text:
                return event.text
        raise StopIteration

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

    def abort(self, keep: Keep = None) -> TurnResult:
        """End the turn now. By default the session is as it was before; with `keep` this is a barge-in, which commits
        the input and that many output tokens, or all whose text was read from this stream ("delivered"). Tokens kept
        beyond those read are still read from the stream, with their text unless that of tokens not kept came with it.
        If the turn has ended already, its result is returned."""
        return self._reader.abort(keep).result()

    def _next(self) -> Delta | None:
        return None if self._reader.ended else self._reader.take(self._events.get())


class Session(Closing, SessionBase):
    """A conversation that owns its model state. Made by an engine, `fork` and `trim`."""

    stream_type: ClassVar[type[TurnStream]] = TurnStream

    @property
    def info(self) -> SessionInfo:
        """It as it is now."""
        return self._core.info().result()

    @property
    def history(self) -> list[int]:
        """Its committed tokens."""
        return self._core.history().result()

    def turn(self, input: Input = (), **options: Unpack[TurnOptions]) -> TurnStream:  # noqa: A002 - as above
        """Append `input` and generate; without input, continue. Raises `SessionBusy`, `ContextExceeded`,
        `InvalidRequest`, `IllegalTransition` or `Overloaded`, having changed nothing."""
        return self._start("turn", input, options)

    def chat(self, text: str, **options: Unpack[TurnOptions]) -> TurnStream:
        """A turn of one user message."""
        return self._start("turn", [{"role": "user", "content": text}], options)

    def append(self, input: Input, **options: Unpack[TurnOptions]) -> TurnResult:  # noqa: A002 - as above
        """Append `input`, compute it and commit it, without generating."""
        return self._start("append", input, options).result()

    def regenerate(self, **options: Unpack[TurnOptions]) -> TurnStream:
        """Generate the last turn's output again. The old output stays until this turn commits."""
        return self._start("regenerate", (), options)

    def _start(self, kind: TurnKind, given: Input, options: Options) -> TurnStream:
        return self.stream_type(self._engine, partial(self._core.start, kind, given, options))

    def draft(self, input: Input) -> None:  # noqa: A002 - as above
        """Give the whole input so far of a turn to come, again with every change: it is computed meanwhile. `turn` with
        the final input continues from what they have in common."""
        self._core.draft(input).result()

    def abort(self) -> None:
        """Roll back the open turn or draft. Raises `IllegalTransition` if there is none."""
        self._core.abort().result()

    def fork(self, turn: int | None = None, position: int | None = None, *, session_id: str | None = None) -> Self:
        """A new session with the first `turn` turns, the first `position` tokens, or all of this one's history. They
        share memory."""
        return type(self)(self._engine, self._core.fork(turn, position, session_id).result())

    def trim(self, turns: Sequence[int], *, session_id: str | None = None) -> Self:
        """A new session with those turns of this one, by number, ascending; 1 is the oldest. They share the memory of
        what stands at its start."""
        return type(self)(self._engine, self._core.trim(turns, session_id).result())

    def rewind(self, turn: int | None = None, position: int | None = None) -> SessionInfo:
        """Cut the history back to its first `turn` turns or `position` tokens."""
        return self._core.rewind(turn, position).result()

    def close(self, *, finish: bool = False) -> None:
        """Close it. An open turn is aborted, or with `finish` may end first."""
        self._core.close(finish=finish).result()
