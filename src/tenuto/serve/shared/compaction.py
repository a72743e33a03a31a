"""Compaction of sessions: a summary takes the place of some turns. The new history is made and computed on a hidden
fork; then the session takes it over at once, with its state."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import msgspec

from tenuto.base.config import Limits
from tenuto.base.errors import InvalidRequest, SessionBusy, VersionMismatch
from tenuto.base.options import MAX_PRIORITY, TurnParams
from tenuto.base.tools.answers import Reading
from tenuto.base.tools.definitions import NO_TOOLS, Tools
from tenuto.base.turns import Message, TurnInput, TurnResult
from tenuto.base.views import Compacted, SessionInfo
from tenuto.base.wire.messages import CopyTurns, Fork, GetSession, ReplaceHistory, StartTurn
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.samples import committed
from tenuto.serve.shared.settings import Tenant, hidden_session_id

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


class Compaction:
    """One compaction of a session. Its sessions are hidden and not journaled, so that nothing is left of a compaction
    that is interrupted. The tenant's limits of sessions and tokens do not refuse them, since a compaction helps to keep
    those."""

    def __init__(self, edge: Edge, tenant: Tenant, session: str, span: Span) -> None:
        self._edge = edge
        self._tenant = tenant
        self._session = session
        self._span = span
        self._priority: int | None = None
        self._limits = Limits(units=tenant.limits.units)
        self._hidden: list[str] = []
        self._spent: Counter[str] = Counter()

    async def run(self, summary: TurnInput | None, asking: StartTurn, reading: Reading) -> Compacted:
        """Replaces the turns by one with the input `summary`, or if it is `None`, by the answer to `asking`, which is
        parsed by `reading`. Its turns have the priority of `asking`, or else one below that of the session. Raises the
        engine's refusals, `InvalidRequest`, and `VersionMismatch` if the session has been changed meanwhile other than
        by new turns. The compaction has then changed nothing."""
        text, self._priority = None, asking.params.priority
        try:
            state, last, whole = await self._begin()
            if summary is None:
                text = await self._ask(whole, asking, state, reading)
                summary = [*asking.input, Message("assistant", text)]
            session = await self._fork(whole, self._span.first - 1)
            await self._append(session, summary, state, asking.tools)
            state = await self._take_over(session, state, last)
        finally:
            for hidden in self._hidden:
                self._edge.spawn(self._edge.turns.close_if_open((self._tenant.name, hidden)))
        return Compacted(state, text, self._spent["computed"], self._spent["generated"])

    async def _state(self) -> SessionInfo:
        return await self._edge.link.call(GetSession(tenant=self._tenant.name, session=self._session))

    async def _begin(self) -> tuple[SessionInfo, int, str]:
        """Forks the session up to the last turn to replace. Returns its state, that turn's number and the fork."""
        for attempt in range(1, ATTEMPTS + 1):
            state = await self._state()
            last = self._span.end(state)
            try:
                return state, last, await self._fork(self._session, last, state.version)
            except VersionMismatch:  # a turn was committed just now
                if attempt == ATTEMPTS or self._span.version is not None:
                    raise
        raise AssertionError  # the last attempt returns or raises

    async def _fork(self, session: str, turn: int, version: int | None = None) -> str:
        child = hidden_session_id()
        self._hidden.append(child)
        fork = Fork(
            tenant=self._tenant.name,
            session=session,
            child=child,
            turn=turn,
            hidden=True,
            version=version,
            limits=self._limits,
        )
        return (await self._edge.link.call(fork)).session_id

    async def _ask(self, session: str, asking: StartTurn, state: SessionInfo, reading: Reading) -> str:
        """Lets the model write the summary, and returns it."""
        params = replace(asking.params, priority=self._priority_for(state))
        start = msgspec.structs.replace(asking, session=session, params=params, limits=self._limits)
        turn = await self._edge.start(self._tenant, start)
        self._count(await committed(self._edge, turn))
        text = reading.reader(turn.id).read(turn.reply().text, ended=True).text.strip()
        if not text:
            raise InvalidRequest("the model wrote no summary; give one, or other instructions")
        return text

    async def _append(self, session: str, given: TurnInput, state: SessionInfo, tools: Tools) -> None:
        """Appends input to a hidden session, and computes all of its history."""
        start = StartTurn(
            kind="append",
            tenant=self._tenant.name,
            session=session,
            input=given,
            params=TurnParams(priority=self._priority_for(state)),
            tools=tools,
            limits=self._limits,
        )
        self._count(await committed(self._edge, await self._edge.start(self._tenant, start)))

    async def _take_over(self, session: str, state: SessionInfo, copied: int) -> SessionInfo:
        """Copies the turns after the first `copied` to the hidden `session`, computes them, and lets the session that
        is compacted take everything over. Turns that it commits meanwhile follow."""
        tenant = self._tenant.name
        for attempt in range(1, ATTEMPTS + 1):
            try:
                if copied < state.turns:
                    following = CopyTurns(
                        tenant=tenant,
                        session=session,
                        source=self._session,
                        first=copied + 1,
                        version=state.version,
                    )
                    await self._edge.link.call(following)
                    copied = state.turns
                    await self._append(session, (), state, NO_TOOLS)
                replacing = ReplaceHistory(tenant=tenant, session=self._session, source=session, version=state.version)
                return await self._edge.link.call(replacing)
            except (SessionBusy, VersionMismatch) as error:
                if attempt == ATTEMPTS or self._span.version is not None:
                    raise
                await self._idle()
                now = await self._state()
                if now.version - state.version != now.turns - state.turns:  # not only new turns
                    raise VersionMismatch(f"session {self._session} has been changed meanwhile") from error
                state = now
        raise AssertionError  # the last attempt returns or raises

    async def _idle(self) -> None:
        """Waits for the end of the session's open turn, if there is one."""
        turn = self._edge.turns.queues.open_turn((self._tenant.name, self._session))
        if turn is not None:
            await turn.over()

    def _priority_for(self, state: SessionInfo) -> int:
        return self._priority if self._priority is not None else max(-MAX_PRIORITY, state.priority - 1)

    def _count(self, result: TurnResult) -> None:
        self._spent["computed"] += result.usage.computed
        self._spent["generated"] += result.usage.generated
