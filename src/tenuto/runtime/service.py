"""Answers the edge's messages with an engine."""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import singledispatchmethod
from heapq import nsmallest
from typing import Any, TypeVar

import msgspec

from tenuto.base.checks import MAX_COUNT, whole
from tenuto.base.config import EngineConfig, engine_config
from tenuto.base.errors import EngineStopped, InvalidRequest, LimitReached, TenutoError
from tenuto.base.messages import (
    AbortTurn,
    Answer,
    AnyReply,
    Audit,
    CloseSession,
    Describe,
    Detokenize,
    Draft,
    DropMemory,
    Fork,
    GetSession,
    GetStats,
    ListSessions,
    ListTurns,
    OpenSession,
    Refusal,
    Request,
    Rewind,
    StartTurn,
    Stopped,
    Trim,
    Updates,
    Withdraw,
    WorkerSettings,
)
from tenuto.base.options import Policy, TurnParams
from tenuto.base.sampling import Candidate, TokenLogprob
from tenuto.base.turns import Delta
from tenuto.base.views import (
    ModelView,
    PoolReport,
    Record,
    RecordPage,
    SessionInfo,
    SessionPage,
    Stats,
    Ticket,
)
from tenuto.engine.chat_engine import ChatEngine
from tenuto.engine.engine import Engine
from tenuto.engine.loop import EngineLoop
from tenuto.engine.rendering import Basis, Prepared
from tenuto.runtime.intake import Input, Intake, size_of
from tenuto.runtime.models import Model, build_engine, load_model, server_budget
from tenuto.runtime.views import bytes_of, first_page, session_info, turn_state
from tenuto.session.session import Session, TurnRecord
from tenuto.session.turn import Turn
from tenuto.text.prompt import Prompt, parse_input

log = logging.getLogger("tenuto.runtime")

T = TypeVar("T")

MOST_LISTED = 1000
"""Sessions or turns on one page."""
PAGE_BYTES = 2**20
"""At which a page of sessions ends."""
PAGE_TOKENS = 2**16
"""At which a page of turns ends."""


class Service:
    """One engine, spoken to by messages. `handle` is called by one thread at a time, `send` in any; it must not
    block. What is asked of a session is done in the order in which it was asked, except that input has to become tokens
    first, and other requests may be done meanwhile."""

    def __init__(
        self, model: Model, config: EngineConfig, memory_bytes: int | None, send: Callable[[AnyReply], None]
    ) -> None:
        """Raises `ConfigError`."""
        self._model = model
        self._config = config
        self._send = send
        engine = build_engine(model, config, memory_bytes)
        self._chats = ChatEngine(engine, model.chat, model.tokenizer)
        self._updates: list[tuple[int, Delta]] = []  # of the round; the engine's thread alone
        self._describe = self._describe_model(engine)
        self._loop = EngineLoop(engine, self._stopped, after_round=self._flush)
        self._intake = Intake(self._chats, self._loop)

    def close(self) -> None:
        """Stop after the step in progress; turns that are open end with `EngineStopped`."""
        self._loop.close()
        self._intake.close()

    def handle(self, request: Request[Any]) -> None:
        """Answer a request, now or later."""
        try:
            self._handle(request)
        except TenutoError as error:
            self._refuse(request.call, error)
        except Exception as error:  # our mistake, and one request's: the sessions of all others live on
            log.exception("a request failed")
            self._refuse(request.call, error)

    @singledispatchmethod
    def _handle(self, request: Request[Any]) -> None:
        raise InvalidRequest(f"there is no answer to {type(request).__name__}")

    # -- answers

    def _answer(self, request: Request[T], value: T) -> None:
        self._send(Answer(call=request.call, value=msgspec.Raw(msgspec.msgpack.encode(value))))

    def _refuse(self, call: int, error: BaseException) -> None:
        code = error.code if isinstance(error, TenutoError) else TenutoError.code
        text = str(error) if isinstance(error, TenutoError) else f"{type(error).__name__}: {error}"
        param = error.param if isinstance(error, TenutoError) else None
        self._send(Refusal(call=call, code=code, message=text, param=param))

    def _do(self, request: Request[T], work: Callable[[Engine], T]) -> None:
        """Have `work` done in the engine's thread, and answer with what it returns."""
        self._loop.call(work).add_done_callback(lambda done: self._reply(request, done))

    def _reply_refusal(self, call: int, done: Future[Any]) -> None:
        error = done.exception()
        if error is not None:
            self._refuse(call, error)

    def _reply(self, request: Request[T], done: Future[T]) -> None:
        error = done.exception()
        if error is not None:
            self._refuse(request.call, error)
        else:
            self._answer(request, done.result())

    def _flush(self) -> None:
        if self._updates:
            self._send(Updates(updates=self._updates))
            self._updates = []

    def _stopped(self) -> None:
        self._flush()
        self._model.executor.close()
        self._send(Stopped(reason=self._loop.stopped or "the engine was closed"))

    # -- sessions

    @_handle.register
    def _(self, request: OpenSession) -> None:
        def work(engine: Engine) -> SessionInfo:
            self._check_limits(engine, request, opens=True)
            return self._view(self._chats.open(request.session, request.policy, request.system))

        self._do(request, work)

    @_handle.register
    def _(self, request: GetSession) -> None:
        self._do(request, lambda _: self._view(self._chats.session(request.session, tenant=request.tenant)))

    @_handle.register
    def _(self, request: ListSessions) -> None:
        limit = whole("limit", request.limit, 1, MOST_LISTED)

        def work(engine: Engine) -> SessionPage:
            found = (
                session
                for session in engine.sessions
                if session.policy.tenant == request.tenant
                and session.id > request.after
                and not (session.policy.ephemeral or session.policy.hidden)
                and request.state in (None, session.state.value, turn_state(session))
            )
            first = nsmallest(limit + 1, found, key=lambda session: session.id)
            sessions = first_page(map(self._view, first), limit, PAGE_BYTES, bytes_of)
            return SessionPage(sessions=sessions, more=len(sessions) < len(first))

        self._do(request, work)

    @_handle.register
    def _(self, request: ListTurns) -> None:
        first, limit = whole("first", request.first, 1, MAX_COUNT), whole("limit", request.limit, 1, MOST_LISTED)

        def work(_: Engine) -> tuple[list[TurnRecord], array[int], bool]:
            session = self._chats.session(request.session, tenant=request.tenant)
            following = session.records[first - 1 : first - 1 + limit]
            page = first_page(following, limit, PAGE_TOKENS, lambda record: record.end - record.start)
            tokens = session.history[page[0].start : page[-1].end] if page else array("i")
            return page, tokens, first - 1 + len(page) < len(session.records)

        # The answer is made in the engine's thread, too: how much a page may hold bounds how long that takes.
        def reply(done: Future[tuple[list[TurnRecord], array[int], bool]]) -> None:
            if (error := done.exception()) is not None:
                self._refuse(request.call, error)
                return
            page, tokens, more = done.result()
            records = [self._record(first + i, record, page[0].start, tokens) for i, record in enumerate(page)]
            self._answer(request, RecordPage(records=records, more=more))

        self._loop.call(work).add_done_callback(reply)

    def _record(self, number: int, record: TurnRecord, at: int, tokens: array[int]) -> Record:
        """A turn as it is shown; `tokens` are the history from `at` on."""
        given = tokens[record.start - at : record.input_end - at].tolist()
        output = tokens[record.input_end - at : record.end - at].tolist()
        return Record(
            number=number,
            start=record.start,
            input_tokens=given,
            output_tokens=output,
            input_text=self._text(given),
            output_text=self._text(output),
        )

    @_handle.register
    def _(self, request: Fork) -> None:
        def work(engine: Engine) -> SessionInfo:
            self._chats.session(request.session, request.version, tenant=request.tenant)
            self._check_limits(engine, request, opens=True)
            child = self._chats.fork(
                request.session,
                turn=request.turn,
                position=request.position,
                child=request.child,
                tenant=request.tenant,
            )
            return self._view(child)

        self._do(request, work)

    @_handle.register
    def _(self, request: Trim) -> None:
        def work(engine: Engine) -> SessionInfo:
            self._chats.session(request.session, request.version, tenant=request.tenant)
            self._check_limits(engine, request, opens=True)
            return self._view(self._chats.trim(request.session, request.turns, request.child, tenant=request.tenant))

        self._do(request, work)

    @_handle.register
    def _(self, request: Rewind) -> None:
        def work(_: Engine) -> SessionInfo:
            return self._view(
                self._chats.rewind(
                    request.session,
                    turn=request.turn,
                    position=request.position,
                    version=request.version,
                    tenant=request.tenant,
                )
            )

        self._do(request, work)

    @_handle.register
    def _(self, request: CloseSession) -> None:
        def work(engine: Engine) -> None:
            self._chats.session(request.session, request.version, tenant=request.tenant)
            engine.close(request.session, finish=request.finish, tenant=request.tenant)

        self._do(request, work)

    # -- turns

    @_handle.register
    def _(self, request: StartTurn) -> None:
        params = request.params
        outlet = _Outlet(request.call, self)
        if request.kind == "regenerate":
            if request.session is None:
                raise InvalidRequest("there is nothing to generate again; name a session")
            started = self._loop.start(lambda engine: self._regenerate(engine, request, params), outlet)
            started.add_done_callback(lambda done: self._reply_refusal(request.call, done))
            return
        self._intake.put(
            Input(
                name=request.name,
                session=request.key,
                size=size_of(request.input),
                generate=params.max_new_tokens != 0 if request.session is None else request.kind == "turn",
                basis=lambda engine: self._basis(engine, request),
                parse=lambda basis: self._prompt(request, basis),
                begin=lambda engine, prepared: self._begin(engine, request, params, prepared),
                post=lambda work: self._loop.start(work, outlet),
                reply=lambda turn: self._answer(request, self._ticket(turn, echo=request.echo)),
                refuse=lambda error: self._refuse(request.call, error),
            )
        )

    def _regenerate(self, engine: Engine, request: StartTurn, params: TurnParams) -> Turn:
        assert request.session is not None
        self._check_limits(engine, request)
        turn = self._chats.regenerate(request.session, params, request.version, tenant=request.tenant)
        self._answer(request, self._ticket(turn, echo=request.echo))  # before anything that the turn brings
        return turn

    def _basis(self, engine: Engine, request: StartTurn | Draft) -> Basis:
        if request.session is None:
            return self._chats.opening()
        basis = self._chats.basis(request.session, request.version, tenant=request.tenant)
        self._check_limits(engine, request)
        return basis

    def _begin(self, engine: Engine, request: StartTurn, params: TurnParams, prepared: Prepared) -> Turn | None:
        self._check_limits(engine, request)
        if request.session is None:
            return self._chats.begin_one_shot(prepared, params, Policy(tenant=request.tenant))
        generate = request.kind == "turn"
        return self._chats.begin(
            request.session, prepared, params, generate=generate, version=request.version, tenant=request.tenant
        )

    def _prompt(self, request: StartTurn, basis: Basis) -> Prompt:
        tokenizer = self._model.tokenizer
        leaves_out = not request.keep_bos and not basis.empty
        room = basis.room(generate=request.kind == "turn", spare=int(leaves_out))
        if request.markup and isinstance(request.input, str) and tokenizer is not None:
            room.require(tokenizer.least_tokens(request.input))
            prompt = Prompt(tokens=tuple(tokenizer.encode(request.input, special=True)), text=True)
        else:
            prompt = parse_input(request.input, tokenizer, room)
        return self._without_bos(prompt) if leaves_out else prompt

    def _without_bos(self, prompt: Prompt) -> Prompt:
        tokenizer = self._model.tokenizer
        if tokenizer is None or not tokenizer.adds_bos or prompt.tokens[:1] != (tokenizer.bos_id,):
            return prompt
        return replace(prompt, tokens=prompt.tokens[1:])

    @_handle.register
    def _(self, request: Draft) -> None:
        def begin(engine: Engine, prepared: Prepared) -> Turn | None:
            self._basis(engine, request)
            return self._chats.begin_draft(request.session, prepared, request.version, tenant=request.tenant)

        self._intake.put(
            Input(
                name=request.name,
                session=(request.tenant, request.session),
                size=size_of(request.input),
                generate=False,
                basis=lambda engine: self._basis(engine, request),
                parse=lambda basis: parse_input(request.input, self._model.tokenizer, basis.room(generate=False)),
                begin=begin,
                post=self._loop.call,
                reply=lambda turn: self._answer(request, self._view(turn.session)),
                refuse=lambda error: self._refuse(request.call, error),
            )
        )

    @_handle.register
    def _(self, request: Withdraw) -> None:
        self._answer(request, self._intake.withdraw(request.name))

    @_handle.register
    def _(self, request: AbortTurn) -> None:
        def work(engine: Engine) -> bool:
            turn = engine.sessions.get(request.session, request.tenant).turn
            if request.turn is not None and (turn is None or turn.number != request.turn):
                return False
            self._loop.publish(engine.abort(request.session, request.keep, tenant=request.tenant))
            return True

        self._do(request, work)

    # -- the engine as a whole

    @_handle.register
    def _(self, request: Describe) -> None:
        self._answer(request, self._describe)

    @_handle.register
    def _(self, request: DropMemory) -> None:
        self._do(request, lambda engine: engine.drop())

    @_handle.register
    def _(self, request: Audit) -> None:
        self._loop.audit().add_done_callback(lambda done: self._reply(request, done))

    @_handle.register
    def _(self, request: GetStats) -> None:
        self._do(request, self._stats)

    @_handle.register
    def _(self, request: Detokenize) -> None:
        text = self._text(request.tokens, special=request.special)
        if text is None:
            raise InvalidRequest("text needs a tokenizer, and this engine has none")
        self._answer(request, text)

    # -- in the engine's thread, except where nothing but the model is asked

    def publish(self, call: int, news: Delta | TenutoError) -> None:
        """A turn has gone on. Errors other than the engine's end are not for here: the turn did not start, and the
        answer to the request says why."""
        if isinstance(news, Delta):
            self._updates.append((call, self._with_text(news) if news.logprobs or news.input_logprobs else news))
        elif isinstance(news, EngineStopped):
            self._send(Refusal(call=call, code=news.code, message=str(news)))

    def _with_text(self, delta: Delta) -> Delta:
        """With what the tokens of its log-probabilities say."""
        tokenizer = self._model.tokenizer
        if tokenizer is None:
            return delta
        raw = tokenizer.written_bytes

        def told(entry: TokenLogprob) -> TokenLogprob:
            top = tuple(Candidate(other.token, other.logprob, raw(other.token)) for other in entry.top)
            return TokenLogprob(entry.token, entry.logprob, top, raw(entry.token))

        inputs = tuple(told(entry) if entry is not None else None for entry in delta.input_logprobs)
        return msgspec.structs.replace(delta, logprobs=tuple(map(told, delta.logprobs)), input_logprobs=inputs)

    @staticmethod
    def _check_limits(
        engine: Engine, request: OpenSession | Fork | Trim | StartTurn | Draft, *, opens: bool = False
    ) -> None:
        """Raises `LimitReached` if the tenant may not have more tokens or, where a session is opened, sessions."""
        use, limits = engine.sessions.use(request.tenant), request.limits
        if opens and limits.sessions is not None and use.sessions >= limits.sessions:
            raise LimitReached(f"{use.sessions} sessions are open; allowed: {limits.sessions}; close some first")
        if limits.tokens is not None and use.tokens >= limits.tokens:
            raise LimitReached(
                f"sessions hold {use.tokens} tokens; allowed: {limits.tokens}; close or rewind some first"
            )

    def _view(self, session: Session) -> SessionInfo:
        return session_info(self._chats.engine, session)

    def _ticket(self, turn: Turn, *, echo: bool) -> Ticket:
        prompt = turn.tokens(0, turn.prompt_length).tolist() if echo else []
        return Ticket(
            turn=turn.number,
            session=turn.session.id,
            history=turn.base_length,
            prompt_tokens=turn.prompt_length,
            max_new_tokens=turn.max_new_tokens,
            version=turn.session.version,
            prompt=prompt,
            text=self._text(prompt) if echo else None,
        )

    def _text(self, tokens: Iterable[int], *, special: bool = True) -> str | None:
        tokenizer = self._model.tokenizer
        return tokenizer.decode(tokens, special=special) if tokenizer is not None else None

    def _stats(self, engine: Engine) -> Stats:
        totals = engine.totals
        return Stats(
            sessions=len(engine.sessions),
            running=len(engine.batch),
            queued=engine.queued,
            steps=engine.steps,
            transitions=dict(engine.transitions),
            pools=[
                PoolReport(pool.name, pool.capacity, pool.free, pool.limbo, pool.leased) for pool in engine.memory.pools
            ],
            prompt_tokens=totals["prompt"],
            cached_tokens=totals["cached"],
            generated_tokens=totals["generated"],
            computed_tokens=totals["computed"],
            recomputed=dict(engine.lifecycle.recomputed),
            held_tokens=engine.sessions.held(),
        )

    def _describe_model(self, engine: Engine) -> ModelView:
        model, pools = self._model, engine.memory.pools
        page_size = engine.memory.page_size
        paged = [pools[group].capacity for group in engine.memory.paged]
        tokenizer = model.tokenizer
        return ModelView(
            model=model.name,
            path=model.path,
            vocab_size=model.vocab_size,
            context_length=self._config.context_length,
            max_context=model.max_context,
            page_size=page_size,
            capacity_tokens=min(paged) * page_size if paged else 0,
            units={pool.name: pool.capacity for pool in pools},
            adds_bos=tokenizer.adds_bos if tokenizer is not None else False,
            bos_id=tokenizer.bos_id if tokenizer is not None else None,
            eos_ids=list(model.eos_ids),
            has_text=tokenizer is not None,
            has_chat=model.chat is not None,
            pid=os.getpid(),
            config=self._config,
        )


def open_service(settings: WorkerSettings, send: Callable[[AnyReply], None]) -> Service:
    """Load a model and serve it. Raises `ModelError` or `ConfigError`."""
    model = load_model(settings.model, settings.device, settings.dtype, settings.page_size)
    config = engine_config(settings.config, model.max_context)
    memory = settings.memory_bytes if settings.memory_bytes is not None else server_budget(model, config)
    return Service(model, config, memory, send)


class _Outlet:
    """Tells a service what a turn brings."""

    __slots__ = ("_call", "_service")

    def __init__(self, call: int, service: Service) -> None:
        self._call = call
        self._service = service

    def __call__(self, news: Delta | TenutoError) -> None:
        self._service.publish(self._call, news)
