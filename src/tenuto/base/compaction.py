"""Compaction of sessions: a summary takes the place of some turns. The new history is made and computed on a hidden
fork; then the session takes it over at once, with its state. A driver sends the requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from tenuto.base.config import Limits
from tenuto.base.errors import InvalidRequest, SessionBusy, VersionMismatch
from tenuto.base.options import MAX_PRIORITY, TurnParams
from tenuto.base.tools.answers import Reading
from tenuto.base.tools.definitions import NO_TOOLS, Tools
from tenuto.base.turns import Message, TurnInput, TurnResult
from tenuto.base.views import Compacted, SessionInfo, hidden_session_id
from tenuto.base.wire.messages import CloseSession, CopyTurns, Fork, GetSession, ReplaceHistory, StartTurn
from tenuto.base.wire.request import Request

SUMMARY_TOKENS = 2048
"""Maximum number of tokens of a summary, unless the request says otherwise."""
ASKED = (
    "Summarize this conversation, so that it can go on from the summary alone. Keep every fact, decision, name, number"
    " and open task that may be needed. Write only the summary."
)
"""The message that asks the model for a summary."""
ATTEMPTS = 8
"""Maximum number of times that turns committed meanwhile are added to a new history."""


@dataclass(frozen=True, slots=True)
class Span:
    """The turns to replace, by their numbers; `last` `None`: all from `first` on. `version`: the version that the
    session must have; `None`: turns may be added meanwhile."""

    first: int
    last: int | None
    version: int | None

    def end(self, state: SessionInfo) -> int:
        """Returns the number of the last turn to replace. Raises `InvalidRequest`, or `VersionMismatch`."""
        if self.version is not None and state.version != self.version:
            raise VersionMismatch(f"session {state.session_id} has version {state.version}, not {self.version}")
        last = state.turns if self.last is None else self.last
        if not self.first <= last <= state.turns:
            raise InvalidRequest(
                f"turns {self.first} to {last} of session {state.session_id} are to be replaced; allowed: at least one "
                f"of its {state.turns} turns",
                param="last" if self.first <= state.turns else "first",
            )
        return last


class Ended(NamedTuple):
    """A turn that has committed: its result, its text and its name."""

    result: TurnResult
    text: str
    name: str


class Idle(NamedTuple):
    """Asks the driver to wait until the compacted session has no open turn, or for a moment."""


Steps = Generator[Request[Any] | Idle, Any, Any]
"""Yields requests and receives their answers, or an `Ended` for a `StartTurn`. Errors are raised in it."""


class Compaction:
    """One compaction of a session. Its sessions, `hidden`, are not listed and not journaled, so that nothing is left of
    a compaction that is interrupted; the driver closes them at the end. Of the tenant's limits, only that of units
    refuses them, since a compaction helps to keep the others. Those hold for the new history."""

    def __init__(self, tenant: str, session: str, span: Span, limits: Limits) -> None:
        """`limits`: those of the tenant."""
        self.hidden: list[str] = []
        self._tenant = tenant
        self.session = session
        self._span = span
        self._priority: int | None = None
        self._limits = limits
        self._limits_of_hidden = Limits(units=limits.units)
        self._spent: Counter[str] = Counter()

    def run(self, summary: TurnInput | None, asking: StartTurn, reading: Reading) -> Steps:
        """Replaces the turns by one with the input `summary`, or if it is `None`, by the answer to `asking`, which is
        parsed by `reading`. Its turns have the priority of `asking`, or else one below that of the session. Returns a
        `Compacted`. Raises the engine's refusals, `InvalidRequest`, and `VersionMismatch` if the session has been
        changed meanwhile other than by new turns. The compaction has then changed nothing."""
        text, self._priority = None, asking.params.priority
        state, last, whole = yield from self._begin()
        if summary is None:
            text = yield from self._ask(whole, asking, state, reading)
            summary = [*asking.input, Message("assistant", text)]
        session = yield from self._fork(whole, self._span.first - 1)
        yield CloseSession(tenant=self._tenant, session=whole)
        yield from self._append(session, summary, state, asking.tools)
        state = yield from self._take_over(session, state, last)
        return Compacted(state, text, self._spent["computed"], self._spent["generated"])

    def _state(self) -> GetSession:
        return GetSession(tenant=self._tenant, session=self.session)

    def _begin(self) -> Steps:
        """Forks the session up to the last turn to replace. Returns its state, that turn's number and the fork."""
        for attempt in range(1, ATTEMPTS + 1):
            state: SessionInfo = yield self._state()
            last = self._span.end(state)
            try:
                return state, last, (yield from self._fork(self.session, last, state.version))
            except VersionMismatch:  # a turn was committed just now
                if attempt == ATTEMPTS or self._span.version is not None:
                    raise
        raise AssertionError  # the last attempt returns or raises

    def _fork(self, session: str, turn: int, version: int | None = None) -> Steps:
        child = hidden_session_id()
        self.hidden.append(child)
        fork = Fork(
            tenant=self._tenant,
            session=session,
            child=child,
            turn=turn,
            hidden=True,
            version=version,
            limits=self._limits_of_hidden,
        )
        forked: SessionInfo = yield fork
        return forked.session_id

    def _ask(self, session: str, asking: StartTurn, state: SessionInfo, reading: Reading) -> Steps:
        """Lets the model write the summary, and returns it."""
        params = replace(asking.params, priority=self._priority_for(state))
        ended: Ended = yield msgspec.structs.replace(
            asking, session=session, params=params, limits=self._limits_of_hidden
        )
        self._count(ended)
        text = reading.reader(ended.name).read(ended.text, ended=True).text.strip()
        if not text:
            raise InvalidRequest("the model wrote no summary; give one, or other instructions")
        return text

    def _append(self, session: str, given: TurnInput, state: SessionInfo, tools: Tools) -> Steps:
        """Appends input to a hidden session, and computes all of its history."""
        ended: Ended = yield StartTurn(
            kind="append",
            tenant=self._tenant,
            session=session,
            input=given,
            params=TurnParams(priority=self._priority_for(state)),
            tools=tools,
            limits=self._limits_of_hidden,
        )
        self._count(ended)

    def _take_over(self, session: str, state: SessionInfo, copied: int) -> Steps:
        """Copies the turns after the first `copied` to the hidden `session`, computes them, and lets the session that
        is compacted take everything over. Turns that it commits meanwhile follow."""
        tenant = self._tenant
        for attempt in range(1, ATTEMPTS + 1):
            try:
                if copied < state.turns:
                    following = CopyTurns(
                        tenant=tenant,
                        session=session,
                        source=self.session,
                        first=copied + 1,
                        version=state.version,
                    )
                    yield following
                    copied = state.turns
                    yield from self._append(session, (), state, NO_TOOLS)
                replacing = ReplaceHistory(
                    tenant=tenant,
                    session=self.session,
                    source=session,
                    version=state.version,
                    limits=self._limits,
                )
                return (yield replacing)
            except (SessionBusy, VersionMismatch) as error:
                if attempt == ATTEMPTS or self._span.version is not None:
                    raise
                yield Idle()
                now: SessionInfo = yield self._state()
                if now.version - state.version != now.turns - state.turns:  # not only new turns
                    raise VersionMismatch(f"session {self.session} has been changed meanwhile") from error
                state = now
        raise AssertionError  # the last attempt returns or raises

    def _priority_for(self, state: SessionInfo) -> int:
        return self._priority if self._priority is not None else max(-MAX_PRIORITY, state.priority - 1)

    def _count(self, ended: Ended) -> None:
        self._spent["computed"] += ended.result.usage.computed
        self._spent["generated"] += ended.result.usage.generated
