"""What both faces of the interface do: every operation, as work for the engine's thread."""

from __future__ import annotations

import secrets
from concurrent.futures import Future

from tenuto.api.reader import Deliver, TurnReader
from tenuto.base.config import EngineOptions, engine_config
from tenuto.base.messages import Draft, Fork, OpenSession, Rewind, StartTurn
from tenuto.base.options import Policy, TurnOptions, turn_params
from tenuto.base.turns import TurnKind
from tenuto.base.views import AuditReport, SessionInfo
from tenuto.engine import engine as engines
from tenuto.engine.dispatcher import Dispatcher
from tenuto.engine.loop import EngineLoop
from tenuto.engine.rendering import Renderer
from tenuto.engine.views import session_info
from tenuto.runtime.models import build_engine, load_model
from tenuto.session.session import Turn
from tenuto.text.prompt import Input, Prompt, parse_input


class EngineCore:
    """A model, its engine, and the loop that runs it. `dispatcher` belongs to the engine's thread."""

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
        self.renderer = Renderer(loaded.chat, loaded.tokenizer)
        self.dispatcher = Dispatcher(engine, self.renderer)
        self.loop = EngineLoop(engine, loaded.executor.close)

    def open(self, session_id: str | None, system: str | None, policy: Policy) -> Future[SessionCore]:
        self.renderer.check_system(system, self.config.context_length)
        command = OpenSession(session=_named(session_id), policy=policy, system=system)
        return self.loop.execute(lambda _: SessionCore(self, self.dispatcher.execute(command).session_id))

    def generate(self, given: Input, options: TurnOptions, deliver: Deliver) -> TurnReader:
        """The only turn of an ephemeral session."""
        command = StartTurn(kind="turn", tenant="", params=turn_params(options))
        return self.start(command, parse_input(given, self.tokenizer), deliver, command.params.max_new_tokens != 0)

    def start(self, command: StartTurn, prompt: Prompt, deliver: Deliver, generate: bool) -> TurnReader:
        def work(engine: engines.Engine) -> Turn:
            prepared = None
            if command.kind != "regenerate":
                prepared = self.renderer.prepare(self.dispatcher.basis(command), prompt, generate=generate)
            return engine.sessions.turn(self.dispatcher.execute(command, prepared).session)

        return TurnReader(self.loop, work, deliver)

    def audit(self) -> Future[AuditReport]:
        return self.loop.call(lambda engine: engine.audit())

    def sessions(self) -> Future[list[SessionInfo]]:
        return self.loop.execute(lambda engine: [session_info(engine, session) for session in engine.sessions])


class SessionCore:
    """One session's operations."""

    def __init__(self, engine: EngineCore, session_id: str) -> None:
        self.engine = engine
        self.id = session_id

    def turn(self, given: Input, options: TurnOptions, deliver: Deliver) -> TurnReader:
        return self._start("turn", given, options, deliver)

    def append(self, given: Input, options: TurnOptions, deliver: Deliver) -> TurnReader:
        return self._start("append", given, options, deliver)

    def regenerate(self, options: TurnOptions, deliver: Deliver) -> TurnReader:
        return self._start("regenerate", (), options, deliver)

    def _start(self, kind: TurnKind, given: Input, options: TurnOptions, deliver: Deliver) -> TurnReader:
        command = StartTurn(kind=kind, tenant="", session=self.id, params=turn_params(options))
        prompt = parse_input(given, self.engine.tokenizer)
        return self.engine.start(command, prompt, deliver, generate=kind == "turn")

    def draft(self, given: Input) -> Future[None]:
        core, prompt = self.engine, parse_input(given, self.engine.tokenizer)
        command = Draft(tenant="", session=self.id, input=())

        def work(_: engines.Engine) -> None:
            prepared = core.renderer.prepare(core.dispatcher.basis(command), prompt, generate=False)
            core.dispatcher.execute(command, prepared)

        return core.loop.execute(work)

    def abort(self) -> Future[None]:
        def work(engine: engines.Engine) -> None:
            engine.abort(self.id)

        return self.engine.loop.execute(work)

    def fork(self, turn: int | None, position: int | None, child: str | None) -> Future[SessionCore]:
        core = self.engine
        command = Fork(tenant="", session=self.id, turn=turn, position=position, child=_named(child))
        return core.loop.execute(lambda _: SessionCore(core, core.dispatcher.execute(command).session_id))

    def rewind(self, turn: int | None, position: int | None) -> Future[SessionInfo]:
        command = Rewind(tenant="", session=self.id, turn=turn, position=position)
        return self.engine.loop.execute(lambda _: self.engine.dispatcher.execute(command))

    def close(self, *, finish: bool) -> Future[None]:
        return self.engine.loop.execute(lambda engine: engine.close(self.id, finish=finish))

    def info(self) -> Future[SessionInfo]:
        return self.engine.loop.execute(lambda engine: session_info(engine, engine.sessions.get(self.id)))

    def history(self) -> Future[list[int]]:
        return self.engine.loop.execute(lambda engine: list(engine.sessions.get(self.id).history))


def _named(session_id: str | None) -> str:
    """An id nobody else has, unless one is given."""
    return session_id if session_id is not None else secrets.token_hex(12)
