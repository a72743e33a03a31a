"""Sessions in SGLang's manner: any request that has ended can be continued, several at once.

What is appended where a history ends goes into the same hidden session; whatever else is continued is forked off.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from tenuto.base.errors import InvalidRequest, TenutoError
from tenuto.base.messages import Fork, OpenSession
from tenuto.base.options import Policy
from tenuto.serve.sglang.schemas import SessionParams
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.settings import Tenant, hidden_session_id
from tenuto.serve.shared.turns import LiveTurn

MOST_ENDED = 4096
"""Requests of one session that can be continued; the oldest are forgotten."""


@dataclass(slots=True, eq=False)
class Line:
    """A hidden session. `tokens`: its history, as long as no turn is open on it; -1 if that is not known. `uses`: ended
    requests that it holds, and the open one."""

    id: str
    tokens: int = 0
    busy: bool = False
    uses: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """A request that can be continued: the first `end` tokens of its line, of which those up to `input_end` came before
    its output."""

    line: Line
    input_end: int
    end: int
    parent: Ended | None


@dataclass(slots=True, eq=False)
class Place:
    """Where an open request stands. `source`: what its line is to be forked from, and at which position."""

    rid: str
    line: Line
    parent: Ended | None
    replaces: bool
    source: tuple[Line, int] | None = None
    exists: bool = False
    turn: LiveTurn | None = None


class Branches:
    """One such session.

    Invariant: `lines` are the hidden sessions that may be open; each is used by an entry of `ended` or `places`.
    """

    def __init__(
        self, edge: Edge, tenant: Tenant, session_id: str, timeout: float | None, forget: Callable[[], None]
    ) -> None:
        """`forget` is called when it closes because `timeout` seconds have passed without a turn."""
        self._edge = edge
        self._tenant = tenant
        self._id = session_id
        self._timeout = timeout
        self._forget = forget
        self._timer: asyncio.TimerHandle | None = None
        self.lines: set[Line] = set()
        self.ended: OrderedDict[str, Ended] = OrderedDict()  # by rid
        self.places: set[Place] = set()
        self.closed = False
        self._watch()

    async def place(self, rid: str, params: SessionParams) -> Place:
        """Where the request `rid` goes, with a hidden session that is there. Raises `InvalidRequest` if what it
        continues is not there. Whoever takes a place calls `leave` in the end."""
        if params.replace and params.rid is not None:
            await self._interrupt(params.rid)
        place = self._choose(rid, params)
        try:
            await self._open(place)
        except BaseException:
            self.leave(place)
            raise
        return place

    def accepted(self, place: Place, turn: LiveTurn) -> None:
        """The engine has the request's turn: those that it replaces end."""
        place.turn = turn
        if place.replaces:
            for other in self.places:
                if other is not place and other.turn is not None and _follows(other.parent, place.parent):
                    self._edge.spawn(self._abort(other.turn))

    def leave(self, place: Place) -> None:
        """The request's turn has ended, or did not start."""
        if place not in self.places:
            return
        self.places.discard(place)
        place.line.busy = False
        turn = place.turn
        if turn is None:
            place.line.tokens = -1  # if starting it was cancelled, it may be committed yet
        elif turn.ticket is not None and turn.result is not None and turn.result.committed:
            start = turn.ticket.prompt_tokens
            self._end(place, Ended(place.line, start, start + turn.result.kept, place.parent))
        self._release(place.line)
        self._watch()

    async def close(self) -> None:
        """Forget everything; turns that are open may end first."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        lines, self.lines = self.lines, set()
        self.ended.clear()
        for line in lines:
            await self._close(line)

    # -- choosing a place

    def _choose(self, rid: str, params: SessionParams) -> Place:
        if self.closed:
            raise InvalidRequest(f"there is no session {self._id!r}; it was closed")
        parent, position = self._point(params)
        replaces = bool(params.replace)
        if parent is not None and not parent.line.busy and position == parent.line.tokens:
            place = Place(rid, parent.line, parent, replaces, exists=True)
        else:
            line = Line(hidden_session_id())
            self.lines.add(line)
            source = (parent.line, position) if parent is not None and position else None
            place = Place(rid, line, parent, replaces, source)
        place.line.busy = True
        place.line.uses += 1
        self.places.add(place)
        return place

    def _point(self, params: SessionParams) -> tuple[Ended | None, int]:
        """The request to be continued, and how many tokens of it."""
        if params.rid is None:
            return None, 0
        parent = self.ended.get(params.rid)
        if parent is None:
            if any(place.rid == params.rid for place in self.places):
                raise InvalidRequest(f"request {params.rid!r} has not ended; wait for that, or give replace")
            raise InvalidRequest(
                f"session {self._id!r} has no request {params.rid!r}; it never was, was rolled back, or was replaced"
            )
        self.ended.move_to_end(params.rid)
        end = parent.input_end if params.drop_previous_output else parent.end
        return parent, len(range(end)[: params.offset]) if params.offset else end

    async def _interrupt(self, rid: str) -> None:
        """If the request is open, it ends here and now, with what of it has been delivered."""
        for place in [place for place in self.places if place.rid == rid]:
            if place.turn is not None:
                await self._edge.desk.abort(place.turn, place.turn.delivered)

    async def _open(self, place: Place) -> None:
        if place.exists:
            return
        tenant, limits = self._tenant.name, self._tenant.limits
        request: Fork | OpenSession
        if place.source is not None:
            parent, position = place.source
            request = Fork(tenant=tenant, session=parent.id, child=place.line.id, position=position, limits=limits)
        else:
            request = OpenSession(session=place.line.id, policy=Policy(tenant=tenant, hidden=True), limits=limits)
        place.line.tokens = (await self._edge.link.call(request)).tokens

    # -- ends

    def _end(self, place: Place, ended: Ended) -> None:
        """It can be continued from now on."""
        ended.line.tokens = ended.end
        if self.closed:
            return
        if place.replaces:
            for rid in [rid for rid, other in self.ended.items() if _follows(other.parent, place.parent)]:
                self._drop(rid)
        self._drop(place.rid)
        self.ended[place.rid] = ended
        ended.line.uses += 1
        while len(self.ended) > MOST_ENDED:
            self._drop(next(iter(self.ended)))

    def _drop(self, rid: str) -> None:
        ended = self.ended.pop(rid, None)
        if ended is not None:
            self._release(ended.line)

    def _release(self, line: Line) -> None:
        line.uses -= 1
        if line.uses == 0 and line in self.lines:
            self.lines.discard(line)
            self._edge.spawn(self._close(line))

    async def _close(self, line: Line) -> None:
        with suppress(TenutoError):  # it never came to be, or the engine is gone
            await self._edge.desk.close_session((self._tenant.name, line.id), finish=line.busy)

    async def _abort(self, turn: LiveTurn) -> None:
        with suppress(TenutoError):
            await self._edge.desk.abort(turn)

    # -- timeout

    def _watch(self) -> None:
        """Count the timeout from now on."""
        if self._timer is not None:
            self._timer.cancel()
        if self._timeout is not None and not self.closed:
            self._timer = asyncio.get_running_loop().call_later(self._timeout, self._expire)

    def _expire(self) -> None:
        if not self.places:  # otherwise the end of a turn watches again
            self._forget()
            self._edge.spawn(self.close())


def _follows(ended: Ended | None, root: Ended | None) -> bool:
    """Whether `ended` is `root`, or continues it. All continue `None`."""
    while ended is not root and ended is not None:
        ended = ended.parent
    return ended is root
