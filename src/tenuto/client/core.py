"""The operations of both clients, synchronous and asynchronous, as requests to a transport."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import closing
from os import PathLike
from pathlib import Path
from typing import cast

import msgspec

from tenuto.base.checks import MAX_COUNT, flag, items, seconds, shown, whole, wrong
from tenuto.base.errors import InvalidRequest, TenutoError
from tenuto.base.options import TOOL_OPTIONS, Policy, TurnOptions, turn_params
from tenuto.base.plan import PARTS, MemoryPart
from tenuto.base.sampling import MAX_TOKEN_ID
from tenuto.base.tokens import SessionTokens
from tenuto.base.tools.answer_part import AnswerPart
from tenuto.base.tools.answers import AnswerReader
from tenuto.base.tools.definitions import NO_TOOLS
from tenuto.base.tools.tool_use import ToolUse
from tenuto.base.turns import Delta, Input, Keep, Transcript, TurnKind, TurnResult, turn_input
from tenuto.base.views import AuditReport, Compacted, Erased, RecordPage, SessionInfo, SessionPage
from tenuto.base.wire import messages
from tenuto.base.wire.document import read_document
from tenuto.base.wire.request import Request
from tenuto.base.wire.state_file import StateFile
from tenuto.base.wire.trainer_messages import (
    MAX_WEIGHT_VERSION,
    NewWeights,
    Pause,
    ReleaseMemory,
    Resume,
    ResumeMemory,
    UpdateWeights,
)
from tenuto.client.futures import Steps, chained, mapped
from tenuto.client.transport import Deliver, Options, RunningTurn, Transport

PAGE = 1000
"""Maximum number of sessions or turns listed by one request."""


class TurnReader(Transcript):
    """Collects the output of a running turn. The caller waits for events and passes them in. `said`: the answer read so
    far, parsed if the turn was given tools. `latest`: the part that the last event added."""

    def __init__(self, running: RunningTurn) -> None:
        super().__init__()
        self.running = running
        self.said, self.latest = AnswerPart(), AnswerPart()
        self._answer: AnswerReader | None = None

    def take(self, news: Delta | TenutoError) -> Delta:
        """See `Transcript.take`."""
        passed = super().take(news)
        if self._answer is None and self.running.reading is not None:
            self._answer = self.running.reading.reader(self.running.turn_id or "")
        ended, answer = passed.result is not None, self._answer
        self.latest = answer.read(passed.text, ended=ended) if answer is not None else AnswerPart(passed.text)
        self.said.add(self.latest)
        if passed.result is not None and passed.result.committed and self.said.calls:
            self.running.called(passed.result.version, [call.name for call in self.said.calls])
        return passed

    def abort(self, keep: Keep) -> Future[TurnResult]:
        """Ends the turn; see `TurnStream.abort`. Raises `InvalidRequest`."""
        kept = self.tokens_to_keep(keep)
        if self.result is not None:
            return self.running.ended
        self.begin_abort()
        return self.running.abort(kept)


class EngineCore:
    """An engine behind `transport`. Methods may be called from any thread."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def open(self, session_id: str | None, system: str | None, policy: Policy) -> Future[SessionCore]:
        return self.session(messages.OpenSession(session=session_id, system=system, policy=policy))

    def attach(self, session_id: str) -> Future[SessionCore]:
        if not isinstance(session_id, str):
            raise InvalidRequest(f"a session's id is {shown(session_id)}; allowed: text")
        return self.session(messages.GetSession(tenant="", session=session_id))

    def import_session(self, exported: bytes | str, session_id: str | None) -> Future[SessionCore]:
        document = read_document(exported)
        name = session_id if session_id is not None else document.id
        return self.session(messages.ImportSession(session=name, policy=document.policy(), document=document))

    def import_file(self, path: str | PathLike[str], session_id: str | None) -> Future[SessionCore]:
        source = Path(path).absolute()
        with closing(StateFile(source)) as file:
            document = file.document
        name = session_id if session_id is not None else document.id
        return self.session(
            messages.ImportSession(session=name, policy=document.policy(), document=document, state=str(source))
        )

    def session(self, request: Request[SessionInfo]) -> Future[SessionCore]:
        """Sends `request` and returns the session that the answer describes."""
        return mapped(self.transport.call(request), lambda info: SessionCore(self, info.session_id))

    def start(
        self, session: str | None, kind: TurnKind, given: Input, options: Options, deliver: Deliver
    ) -> TurnReader:
        """Starts a turn on a session, or on a new ephemeral one if `session` is `None`."""
        parsed = turn_input(given)
        if session is None and not parsed:
            raise InvalidRequest("the input is empty, and there is nothing to continue")
        others = self.transport.options.union(TOOL_OPTIONS)
        own = {name: value for name, value in options.items() if name not in others}
        params, use = turn_params(cast("TurnOptions", own)), ToolUse.among(options)
        told = use.definitions if use is not None else NO_TOOLS
        request = messages.StartTurn(kind=kind, tenant="", session=session, input=parsed, params=params, tools=told)
        return TurnReader(self.transport.start(request, options, use, deliver))

    def context_length(self) -> Future[int]:
        return mapped(self.transport.call(messages.Describe()), lambda model: int(model.context_length))

    def detokenize(self, token_ids: Iterable[int]) -> Future[str]:
        given = items("token_ids", token_ids, "token ids")
        tokens = [whole("a token id", token, 0, MAX_TOKEN_ID) for token in given]
        return self.transport.call(messages.Detokenize(tokens=tokens))

    def audit(self) -> Future[AuditReport]:
        return self.transport.call(messages.Audit())

    def pause(self, *, retract: bool) -> Future[None]:
        return self.transport.call(Pause(release=flag("retract", retract)))

    def go_on(self) -> Future[None]:
        return self.transport.call(Resume())

    def release_memory(self, tags: Sequence[str] | None) -> Future[None]:
        return self.transport.call(ReleaseMemory(parts=_parts(tags)))

    def resume_memory(self, tags: Sequence[str] | None) -> Future[None]:
        return self.transport.call(ResumeMemory(parts=_parts(tags)))

    def update_weights(
        self, path: str | PathLike[str], version: str | None, *, abort: bool, keep_state: bool
    ) -> Future[str]:
        given: object = version
        if given is not None and not (isinstance(given, str) and 0 < len(given) <= MAX_WEIGHT_VERSION):
            raise wrong("weight_version", version, f"1 to {MAX_WEIGHT_VERSION} characters", param="weight_version")
        use = NewWeights(version=version, abort=flag("abort", abort), keep_state=flag("keep_state", keep_state))
        updated = self.transport.call(UpdateWeights(path=str(path), use=use))
        return mapped(updated, lambda weights: weights.weight_version)

    def sessions(self) -> Future[list[SessionInfo]]:
        def steps() -> Steps[list[SessionInfo]]:
            found: list[SessionInfo] = []
            more = True
            while more:
                after = found[-1].session_id if found else ""
                page: SessionPage = yield self.transport.call(messages.ListSessions(tenant="", after=after, limit=PAGE))
                found += page.sessions
                more = page.more
            return found

        return chained(steps())


class SessionCore:
    """One session's operations."""

    def __init__(self, engine: EngineCore, session_id: str) -> None:
        self.engine = engine
        self.id = session_id
        self._call = engine.transport.call

    def start(self, kind: TurnKind, given: Input, options: Options, deliver: Deliver) -> TurnReader:
        return self.engine.start(self.id, kind, given, options, deliver)

    def draft(self, given: Input) -> Future[SessionInfo]:
        return self._call(messages.Draft(tenant="", session=self.id, input=turn_input(given)))

    def abort(self) -> Future[bool]:
        return self._call(messages.AbortTurn(tenant="", session=self.id))

    def fork(self, turn: int | None, position: int | None, child: str | None) -> Future[SessionCore]:
        turn, position = _count("turn", turn), _count("position", position)
        return self.engine.session(messages.Fork(tenant="", session=self.id, child=child, turn=turn, position=position))

    def trim(self, turns: Sequence[int], child: str | None) -> Future[SessionCore]:
        numbers = [whole("a turn's number", turn, 0, MAX_COUNT) for turn in items("turns", turns, "numbers of turns")]
        return self.engine.session(messages.Trim(tenant="", session=self.id, child=child, turns=numbers))

    def rewind(self, turn: int | None, position: int | None) -> Future[SessionInfo]:
        turn, position = _count("turn", turn), _count("position", position)
        return self._call(messages.Rewind(tenant="", session=self.id, turn=turn, position=position))

    def expect(self, within: float | None) -> Future[SessionInfo]:
        return self._call(messages.Expect(tenant="", session=self.id, within=seconds("within", within)))

    def info(self) -> Future[SessionInfo]:
        return self._call(messages.GetSession(tenant="", session=self.id))

    def history(self) -> Future[list[int]]:
        return chained(self._history())

    def _history(self) -> Steps[list[int]]:
        """Returns the committed tokens at one moment, even if listing them takes several requests."""
        page: RecordPage = yield self._turns_from(1)
        while page.more:
            before: SessionInfo = yield self.info()
            pages: list[RecordPage] = [(yield self._turns_from(1))]
            while pages[-1].more:
                pages.append((yield self._turns_from(pages[-1].records[-1].number + 1)))
            after: SessionInfo = yield self.info()
            if after.version == before.version:
                return _tokens(pages)
        return _tokens([page])

    def _turns_from(self, first: int) -> Future[RecordPage]:
        return self._call(messages.ListTurns(tenant="", session=self.id, first=first, limit=PAGE))

    def tokens(self) -> Future[SessionTokens]:
        return mapped(self._call(messages.GetTokens(tenant="", session=self.id)), SessionTokens.of)

    def export(self) -> Future[bytes]:
        return mapped(self._call(messages.ExportSession(tenant="", session=self.id)), msgspec.json.encode)

    def export_file(self, path: str | PathLike[str]) -> Future[None]:
        export = messages.ExportSession(tenant="", session=self.id, state=str(Path(path).absolute()))
        return mapped(self._call(export), lambda _: None)

    def compact(self, first: int, last: int | None, options: Options) -> Future[Compacted]:
        return self.engine.transport.compact(self.id, first, last, options)

    def erase(self) -> Future[Erased]:
        return self._call(messages.EraseSession(tenant="", session=self.id))

    def close(self, *, finish: bool) -> Future[None]:
        return self._call(messages.CloseSession(tenant="", session=self.id, finish=finish))


def _parts(tags: Sequence[str] | None) -> list[MemoryPart]:
    """Checks the tags of parts of memory; the default is all. Raises `InvalidRequest`."""
    chosen = PARTS if tags is None else items("tags", tags, "a list of parts of memory")
    for tag in chosen:
        if tag not in PARTS:
            raise InvalidRequest(f"tags has {shown(tag)}; allowed: {', '.join(PARTS)}", param="tags")
    if not chosen:
        raise InvalidRequest("tags are empty; allowed: at least one", param="tags")
    return list(dict.fromkeys(chosen))


def _count(name: str, value: int | None) -> int | None:
    return None if value is None else whole(name, value, 0, MAX_COUNT)


def _tokens(pages: list[RecordPage]) -> list[int]:
    return [token for page in pages for turn in page.records for token in (*turn.input_tokens, *turn.output_tokens)]
