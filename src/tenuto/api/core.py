"""What both faces of the interface do: every operation, as work for the engine's thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from tenuto.api.chats import ChatLog
from tenuto.api.models import build_engine, engine_config, load_model
from tenuto.api.options import Input, TurnOptions, parse_input, turn_params
from tenuto.api.reader import Deliver, TurnReader
from tenuto.engine import engine as engines
from tenuto.engine.loop import EngineLoop
from tenuto.memory.audit import AuditReport
from tenuto.session.session import Policy, Session
from tenuto.session.turn import Turn, TurnParams
from tenuto.text.chat import Conversation

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session as it is now. `state`: open or closing; `turn`: the state of its open turn, if there is one. `version`
    counts commits and rewinds. Of its `tokens`, the first `computed` have their state in memory."""

    session_id: str
    state: str
    turn: str | None
    version: int
    turns: int
    tokens: int
    computed: int
    context_left: int


class EngineCore:
    """A model, its engine, and the loop that runs it.

    Invariant: `_logs` has an entry for every session opened here; the engine's thread alone uses it.
    """

    def __init__(
        self,
        model: str,
        device: str,
        dtype: str | None,
        memory_bytes: int | None,
        page_size: int,
        config: dict[str, Any],
    ) -> None:
        """Raises `ModelError` or `ConfigError`."""
        loaded = load_model(model, device, dtype, page_size)
        self.tokenizer = loaded.tokenizer
        self.config = engine_config(loaded, config)
        self._chat = loaded.chat
        self._logs: WeakKeyDictionary[Session, ChatLog] = WeakKeyDictionary()
        self.loop = EngineLoop(build_engine(loaded, self.config, memory_bytes), loaded.executor.close)

    def open(self, session_id: str | None, system: str | None, policy: Policy) -> Future[SessionCore]:
        log = ChatLog(self._chat, self.tokenizer, system)

        def work(engine: engines.Engine) -> SessionCore:
            session = engine.open(session_id, policy)
            self._logs[session] = log
            return SessionCore(self, session.id)

        return self.loop.call(work)

    def generate(self, given: Input, options: TurnOptions, deliver: Deliver) -> TurnReader:
        """The only turn of an ephemeral session."""
        prompt, params = parse_input(given, self.tokenizer), turn_params(options)

        def work(engine: engines.Engine) -> Turn:
            session = engine.open(policy=Policy(ephemeral=True))
            log = self._logs[session] = ChatLog(self._chat, self.tokenizer, None)
            try:
                tokens, conversation = log.render(session, prompt, generate=True)
                return engine.submit(session.id, tokens, with_stops(params, log, conversation))
            except BaseException:
                engine.close(session.id)
                raise

        return TurnReader(self.loop, work, deliver)

    def audit(self) -> Future[AuditReport]:
        return self.loop.call(lambda engine: engine.audit())

    def sessions(self) -> Future[list[SessionInfo]]:
        return self.loop.call(lambda engine: [describe(session) for session in engine.sessions])

    def log(self, session: Session) -> ChatLog:
        """For the engine's thread."""
        return self._logs[session]

    def fork_log(self, parent: Session, child: Session) -> None:
        """For the engine's thread."""
        self._logs[child] = self._logs[parent].fork(len(child.history))


class SessionCore:
    """One session's operations."""

    def __init__(self, engine: EngineCore, session_id: str) -> None:
        self.engine = engine
        self.id = session_id

    def turn(self, given: Input, options: TurnOptions, deliver: Deliver) -> TurnReader:
        return self._start(given, turn_params(options), deliver, generate=True)

    def append(self, given: Input, options: TurnOptions, deliver: Deliver) -> TurnReader:
        return self._start(given, replace(turn_params(options), max_new_tokens=0), deliver, generate=False)

    def _start(self, given: Input, params: TurnParams, deliver: Deliver, *, generate: bool) -> TurnReader:
        prompt = parse_input(given, self.engine.tokenizer)

        def work(engine: engines.Engine) -> Turn:
            session = engine.sessions.get(self.id)
            log, start = self.engine.log(session), len(session.history)
            tokens, conversation = log.render(session, prompt, generate=generate)
            turn = engine.submit(self.id, tokens, with_stops(params, log, conversation))
            log.note(start, len(tokens), conversation)
            return turn

        return TurnReader(self.engine.loop, work, deliver)

    def regenerate(self, options: TurnOptions, deliver: Deliver) -> TurnReader:
        params = turn_params(options)

        def work(engine: engines.Engine) -> Turn:
            session = engine.sessions.get(self.id)
            log = self.engine.log(session)
            return engine.regenerate(self.id, with_stops(params, log, log.of_last_turn(session)))

        return TurnReader(self.engine.loop, work, deliver)

    def draft(self, given: Input) -> Future[None]:
        prompt = parse_input(given, self.engine.tokenizer)

        def work(engine: engines.Engine) -> None:
            session = engine.sessions.get(self.id)
            engine.draft(self.id, self.engine.log(session).render(session, prompt, generate=False)[0])

        return self.engine.loop.call(work)

    def abort(self) -> Future[None]:
        def work(engine: engines.Engine) -> None:
            engine.abort(self.id)

        return self.engine.loop.call(work)

    def fork(self, turn: int | None, position: int | None, child: str | None) -> Future[SessionCore]:
        def work(engine: engines.Engine) -> SessionCore:
            forked = engine.fork(self.id, turn=turn, position=position, child=child)
            self.engine.fork_log(engine.sessions.get(self.id), forked)
            return SessionCore(self.engine, forked.id)

        return self.engine.loop.call(work)

    def rewind(self, turn: int | None, position: int | None) -> Future[SessionInfo]:
        def work(engine: engines.Engine) -> SessionInfo:
            session = engine.rewind(self.id, turn=turn, position=position)
            self.engine.log(session).cut(len(session.history))
            return describe(session)

        return self.engine.loop.call(work)

    def close(self, *, finish: bool) -> Future[None]:
        return self.engine.loop.call(lambda engine: engine.close(self.id, finish=finish))

    def info(self) -> Future[SessionInfo]:
        return self._of_session(describe)

    def history(self) -> Future[list[int]]:
        return self._of_session(lambda session: list(session.history))

    def _of_session(self, question: Callable[[Session], T]) -> Future[T]:
        return self.engine.loop.call(lambda engine: question(engine.sessions.get(self.id)))


def describe(session: Session) -> SessionInfo:
    """For the engine's thread."""
    return SessionInfo(
        session.id,
        session.state.value,
        session.turn.state.value if session.turn is not None else None,
        session.version,
        len(session.records),
        len(session.history),
        session.memory.computed,
        session.context_left,
    )


def with_stops(params: TurnParams, log: ChatLog, conversation: Conversation | None) -> TurnParams:
    """In a conversation, what ends an answer ends the turn."""
    if params.ignore_eos:
        return params
    return replace(params, stop_ids=(*params.stop_ids, *log.stop_ids(conversation)))
