"""What both faces of the interface do: every operation, as work for the engine's thread."""

from __future__ import annotations

from concurrent.futures import Future

from tenuto.api.reader import Deliver, TurnReader
from tenuto.base.config import EngineOptions, engine_config
from tenuto.base.options import Policy, TurnOptions, TurnParams, turn_params
from tenuto.base.views import AuditReport, SessionInfo
from tenuto.engine import engine as engines
from tenuto.engine.chat_engine import ChatEngine
from tenuto.engine.loop import EngineLoop
from tenuto.runtime.models import build_engine, load_model
from tenuto.runtime.views import session_info
from tenuto.text.prompt import Input, parse_input


class EngineCore:
    """A model, its engine, and the loop that runs it. `chats` belongs to the engine's thread."""

    def __init__(
        self,
        model: str,
        device: str,
        dtype: str | None,
        memory_bytes: int | None,
        page_size: int,
        config: EngineOptions,
    ) -> None:
        """Raises `ModelError` or `ConfigError`."""
        loaded = load_model(model, device, dtype, page_size)
        self.tokenizer = loaded.tokenizer
        self.config = engine_config(config, loaded.max_context)
        engine = build_engine(loaded, self.config, memory_bytes)
        self.chats = ChatEngine(engine, loaded.chat, loaded.tokenizer)
        self.loop = EngineLoop(engine, loaded.executor.close)

    def open(self, session_id: str | None, system: str | None, policy: Policy) -> Future[SessionCore]:
        return self.loop.call(lambda _: SessionCore(self, self.chats.open(session_id, policy, system).id))

    def generate(self, given: Input, options: TurnOptions, deliver: Deliver) -> TurnReader:
        """The only turn of an ephemeral session."""
        prompt, params = parse_input(given, self.tokenizer), turn_params(options)
        return TurnReader(self.loop, lambda _: self.chats.one_shot(prompt, params, Policy()), deliver)

    def audit(self) -> Future[AuditReport]:
        return self.loop.call(lambda engine: engine.audit())

    def sessions(self) -> Future[list[SessionInfo]]:
        return self.loop.call(lambda engine: [session_info(engine, session) for session in engine.sessions])


class SessionCore:
    """One session's operations."""

    def __init__(self, engine: EngineCore, session_id: str) -> None:
        self.engine = engine
        self.id = session_id

    def turn(self, given: Input, options: TurnOptions, deliver: Deliver) -> TurnReader:
        return self._start(given, turn_params(options), deliver, generate=True)

    def append(self, given: Input, options: TurnOptions, deliver: Deliver) -> TurnReader:
        return self._start(given, turn_params(options), deliver, generate=False)

    def _start(self, given: Input, params: TurnParams, deliver: Deliver, *, generate: bool) -> TurnReader:
        prompt = parse_input(given, self.engine.tokenizer)
        chats = self.engine.chats
        return TurnReader(self.engine.loop, lambda _: chats.turn(self.id, prompt, params, generate=generate), deliver)

    def regenerate(self, options: TurnOptions, deliver: Deliver) -> TurnReader:
        params = turn_params(options)
        chats = self.engine.chats
        return TurnReader(self.engine.loop, lambda _: chats.regenerate(self.id, params), deliver)

    def draft(self, given: Input) -> Future[None]:
        prompt, chats = parse_input(given, self.engine.tokenizer), self.engine.chats

        def work(_: engines.Engine) -> None:
            chats.draft(self.id, prompt)

        return self.engine.loop.call(work)

    def abort(self) -> Future[None]:
        def work(engine: engines.Engine) -> None:
            engine.abort(self.id)

        return self.engine.loop.call(work)

    def fork(self, turn: int | None, position: int | None, child: str | None) -> Future[SessionCore]:
        core = self.engine
        return core.loop.call(
            lambda _: SessionCore(core, core.chats.fork(self.id, turn=turn, position=position, child=child).id)
        )

    def rewind(self, turn: int | None, position: int | None) -> Future[SessionInfo]:
        chats = self.engine.chats
        return self.engine.loop.call(
            lambda engine: session_info(engine, chats.rewind(self.id, turn=turn, position=position))
        )

    def close(self, *, finish: bool) -> Future[None]:
        return self.engine.loop.call(lambda engine: engine.close(self.id, finish=finish))

    def info(self) -> Future[SessionInfo]:
        return self.engine.loop.call(lambda engine: session_info(engine, engine.sessions.get(self.id)))

    def history(self) -> Future[list[int]]:
        return self.engine.loop.call(lambda engine: list(engine.sessions.get(self.id).history))
