"""The synchronous client: calls wait for the engine's answer, and a turn is an iterator."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from os import PathLike
from queue import SimpleQueue
from typing import ClassVar, Generic, Self, TypeVar, Unpack

from tenuto.base.options import ChatOptions, Policy, SessionAdapter
from tenuto.base.tokens import SessionTokens
from tenuto.base.tools.answer_part import AnswerPart
from tenuto.base.tools.definitions import ToolCall
from tenuto.base.turns import Delta, Input, Keep, TurnKind, TurnResult
from tenuto.base.views import AuditReport, Compacted, Erased, SessionInfo
from tenuto.client.compaction import CompactionOptions
from tenuto.client.core import TurnReader
from tenuto.client.faces import ClientBase, SessionBase, TurnStreamBase
from tenuto.client.results import Results
from tenuto.client.transport import Deliver, Event, Options

SessionT = TypeVar("SessionT", bound="Session")


class Closing(ABC):
    """A base class of context managers that call `close` at the end of the block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Closes this object; see the subclass."""


class Client(Closing, ClientBase, Generic[SessionT]):
    """A client of one engine, in this process or on a server. Close it, or use it as a context manager."""

    session_type: type[SessionT]

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of a session's history."""
        return self._core.context_length().result()

    def session(
        self,
        session_id: str | None = None,
        *,
        system: str | None = None,
        ttl: float | None = None,
        priority: int = 0,
        max_tokens: int | None = None,
        pinned: bool = False,
        adapter: str | None = None,
    ) -> SessionT:
        """Opens a session. `system` is the system message. The session is closed after `ttl` seconds without a turn;
        `max_tokens` limits its history. The memory of a `pinned` session never yields to others, and space for
        `max_tokens` is reserved. `adapter`: the name of a loaded adapter, with which all its turns are computed. Raises
        `AlreadyExists`, `Overloaded` or `InvalidRequest`.

        A server has a default TTL and may raise `LimitReached`. Sessions on a server that were given an id stay open
        when the client is closed; `attach` finds them again."""
        policy = Policy(priority, ttl, max_tokens, pinned=pinned, adapter=SessionAdapter.named(adapter))
        return self.session_type(self, self._core.open(session_id, system, policy).result())

    def attach(self, session_id: str) -> SessionT:
        """Finds an open session by its id. Raises `NotFound`."""
        return self.session_type(self, self._core.attach(session_id).result())

    def import_session(self, exported: bytes | str, *, session_id: str | None = None) -> SessionT:
        """Opens a session from the result of `Session.export`, under its own id or another. Raises `InvalidRequest` if
        it is damaged or belongs to another model, and the errors of `session`."""
        return self.session_type(self, self._core.import_session(exported, session_id).result())

    def import_file(self, path: str | PathLike[str], *, session_id: str | None = None) -> SessionT:
        """Opens a session, with its state, from a file written by `Session.export_file`, so that its next turn computes
        only new tokens. Raises `InvalidRequest` if the file is damaged or belongs to another model or other weights,
        and the errors of `session`."""
        return self.session_type(self, self._core.import_file(path, session_id).result())

    def generate(self, input: Input, **options: Unpack[ChatOptions]) -> TurnStream:  # noqa: A002 - the natural name
        """Runs one turn in a new session, which is closed when the turn ends."""
        return self.session_type.stream_type(self, partial(self._core.start, None, "turn", input, options))

    def sessions(self) -> list[SessionInfo]:
        """Lists all open sessions by id; on a server, those of the API key's tenant."""
        return self._core.sessions().result()

    def detokenize(self, token_ids: Iterable[int]) -> str:
        """Returns the text of tokens, with control tokens written out. Raises `InvalidRequest` for ids that the model
        does not have, and `Unsupported` for models without a tokenizer."""
        return self._core.detokenize(token_ids).result()

    def audit(self) -> AuditReport:
        """Recounts every unit of memory from its holders. Raises `EngineStopped` if the count is wrong. Servers may
        require an admin key."""
        return self._core.audit().result()

    def pause_generation(self, *, retract: bool = False) -> None:
        """Makes the engine stop taking steps until `continue_generation`. Open turns wait; with `retract` they release
        the memory they have acquired and compute it again later. New turns queue. Servers may require an admin key for
        this and the next four methods."""
        self._core.pause(retract=retract).result()

    def continue_generation(self) -> None:
        """Continues after `pause_generation`."""
        self._core.go_on().result()

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Returns the memory of sessions (tag "kv_cache"), of the weights ("weights") or both to the system. Sessions
        keep their tokens; turns are refused with `MemoryReleased` until everything is resumed. Raises
        `IllegalTransition` while turns run, unless generation is paused."""
        self._core.release_memory(tags).result()

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Allocates the memory and reads the weights again. Sessions compute their state again when they need it."""
        self._core.resume_memory(tags).result()

    def update_weights_from_disk(
        self,
        model_path: str | PathLike[str],
        *,
        weight_version: str | None = None,
        abort: bool = False,
        keep_state: bool = False,
    ) -> str:
        """Switches to the weights of another model of the same shape, and returns their version: `weight_version`, or
        the number of updates. State computed with the old weights is not used again, unless with `keep_state`: then
        sessions and their forks continue with the state they have, and no other session finds it. Open turns continue,
        or with `abort` end. Raises `InvalidRequest`, without any change, if the weights cannot be read or have another
        shape."""
        return self._core.update_weights(model_path, weight_version, abort=abort, keep_state=keep_state).result()

    def close(self) -> None:
        """Stops an engine in this process; on a server, closes the sessions that this client opened without an id.
        Reading an open turn then raises `EngineStopped`."""
        self._closer.detach()
        self._core.transport.close()


class TurnStream(TurnStreamBase, Closing):
    """A turn in progress. Iterating yields text as it is delivered; iteration can be stopped and resumed.

    Dropping or closing the stream before the turn has ended aborts the turn, except on a server if `on_disconnect` says
    otherwise. Only one thread may read the stream; any thread may abort it.
    """

    def __init__(self, engine: ClientBase, start: Callable[[Deliver], TurnReader]) -> None:
        self._events: SimpleQueue[Event] = SimpleQueue()
        super().__init__(engine, start, self._events.put)
        self._reader.running.started.result()  # raises the error if the turn was refused

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while self._next() is not None:
            if self._reader.latest.text:
                return self._reader.latest.text
        raise StopIteration

    def parts(self) -> Iterator[AnswerPart]:
        """Iterates over the parsed answer as it arrives: text, reasoning and calls."""
        while self._next() is not None:
            if self._reader.latest:
                yield self._reader.latest

    def calls(self) -> Iterator[ToolCall]:
        """Iterates over tool calls, each as soon as its arguments are complete, so that a tool can start before the
        turn ends."""
        for part in self.parts():
            yield from part.calls

    def tokens(self) -> Iterator[int]:
        """Iterates over output token ids as they arrive, instead of text. Like iteration over text, it can be stopped
        and resumed."""
        while True:
            while self._unread:
                yield self._unread.popleft()
            if (event := self._next()) is None:
                return
            self._unread.extend(event.tokens)

    def result(self) -> TurnResult:
        """Waits for the turn to end and returns its result."""
        while self._next() is not None:
            pass
        result = self._reader.result
        assert result is not None
        return result

    def abort(self, keep: Keep = None) -> TurnResult:
        """Ends the turn now. By default it is rolled back. With `keep` this is a barge-in: the input is committed
        together with that many output tokens, or with those whose text was read from this stream ("delivered"). Kept
        tokens that were not read yet can still be read, without pieces of text that include a dropped token. If the
        turn has already ended, its result is returned."""
        return self._reader.abort(keep).result()

    def _next(self) -> Delta | None:
        self._unread.clear()
        return None if self._reader.ended else self._reader.take(self._events.get())


class ToolResults(Results):
    """The results of a turn's calls; see `Session.results`. Any thread may add them."""

    def __init__(self, session: Session, turn: TurnReader) -> None:
        super().__init__(turn)
        self._session = session
        self._lock = threading.Lock()

    def add(self, call: ToolCall | str, content: str) -> None:
        """Adds the result of a call, given itself or by its id, as text. Once the turn has been read to its end, the
        results that follow one another from the first call on are computed at once. Raises `InvalidRequest`, and the
        errors of `Session.draft`."""
        with self._lock:
            self.put(call, content)
            if messages := self.due():
                self._session.draft(messages)


class Session(Closing, SessionBase):
    """A conversation that owns its model state, created by an engine, `fork` or `trim`."""

    stream_type: ClassVar[type[TurnStream]] = TurnStream

    @property
    def info(self) -> SessionInfo:
        """The session's current state."""
        return self._core.info().result()

    @property
    def history(self) -> list[int]:
        """The session's committed tokens."""
        return self._core.history().result()

    def tokens(self) -> SessionTokens:
        """Returns the session's committed tokens: who made each, log-probabilities, weights and seeds of turns, and the
        session's place in the tree of forks."""
        return self._core.tokens().result()

    def turn(self, input: Input = (), **options: Unpack[ChatOptions]) -> TurnStream:  # noqa: A002 - as above
        """Appends `input` and generates; without input, continues from the history. Raises `SessionBusy`,
        `ContextExceeded`, `InvalidRequest`, `IllegalTransition` or `Overloaded`, without any change."""
        return self._start("turn", input, options)

    def chat(self, text: str, **options: Unpack[ChatOptions]) -> TurnStream:
        """Runs a turn with one user message."""
        return self._start("turn", [{"role": "user", "content": text}], options)

    def append(self, input: Input, **options: Unpack[ChatOptions]) -> TurnResult:  # noqa: A002 - as above
        """Appends, computes and commits `input` without generating."""
        return self._start("append", input, options).result()

    def regenerate(self, **options: Unpack[ChatOptions]) -> TurnStream:
        """Generates the last turn's output again. The old output stays until this turn commits."""
        return self._start("regenerate", (), options)

    def _start(self, kind: TurnKind, given: Input, options: Options) -> TurnStream:
        return self.stream_type(self._engine, partial(self._core.start, kind, given, options))

    def draft(self, input: Input) -> None:  # noqa: A002 - as above
        """Computes input ahead of its turn. Call this with the whole input so far, and again whenever it changes.
        `turn` then continues from the prefix that its input shares with the draft."""
        self._core.draft(input).result()

    def results(self, turn: TurnStream) -> ToolResults:
        """Returns a collection for the results of the calls of this session's last turn. Each is computed when it
        comes, in the order of the calls; `turn(results.messages)` then computes little besides its answer."""
        return ToolResults(self, turn.reader)

    def expect(self, within: float | None) -> SessionInfo:
        """Says that the session's next turn comes in `within` seconds, such as when a tool will have ended; `None`: it
        is not known any more. Until then the session's state stays in memory before that of sessions that come later,
        or comes back in time. Raises `SessionBusy` while a turn is open."""
        return self._core.expect(within).result()

    def abort(self) -> None:
        """Rolls back the open turn or draft. Raises `IllegalTransition` without one."""
        self._core.abort().result()

    def fork(self, turn: int | None = None, position: int | None = None, *, session_id: str | None = None) -> Self:
        """Opens a session with the first `turn` turns, the first `position` tokens, or all of this session's history.
        The two share memory."""
        return type(self)(self._engine, self._core.fork(turn, position, session_id).result())

    def trim(self, turns: Sequence[int], *, session_id: str | None = None) -> Self:
        """Opens a session with only the given turns of this one, by number in ascending order; 1 is the oldest. The two
        share the memory of their common prefix."""
        return type(self)(self._engine, self._core.trim(turns, session_id).result())

    def export(self) -> bytes:
        """Returns the session at its last commit as JSON, for `Client.import_session`. It contains texts as tokens."""
        return self._core.export().result()

    def export_file(self, path: str | PathLike[str]) -> None:
        """Writes the session at its last commit, with its state, to a file for `Client.import_file`. Raises
        `SessionBusy` while a turn is open."""
        self._core.export_file(path).result()

    def rewind(self, turn: int | None = None, position: int | None = None) -> SessionInfo:
        """Cuts the history back to its first `turn` turns or `position` tokens."""
        return self._core.rewind(turn, position).result()

    def compact(self, first: int = 1, last: int | None = None, **options: Unpack[CompactionOptions]) -> Compacted:
        """Replaces the turns `first` to `last` by one with a summary, which is given or written by the model; 1 is the
        oldest turn, and without `last` all from `first` on are replaced. The summary and the turns behind it are
        computed before the session changes, so its next turn computes only its own input. Raises `InvalidRequest`,
        `ContextExceeded`, `IllegalTransition`, or `VersionMismatch` if the session is changed meanwhile other than by
        new turns, without any change."""
        return self._core.compact(first, last, options).result()

    def erase(self) -> Erased:
        """Closes the session and overwrites all that is left of it in memory, tiers and the journal. An open turn is
        aborted. Returns the receipt, which names the sessions that still share a part of it."""
        return self._core.erase().result()

    def close(self, *, finish: bool = False) -> None:
        """Closes the session. An open turn is aborted, or with `finish` allowed to end first."""
        self._core.close(finish=finish).result()
