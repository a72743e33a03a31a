"""The service: answers the edge's messages with an engine."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from tenuto.base.config import EngineConfig, user_path
from tenuto.base.errors import NotFound, TenutoError
from tenuto.base.heap import give_back
from tenuto.base.options import TurnParams
from tenuto.base.turns import Delta
from tenuto.base.views import (
    FoundTurn,
    KeptTurn,
    RecordPage,
    SessionInfo,
    SharedTierView,
    Ticket,
)
from tenuto.base.wire.document import SessionDocument
from tenuto.base.wire.messages import (
    AbortTurn,
    Audit,
    BeginTrace,
    Describe,
    DescribeTokenizer,
    Detokenize,
    Draft,
    DropMemory,
    EndTrace,
    ExportSession,
    GetStats,
    ImportSession,
    Look,
    OpenSession,
    StartTurn,
    Tokenize,
    TokenTexts,
    Withdraw,
)
from tenuto.base.wire.replies import AnyReply, Stopped
from tenuto.base.wire.request import Request
from tenuto.base.wire.trainer_messages import Pause, Resume, UnloadAdapter
from tenuto.engine.engine import Engine
from tenuto.engine.erasure import Receipt
from tenuto.engine.thread.acknowledge import Acknowledger
from tenuto.engine.thread.dispatcher import Dispatcher
from tenuto.engine.thread.journaling import JournalWriter
from tenuto.engine.thread.loop import EngineLoop
from tenuto.engine.thread.rendering import Renderer
from tenuto.runtime.folders import Folders, LeftFolders
from tenuto.runtime.intake import Input, Intake
from tenuto.runtime.lanes import Lanes
from tenuto.runtime.loaded_model import LoadedModel
from tenuto.runtime.member import Member, OfFleet
from tenuto.runtime.models import Model, build_engine, describe
from tenuto.runtime.moves import Moves, OfMoves
from tenuto.runtime.object_store import ObjectStore
from tenuto.runtime.outbox import Outbox
from tenuto.runtime.preparation import Preparer, size_of
from tenuto.runtime.restoring import restore
from tenuto.runtime.session_files import SessionFiles
from tenuto.runtime.shared_objects import OfObjects
from tenuto.runtime.shared_tier import SharedTier
from tenuto.runtime.texts import Texts
from tenuto.runtime.trainers import OfTrainers, Trainers
from tenuto.session.journal import Journal
from tenuto.text.constraint import Constraint
from tenuto.text.masks import MaskThreads
from tenuto.text.patterns import stop_patterns

log = logging.getLogger("tenuto.runtime")

T = TypeVar("T")

NO_ADAPTERS: Mapping[str, str] = MappingProxyType({})


OfEngine = GetStats | DropMemory | Pause | Resume | UnloadAdapter | Look | BeginTrace | EndTrace
"""Commands whose answers need not wait for the journal."""


class Service:
    """An engine that is controlled by messages. Only one thread at a time may call `handle`; one of the service's
    threads calls `send`, which may block. Requests for a session are executed in order, except that later requests may
    overtake a turn or draft whose input is still being converted to tokens.

    The dispatcher executes requests in the engine's thread. The service does the rest in other threads: it converts
    input to tokens first, and adds texts to answers last.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        memory_bytes: int | None,
        send: Callable[[AnyReply], None],
        acknowledger: Acknowledger | None = None,
        journal: Journal | None = None,
        member: Member | None = None,
        adapters: Mapping[str, str] = NO_ADAPTERS,
        store: ObjectStore | None = None,
    ) -> None:
        """`adapters`: the directories of adapters, by their names. With a `journal`, its sessions are restored, and
        later changes are written to it before they are acknowledged. With a `member`, this is a replica of a
        fleet: it takes sessions over when they are needed, and writes changes to the fleet's journal. `store`: of the
        fleet's shared tier. Raises `ConfigError`."""
        self._executor = model.executor
        self._config = config
        self._masks = MaskThreads()
        with ExitStack() as undo:  # releases files on failure, so that a retry can open them
            undo.callback(self._masks.close)
            if member is not None:
                undo.callback(member.close)
                undo.callback(member.journal.close)
            if journal is not None:
                undo.callback(journal.close)
            kept, places, self._shared = _saved_places(member, config, store)
            if member is None and journal is None:  # nobody finds the state
                kept = replace(kept, checkpoint_rate=0)
            mirror = self._shared.mirror if self._shared is not None else None
            self._engine = engine = build_engine(model, kept, memory_bytes, self._masks, mirror)
            undo.callback(partial(engine.end, keep=True))
            for name, path in adapters.items():
                engine.adapters.load(name, path, model.executor.read_adapter(path))
                log.info("adapter loaded", extra={"adapter": name, "path": path})
            if journal is not None:
                restore(journal, engine)
            engine.sessions.recover()
            undo.pop_all()
        self._log_snapshot("memory of sessions found")
        written = journal or (member.journal if member is not None else None)
        self._writer = JournalWriter(written) if written is not None else None
        self._member, self._outlived = member, journal is not None or member is not None
        self._describe = describe(model, engine)
        self._renderer = Renderer(model.chat, model.tokenizer)
        self._texts = Texts(model.tokenizer)
        shared = self._shared.view if self._shared is not None else SharedTierView
        self._dispatcher = Dispatcher(engine, self._renderer, shared)
        self._outbox = Outbox(send, self._texts)
        self._lanes = Lanes()
        self._updates: list[tuple[int, Delta]] = []  # since the last flush; only for the engine's thread
        self._loop = EngineLoop(engine, self._stopped, self._flush, self._writer or acknowledger)
        if self._writer is not None:
            self._writer.start(self._loop.wake)
        if member is not None:
            member.start(engine, self._loop, places)
        if mirror is not None:
            mirror.start(time.monotonic)
        self._loaded = LoadedModel(model, config, self._loop, self._dispatcher)
        self._trainers = Trainers(self._loaded, self._lanes, self._answer_with, self._move_memory)
        self._session_files = SessionFiles(self._loaded, self._loop, self._dispatcher, engine.states)
        self._preparer = Preparer(self._renderer, model.tokenizer, model.grammars(), config.context_length)
        self._intake = Intake(self._dispatcher, self._preparer, self._loop, self._lanes)
        self._moves = (
            Moves(member.ownership, self._loop, self._identity, self._constraint, engine.turns.ready)
            if member is not None
            else None
        )

    def close(self) -> None:
        """Stops after the step in progress; open turns end with `EngineStopped`."""
        self._loop.close()
        if self._writer is not None:
            self._writer.close()
        if self._moves is not None:
            self._moves.close()
        if self._member is not None:
            self._member.close()
        self._trainers.close()
        self._lanes.close()
        self._loaded.close()
        self._outbox.close()

    def handle(self, request: Request[Any]) -> None:
        """Answers a request, now or later."""
        try:
            self._handle(request)
        except TenutoError as error:
            self._outbox.refuse(request.call, error)
        except Exception as error:  # a bug of ours, which must fail only this request
            log.exception("a request failed")
            self._outbox.refuse(request.call, error)

    def _handle(self, request: Request[Any]) -> None:
        match request:
            case Describe():
                self._outbox.answer(request, self._describe)
            case Audit():
                self._loop.audit().add_done_callback(partial(self._reply, request))
            case _ if isinstance(request, OfEngine):
                self._ask(request)
            case _ if isinstance(request, OfFleet | OfMoves | OfObjects):
                self._of_fleet(request)
            case _ if isinstance(request, OfTrainers):
                self._trainers.take(request)
            case DescribeTokenizer() | Detokenize() | TokenTexts() | Tokenize():
                self._convert(request)
            case StartTurn() | Draft() | Withdraw():
                self._take_in(request)
            case OpenSession():
                self._renderer.check_system(request.system, self._config.context_length)
                self._execute(request, lambda _: self._dispatcher.execute(request))
            case ExportSession() | ImportSession():
                self._move(request)
            case _:
                self._execute(request, lambda _: self._dispatcher.execute(request))

    def _of_fleet(self, request: OfFleet | OfMoves | OfObjects) -> None:
        if self._member is None or self._moves is None:
            raise NotFound("this server is not a replica of a fleet; see --fleet")
        answer, refuse = partial(self._outbox.answer, request), partial(self._outbox.refuse, request.call)
        if isinstance(request, OfFleet):
            self._member.take(request, answer, refuse)
            return
        if isinstance(request, OfObjects):
            self._member.objects.take(request, answer, refuse)
            return
        self._outbox.announce(request.call)  # output of a turn that continues here comes after the answer
        self._moves.take(request, answer, refuse, partial(self.publish, request.call))

    def _identity(self) -> str:
        return self._loaded.model.state_fingerprint()

    def _constraint(self, params: TurnParams) -> Constraint | None:
        stop_patterns(params.stop_regex)  # compiles them before the engine's thread needs them
        return self._preparer.constraint(params)

    def _convert(self, request: DescribeTokenizer | Detokenize | TokenTexts | Tokenize) -> None:
        """Answers with the text of tokens, the tokens of a text, or the tokenizer itself."""
        match request:
            case DescribeTokenizer():
                self._outbox.answer(request, self._texts.describe())
            case Detokenize(tokens=tokens):
                self._later(request, len(tokens), lambda: self._texts.of(tokens, special=request.special))
            case TokenTexts(tokens=tokens):
                text_of = self._texts.entry if request.entries else lambda token: self._texts.of([token])
                self._later(request, len(tokens), lambda: list(map(text_of, tokens)))
            case Tokenize():
                self._later(request, size_of(request.input), lambda: self._preparer.tokens(request).tobytes())

    def _move(self, request: ExportSession | ImportSession) -> None:
        """Exports or imports a session, with its state in a file if the request names one."""
        if isinstance(request, ImportSession):
            request.document.check(self._loaded.fingerprint)
            self._renderer.check_system(request.document.system, self._config.context_length)
        if request.state is None:
            self._execute(request, lambda _: self._dispatcher.execute(request))
            return
        work = (
            partial(self._import, request, Path(request.state))
            if isinstance(request, ImportSession)
            else partial(self._answer_with, request, partial(self._session_files.export, request, Path(request.state)))
        )
        self._lanes.files.put(0, work, request.tenant)

    def _import(self, request: ImportSession, path: Path) -> None:
        """Checks a file with a session and its state, then opens the session with it. Runs in the lane for files."""
        try:
            file = self._session_files.checked(request, path)
        except Exception as error:  # noqa: BLE001 - every error is a refusal
            self._outbox.refuse(request.call, error)
        else:
            self._execute(request, lambda engine: self._session_files.open(engine, request, file))

    def _answer_with(self, request: Request[T], work: Callable[[], T]) -> None:
        """Answers with the result of `work`, or refuses with its error."""
        try:
            value = work()
        except Exception as error:  # noqa: BLE001 - every error is answered
            self._outbox.refuse(request.call, error)
        else:
            self._outbox.answer(request, value)

    def _ask(self, request: Request[T]) -> None:
        """Executes a command without effect on sessions, which does not show their state. So its answer need not wait
        for the journal."""
        self._loop.call(lambda _: self._dispatcher.execute(request)).add_done_callback(partial(self._reply, request))

    def _move_memory(self, request: Request[T], work: Callable[[], T]) -> None:
        """Answers with the result of `work`, which releases, allocates or replaces the model's memory. Runs in the lane
        for files, so that no session is exported meanwhile."""
        self._answer_with(request, work)
        gc.collect()
        give_back()

    def _execute(self, request: Request[T], work: Callable[[Engine], T]) -> None:
        """Executes a command that changes sessions or shows their state, and answers once all changes so far are
        durable."""

        def reply(done: Future[T]) -> None:
            self._flush()  # sends earlier output before the answer
            self._reply(request, done)

        self._loop.execute(work, reply, ends=isinstance(request, AbortTurn))

    def _take_in(self, request: StartTurn | Draft | Withdraw) -> None:
        """Prepares a turn's input, or withdraws a turn whose input is not prepared yet."""
        if isinstance(request, Withdraw):
            self._outbox.answer(request, self._intake.withdraw(request.name))
            return
        self._intake.put(
            Input(
                command=request,
                subscriber=partial(self.publish, request.call) if isinstance(request, StartTurn) else None,
                answer=partial(self._answer_in_order, request),
                refuse=partial(self._outbox.refuse, request.call),
            )
        )

    def _answer_in_order(self, request: StartTurn | Draft, value: Ticket | SessionInfo) -> None:
        self._flush()
        self._answer(request, value)

    # -- answers

    def _reply(self, request: Request[T], done: Future[T]) -> None:
        if (error := done.exception()) is not None:
            self._outbox.refuse(request.call, error)
        else:
            self._answer(request, done.result())

    def _answer(self, request: Request[Any], value: Any) -> None:
        """Answers with a command's result, after adding texts or a document's checksum to it in another thread."""
        match value:
            case Ticket(prompt=[_, *_] as tokens):
                self._later(request, len(tokens), lambda: self._texts.of_ticket(value))
            case RecordPage(records=[first, *_] as records):
                last = records[-1]
                size = last.start + len(last.input_tokens) + len(last.output_tokens) - first.start
                self._later(request, size, lambda: self._texts.of_page(value))
            case FoundTurn(turn=KeptTurn() as turn, birth=birth):
                size = len(turn.output.tokens)
                self._later(request, size, lambda: FoundTurn(turn=self._texts.of_kept(turn), birth=birth))
            case Receipt():
                self._outbox.answer(request, value.view())
            case SessionDocument():
                self._later(request, value.tokens, lambda: value.signed(self._loaded.fingerprint))
            case _:
                self._outbox.answer(request, value)

    def _later(self, request: Request[T], size: int, work: Callable[[], T]) -> None:
        """Runs `work`, on `size` characters or tokens, in a lane and answers with its result. Other answers do not
        wait."""
        self._outbox.announce(request.call)
        self._lanes.of(size).put(size, partial(self._answer_with, request, work), getattr(request, "tenant", ""))

    def publish(self, call: int, news: Delta | TenutoError) -> None:
        """Sends a turn's output, or the error that ended it, as updates of the call that started it. Output is
        collected until `_flush`. Runs in the engine's thread."""
        if isinstance(news, Delta):
            self._updates.append((call, news))
        else:
            self._flush()
            self._outbox.refuse(call, news)

    def _flush(self) -> None:
        if self._updates:
            self._outbox.update(self._updates)
            self._updates = []

    def _stopped(self, stopped: Stopped) -> None:
        self._flush()
        self._release_engine()
        self._executor.close()
        self._masks.close()
        self._outbox.stopped(stopped)

    def _release_engine(self) -> None:
        """Releases the stopped engine's memory. If a journal or a fleet keeps its sessions, saves their state in the
        disk tier first, if there is one."""
        if self._outlived and self._engine.fuse.broken is None:
            try:
                self._engine.sessions.save()
                self._log_snapshot("memory of sessions saved")
            except Exception:
                log.exception("the memory of sessions could not be saved; it will be computed again")
        self._engine.end(keep=self._outlived)
        if self._shared is not None:
            self._shared.mirror.close(time.monotonic, self._config.snapshot_seconds)

    def _log_snapshot(self, event: str) -> None:
        counts = self._engine.snapshots.counts
        if any(counts.values()):
            log.info(event, extra={"outcomes": dict(counts)})


def _saved_places(
    member: Member | None, config: EngineConfig, store: ObjectStore | None
) -> tuple[EngineConfig, list[LeftFolders], SharedTier | None]:
    """Returns the engine's configuration, the places where the fleet's replicas leave state, and the shared tier, one
    of these places, if there is a store."""
    if member is None or not config.disk_tier:
        return config, [], None
    folders = Folders(user_path(config.disk_tier), member.secret, member.number)
    kept = replace(config, disk_tier=str(folders.own))
    if store is None:
        return kept, [folders], None
    shared = SharedTier(store, member.secret, member.number, folders.own)
    return kept, [folders, shared], shared
