"""The synchronous face: calls wait for the engine's answer, and a turn is an iterator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import TracebackType
from typing import Self, Unpack
from weakref import finalize

from tenuto.api.core import EngineCore, SessionCore
from tenuto.api.reader import Deliver, Event, TurnReader
from tenuto.base.config import EngineOptions
from tenuto.base.options import Policy, TurnOptions
from tenuto.base.turns import Delta, Keep, TurnResult
from tenuto.base.views import AuditReport, SessionInfo
from tenuto.text.prompt import Input
from tenuto.text.tokenizer import Tokenizer


class Engine:
    """A model, ready for sessions. Close it, or use it as a context manager.

    `model`: `smollm2`, a `.gguf` file, a Hugging Face directory or a hub id. `device`: `cpu`, `cuda` or another name of
    PyTorch's. `dtype`: `float32`, `bfloat16` or `float16`; by default the first on a CPU, else the second.
    `memory_bytes` are for model state; by default what two turns of the whole context need. `config`: fields of
    `tenuto.base.config.EngineConfig`. Raises `ModelError` or `ConfigError`.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        device: str = "cpu",
        dtype: str | None = None,
        memory_bytes: int | None = None,
        page_size: int = 16,
        **config: Unpack[EngineOptions],
    ) -> None:
        self._core = EngineCore(model, device, dtype, memory_bytes, page_size, config)
        self._closer = finalize(self, self._core.loop.request_stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._core.tokenizer

    @property
    def context_length(self) -> int:
        """The most tokens a session's history may have."""
        return self._core.config.context_length

    def session(
        self,
        session_id: str | None = None,
        *,
        system: str | None = None,
        ttl: float | None = None,
        priority: int = 0,
        max_tokens: int | None = None,
    ) -> Session:
        """Open a session. `system` is put before the first messages. After `ttl` seconds without a turn it closes
        itself. `max_tokens` caps its history. Raises `AlreadyExists`, `Overloaded` or `InvalidRequest`."""
        policy = Policy(priority, ttl, max_tokens)
        return Session(self, self._core.open(session_id, system, policy).result())

    def generate(self, input: Input, **options: Unpack[TurnOptions]) -> TurnStream:  # noqa: A002 - the natural name
        """One turn without a session to go back to."""
        return TurnStream(self, lambda deliver: self._core.generate(input, options, deliver))

    def sessions(self) -> list[SessionInfo]:
        """All open sessions."""
        return self._core.sessions().result()

    def audit(self) -> AuditReport:
        """Recount every unit of memory from its holders. Raises `EngineStopped` if anything is amiss."""
        return self._core.audit().result()

    def close(self) -> None:
        """Stop. Turns still open raise `EngineStopped` at their readers."""
        self._closer.detach()
        self._core.loop.close()


class Session:
    """A conversation that owns its model state. Made by `Engine.session` and `Session.fork`."""

    def __init__(self, engine: Engine, core: SessionCore) -> None:
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

    def turn(self, input: Input = (), **options: Unpack[TurnOptions]) -> TurnStream:  # noqa: A002 - as above
        """Append `input` and generate; without input, continue. Raises `SessionBusy`, `ContextExceeded`,
        `InvalidRequest`, `IllegalTransition` or `Overloaded`, having changed nothing."""
        return TurnStream(self._engine, lambda deliver: self._core.turn(input, options, deliver))

    def chat(self, text: str, **options: Unpack[TurnOptions]) -> TurnStream:
        """A turn of one user message."""
        return self.turn([{"role": "user", "content": text}], **options)

    def append(self, input: Input, **options: Unpack[TurnOptions]) -> TurnResult:  # noqa: A002 - as above
        """Append `input`, compute it and commit it, without generating."""
        return TurnStream(self._engine, lambda deliver: self._core.append(input, options, deliver)).result()

    def regenerate(self, **options: Unpack[TurnOptions]) -> TurnStream:
        """Generate the last turn's output again. The old output stays until this turn commits."""
        return TurnStream(self._engine, lambda deliver: self._core.regenerate(options, deliver))

    def draft(self, input: Input) -> None:  # noqa: A002 - as above
        """Give the whole input so far of a turn to come, again with every change: it is computed meanwhile. `turn` with
        the final input continues from what they have in common."""
        self._core.draft(input).result()

    def abort(self) -> None:
        """Roll back the open turn or draft. Raises `IllegalTransition` if there is none."""
        self._core.abort().result()

    def fork(self, turn: int | None = None, position: int | None = None, *, session_id: str | None = None) -> Session:
        """A new session with the first `turn` turns, the first `position` tokens, or all of this one's history. They
        share memory."""
        return Session(self._engine, self._core.fork(turn, position, session_id).result())

    def rewind(self, turn: int | None = None, position: int | None = None) -> SessionInfo:
        """Cut the history back to its first `turn` turns or `position` tokens."""
        return self._core.rewind(turn, position).result()

    def close(self, *, finish: bool = False) -> None:
        """Close it. An open turn is aborted, or with `finish` may end first."""
        self._core.close(finish=finish).result()


class TurnStream:
    """A turn in progress. Iterating yields text as it is delivered; it can be left and taken up again.

    A stream that is dropped or closed before its turn has ended aborts the turn. One thread may read it; any may abort
    it.
    """

    def __init__(self, engine: Engine, start: Callable[[Deliver], TurnReader]) -> None:
        self._engine = engine  # stays open while a turn of it is read
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._reader = start(self._events.put)
        self._closer = finalize(self, self._reader.disconnect)
        self._closer.atexit = False  # the engine's own end sees to that
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
    def text(self) -> str:
        """All text read so far."""
        return self._reader.text

    @property
    def token_ids(self) -> list[int]:
        """All output token ids read so far."""
        return list(self._reader.token_ids)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from the call that opened the turn to its first token, once that is there."""
        return self._reader.time_to_first_token

    def abort(self, keep: Keep = None) -> TurnResult:
        """End the turn now. By default the session is as it was before; with `keep` this is a barge-in, which commits
        the input and that many output tokens, or all whose text was read from this stream ("delivered"). Tokens kept
        beyond those read are still read from the stream, with their text unless that of tokens not kept came with it.
        If the turn has ended already, its result is returned."""
        return self._reader.abort(keep).result()

    def close(self) -> None:
        """Abort the turn if it has not ended."""
        self._closer()

    def _next(self) -> Delta | None:
        return None if self._reader.ended else self._reader.take(self._events.get())
