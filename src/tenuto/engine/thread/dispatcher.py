"""The dispatcher checks and executes typed commands, through which all operations reach an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import singledispatchmethod
from itertools import islice
from typing import Any, TypeVar

import msgspec

from tenuto.base.checks import MAX_COUNT, whole
from tenuto.base.errors import ContextExceeded, InvalidRequest, InvariantError, Misdirected, NotFound
from tenuto.base.map_views import MapPart, TraceView
from tenuto.base.options import Policy, SessionAdapter, TurnParams
from tenuto.base.tokens import PackedTokens
from tenuto.base.views import (
    AdapterView,
    FoundTurn,
    RecordPage,
    SessionInfo,
    SessionPage,
    SharedTierView,
    Stats,
    Ticket,
)
from tenuto.base.wire.document import Conversation, SessionDocument
from tenuto.base.wire.messages import (
    AbortTurn,
    BeginTrace,
    CloseSession,
    CopyTurns,
    Draft,
    DropMemory,
    EndTrace,
    EraseSession,
    Expect,
    ExportSession,
    FindTurn,
    Fork,
    GetSession,
    GetStats,
    GetTokens,
    ImportSession,
    ListSessions,
    ListTurns,
    Look,
    OpenSession,
    ParkSession,
    ReplaceHistory,
    Rewind,
    StartTurn,
    Trim,
)
from tenuto.base.wire.request import OfSession, Request
from tenuto.base.wire.trainer_messages import NameWeights, Pause, ReleaseMemory, Resume, UnloadAdapter
from tenuto.engine.engine import Engine
from tenuto.engine.erasure import Receipt
from tenuto.engine.thread import views
from tenuto.engine.thread.checks import ascending, check_pick, check_replacement, require_version
from tenuto.engine.thread.limits import Limited, TenantLimits
from tenuto.engine.thread.rendering import Basis, Outdated, Prepared, Renderer
from tenuto.session.records import SavedSession, TurnRecord
from tenuto.session.results import Once
from tenuto.session.session import Session
from tenuto.session.turn import Turn

T = TypeVar("T")

MAX_LISTED = 1000
"""The most sessions or turns on one page."""

Versioned = (
    StartTurn | Draft | Fork | Trim | Rewind | ReplaceHistory | CloseSession | EraseSession | Expect | ParkSession
)


class Dispatcher:
    """Executes commands in the engine's thread. A command either succeeds and is answered, or is rejected with a
    `TenutoError` and has changed nothing.

    The input of a command is `prepared` as tokens outside the engine's thread, against a `Basis`.
    """

    def __init__(
        self, engine: Engine, renderer: Renderer, shared: Callable[[], SharedTierView] = SharedTierView
    ) -> None:
        """`shared`: returns the use of the fleet's shared tier."""
        self._engine = engine
        self._renderer = renderer
        self._shared = shared
        self._limits = TenantLimits(engine.registry)

    def execute(self, command: Request[T], prepared: Prepared | None = None) -> T:
        """Executes a command and returns its answer. Raises the errors for which commands are rejected, and `Outdated`
        if the input was prepared against a basis that has changed."""
        leaving = self.check(command)
        answer: T = self._execute(command, prepared)
        self._engine.sessions.leave_device(leaving)
        return answer

    def check(self, command: Request[Any]) -> list[Session]:
        """Checks a command without its input; changes nothing. Returns the idle sessions that leave the device if the
        command is executed. Raises `NotFound`, `VersionMismatch` if the session has changed since the version that the
        command names, and `LimitReached` if the command would exceed a limit of the tenant."""
        if isinstance(command, Versioned) and command.session is not None:
            session = self._session(command.tenant, command.session)
            require_version(session, command.version)
            if isinstance(command, StartTurn):
                self._engine.adapters.check(session, command.adapter)
        return self._limits.check(command) if isinstance(command, Limited) else []

    def basis(self, command: StartTurn | Draft) -> Basis:
        """Returns the basis against which to prepare the command's input. Raises the errors of `check`."""
        self.check(command)
        return self._basis(command)

    def guess(self, command: StartTurn | Draft) -> Basis | None:
        """Returns the basis without any check; for any thread. The basis may be outdated or inconsistent, in which case
        `execute` raises `Outdated`. Returns `None` if the session cannot be read."""
        try:
            return self._basis(command)
        except (NotFound, Misdirected, LookupError):  # the session may change while it is read
            return None

    def _basis(self, command: StartTurn | Draft) -> Basis:
        if command.session is None:
            return Basis.opening(self._engine.config.context_length)
        return Basis.of(self._session(command.tenant, command.session))

    def _session(self, tenant: str, session: str) -> Session:
        return self._engine.registry.get(session, tenant)

    def _of(self, command: OfSession[Any]) -> Session:
        return self._session(command.tenant, command.session)

    def _info(self, session: Session) -> SessionInfo:
        return views.session_info(self._engine, session)

    @singledispatchmethod
    def _execute(self, command: Request[Any], _: Prepared | None) -> Any:
        raise InvalidRequest(f"{type(command).__name__} is not a known command")

    # -- sessions

    @_execute.register
    def _(self, command: OpenSession, _: None) -> SessionInfo:
        return self._info(self._engine.sessions.open(command.session, command.policy, command.system))

    @_execute.register
    def _(self, command: GetSession, _: None) -> SessionInfo:
        return self._info(self._of(command))

    @_execute.register
    def _(self, command: ExportSession, _: None) -> SessionDocument:
        return self._of(command).saved().document()

    @_execute.register
    def _(self, command: ImportSession, _: None) -> SessionInfo:
        saved = SavedSession.of(command.document, command.session, command.policy)
        return self._info(self._engine.sessions.restore(saved))

    @_execute.register
    def _(self, command: ListSessions, _: None) -> SessionPage:
        limit = whole("limit", command.limit, 1, MAX_LISTED)
        found = self._engine.registry.listed(command.tenant, command.after, command.state)
        first = list(islice(found, limit + 1))
        sessions = views.first_page(map(self._info, first), limit, views.PAGE_BYTES, views.bytes_of)
        return SessionPage(sessions=sessions, more=len(sessions) < len(first))

    @_execute.register
    def _(self, command: ListTurns, _: None) -> RecordPage:
        first, limit = whole("first", command.first, 1, MAX_COUNT), whole("limit", command.limit, 1, MAX_LISTED)
        session = self._of(command)
        page = views.records(session, first, limit)
        return RecordPage(records=page, more=first - 1 + len(page) < len(session.records))

    @_execute.register
    def _(self, command: GetTokens, _: None) -> PackedTokens:
        return views.tokens(self._engine, self._of(command))

    @_execute.register
    def _(self, command: Fork, _: None) -> SessionInfo:
        child = self._engine.sessions.fork(
            command.session,
            turn=command.turn,
            position=command.position,
            child=command.child,
            tenant=command.tenant,
            metadata=command.metadata,
            hidden=command.hidden,
        )
        return self._info(child)

    @_execute.register
    def _(self, command: Trim, _: None) -> SessionInfo:
        """Makes a session of chosen turns. The leading ones that keep their numbers are forked and share memory; the
        others are added as tokens, which are computed when needed."""
        session = self._of(command)
        numbers = ascending(command.turns, len(session.records))
        check_pick(session, numbers)
        shared = next((n for n, number in enumerate(numbers) if number != n + 1), len(numbers))
        child = self._engine.sessions.fork(command.session, turn=shared, child=command.child, tenant=command.tenant)
        try:
            self._copy(session, [session.records[number - 1] for number in numbers[shared:]], child)
        except BaseException:
            self._engine.sessions.close(child.id, tenant=command.tenant)
            raise
        return self._info(child)

    def _copy(self, origin: Session, records: Sequence[TurnRecord], target: Session) -> None:
        """Appends copies of turns of `origin` to `target`, or none of them if they do not fit."""
        moved = self._renderer.moved_inputs(origin, records, target)
        outputs = [origin.history[record.input_end : record.end] for record in records]
        length = len(target.history) + sum(map(len, moved)) + sum(map(len, outputs))
        if length > target.limit:
            raise ContextExceeded.of(length, target.limit, target.limit, exact=True)
        for record, given, output in zip(records, moved, outputs, strict=True):
            self._engine.sessions.adopt(
                target.id,
                given,
                output,
                record.conversation,
                cut=record.cut,
                made=record.made,
                tenant=target.policy.tenant,
            )

    @_execute.register
    def _(self, command: CopyTurns, _: None) -> SessionInfo:
        target, source = self._of(command), self._session(command.tenant, command.source)
        require_version(source, command.version)
        first = whole("a turn number", command.first, 1, len(source.records) + 1)
        target.require_idle("add a turn to")
        if not target.records:
            raise InvalidRequest(f"turn {first} cannot open a conversation; allowed: to follow other turns")
        check_replacement(source.conversation, target.conversation)
        self._copy(source, source.records[first - 1 :], target)
        return self._info(target)

    @_execute.register
    def _(self, command: ReplaceHistory, _: None) -> SessionInfo:
        session, source = self._of(command), self._session(command.tenant, command.source)
        check_replacement(session.conversation, source.conversation)
        self._limits.check_replacement(session, source, command.limits)
        return self._info(self._engine.sessions.replace(command.session, command.source, tenant=command.tenant))

    @_execute.register
    def _(self, command: Rewind, _: None) -> SessionInfo:
        session = self._engine.sessions.rewind(
            command.session, turn=command.turn, position=command.position, tenant=command.tenant
        )
        return self._info(session)

    @_execute.register
    def _(self, command: ParkSession, _: None) -> SessionInfo:
        return self._info(self._engine.sessions.park(command.session, tenant=command.tenant))

    @_execute.register
    def _(self, command: CloseSession, _: None) -> None:
        self._engine.sessions.close(command.session, finish=command.finish, tenant=command.tenant)

    @_execute.register
    def _(self, command: EraseSession, _: None) -> Receipt:
        return self._engine.erasure.erase(command.session, tenant=command.tenant)

    # -- turns

    @_execute.register
    def _(self, command: StartTurn, prepared: Prepared | None) -> Ticket:
        if command.kind == "regenerate":
            turn = self._regenerate(command, prepared)
        elif command.session is None:
            turn = self._only_turn(command, _given(prepared))
        else:
            turn = self._turn(command.session, command, _given(prepared))
        if command.resumable:
            again = msgspec.structs.replace(command, version=turn.session.version)
            self._engine.turns.record(turn, msgspec.msgpack.encode(again))
        ticket = views.ticket(turn, echo=command.echo)
        if turn.once is not None:
            turn.once.accepted(ticket)
        return ticket

    @_execute.register
    def _(self, command: FindTurn, _: None) -> FoundTurn:
        try:
            session = self._engine.registry.get(command.session, command.tenant)
        except NotFound:
            return FoundTurn()
        found = session.results.find(command.once) if command.once is not None else session.results.named(command.name)
        if found is not None:  # one that an earlier version has kept lacks the session's birth
            ticket = msgspec.structs.replace(found.ticket, birth=session.birth)
            found = msgspec.structs.replace(found, ticket=ticket)
        return FoundTurn(turn=found, birth=session.birth)

    def _regenerate(self, command: StartTurn, prepared: Prepared | None) -> Turn:
        if command.session is None:
            raise InvalidRequest("regenerate has no session; name the session whose last turn is to be regenerated")
        session = self._session(command.tenant, command.session)
        params = self._with_stops(command.params, session.conversation)
        constraint = prepared.constraint if prepared is not None else None
        return self._engine.turns.regenerate(
            command.session,
            params,
            constraint,
            tenant=command.tenant,
            once=_once(command),
            prediction=prepared.prediction if prepared is not None else None,
        )

    def _only_turn(self, command: StartTurn, prepared: Prepared) -> Turn:
        policy = Policy(tenant=command.tenant, ephemeral=True, adapter=SessionAdapter.named(command.adapter))
        session = self._engine.sessions.open(None, policy)
        try:
            return self._turn(session.id, command, prepared)
        except BaseException:
            self._engine.sessions.close(session.id, tenant=command.tenant)
            raise

    def _turn(self, session_id: str, command: StartTurn, prepared: Prepared) -> Turn:
        self._require_current(self._session(command.tenant, session_id), prepared)
        params = command.params if command.kind == "turn" else command.params.input_alone
        params = self._with_stops(params, prepared.conversation)
        return self._engine.turns.submit(
            session_id,
            prepared.tokens,
            params,
            prepared.conversation,
            prepared.constraint,
            tenant=command.tenant,
            once=_once(command),
            prediction=prepared.prediction,
        )

    @_execute.register
    def _(self, command: Draft, prepared: Prepared | None) -> SessionInfo:
        given = _given(prepared)
        self._require_current(self._of(command), given)
        return self._info(self._engine.turns.draft(command.session, given.tokens, tenant=command.tenant).session)

    @_execute.register
    def _(self, command: Expect, _: None) -> SessionInfo:
        return self._info(
            self._engine.sessions.expect(command.session, command.within, calls=command.calls, tenant=command.tenant)
        )

    @_execute.register
    def _(self, command: AbortTurn, _: None) -> bool:
        turn = self._of(command).turn
        if command.turn is not None and (turn is None or turn.number != command.turn):
            return False
        self._engine.turns.abort(command.session, command.keep, tenant=command.tenant)
        return True

    @staticmethod
    def _require_current(session: Session, prepared: Prepared) -> None:
        if Basis.of(session) != prepared.basis:
            raise Outdated

    def _with_stops(self, params: TurnParams, conversation: Conversation | None) -> TurnParams:
        """Adds the conversation's end-of-turn tokens to the stop ids, and leaves out those that the model does not
        have."""
        stop_ids = tuple(token for token in params.stop_ids if token < self._engine.vocab_size)
        if not params.ignore_eos:
            stop_ids += self._renderer.stop_ids(conversation)
        return params if stop_ids == params.stop_ids else replace(params, stop_ids=stop_ids)

    # -- the engine as a whole

    @_execute.register
    def _(self, command: UnloadAdapter, _: None) -> AdapterView:
        return self._engine.adapters.unload(command.name)

    @_execute.register
    def _(self, _command: DropMemory, _: None) -> int:
        return self._engine.sessions.drop()

    @_execute.register
    def _(self, command: Pause, _: None) -> None:
        self._engine.occupation.pause(release=command.release)

    @_execute.register
    def _(self, _command: Resume, _: None) -> None:
        self._engine.occupation.resume()

    @_execute.register
    def _(self, command: ReleaseMemory, _: None) -> None:
        self._engine.occupation.release(command.parts)

    @_execute.register
    def _(self, command: NameWeights, _: None) -> None:
        self._engine.occupation.name_weights(command.version, abort=command.abort)

    @_execute.register
    def _(self, _command: GetStats, _: None) -> Stats:
        return views.stats(self._engine, self._shared())

    @_execute.register
    def _(self, command: Look, _: None) -> MapPart:
        return self._engine.look(fresh=command.fresh, again=command.again, end=command.end)

    @_execute.register
    def _(self, _command: BeginTrace, _: None) -> None:
        self._engine.begin_trace()

    @_execute.register
    def _(self, _command: EndTrace, _: None) -> TraceView:
        return self._engine.end_trace()


def _once(command: StartTurn) -> Once | None:
    if command.once is None:
        return None
    return Once(*command.once, command.name, command.reading, command.about)


def _given(prepared: Prepared | None) -> Prepared:
    if prepared is None:
        raise InvariantError("a command's input was not prepared")
    return prepared
