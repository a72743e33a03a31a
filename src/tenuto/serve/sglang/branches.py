"""SGLang-compatible sessions, which can be continued after any ended request, also several times at once.

A request that continues at the end of a history runs on the same hidden session, any other on a fork.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from tenuto.base.errors import InvalidRequest
from tenuto.base.views import hidden_session_id
from tenuto.base.wire.messages import Fork, OpenSession
from tenuto.serve.sglang.schemas import SessionParams
from tenuto.serve.shared.edge import Edge, open_message
from tenuto.serve.shared.live_turn import LiveTurn
from tenuto.serve.shared.settings import Tenant

MAX_ENDED = 4096
"""Maximum number of ended requests of one session that can be continued; the oldest are dropped."""


@dataclass(slots=True, eq=False)
class HiddenSession:
    """A session that no client can name. `tokens`: length of its history, or -1 if unknown. `busy`: a request is open
    on it, and `tokens` may be out of date. `uses`: number of ended requests in its history, plus the open one."""

    id: str
    tokens: int = 0
    busy: bool = False
    uses: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class EndedRequest:
    """A request that can be continued. It covers the first `end` tokens of `session`; its output begins after the first
    `input_end`."""

    session: HiddenSession
    input_end: int
    end: int
    parent: EndedRequest | None


@dataclass(slots=True, eq=False)
class RequestPlace:
    """The place of an open request: on `session`, after `parent`. `opening`: the message that opens the session, unless
    it is open already."""

    rid: str
    session: HiddenSession
    parent: EndedRequest | None
    replaces: bool
    opening: Fork | OpenSession | None = None
    turn: LiveTurn | None = None


class Branches:
    """A client's session.

    Invariant: `sessions` has all hidden sessions that may be open; each is used by an entry of `ended` or `places`.
    """

    def __init__(
        self, edge: Edge, tenant: Tenant, session_id: str, timeout: float | None, forget: Callable[[], object]
    ) -> None:
        """`forget` is called when the session closes after `timeout` seconds without a turn."""
        self._edge = edge
        self._tenant = tenant
        self._id = session_id
        self._timeout = timeout
        self._forget = forget
        self._timer: asyncio.TimerHandle | None = None
        self.sessions: set[HiddenSession] = set()
        self.ended: OrderedDict[str, EndedRequest] = OrderedDict()  # by rid
        self.places: set[RequestPlace] = set()
        self.closed = False
        self._watch()

    async def place(self, rid: str, params: SessionParams, adapter: str | None) -> RequestPlace:
        """Returns a place for the request `rid` on an open hidden session, which begins with `adapter`. The caller must
        call `leave` in the end. Raises `InvalidRequest` if the request to continue does not exist."""
        if params.replace and params.rid is not None:
            await self._interrupt(params.rid)
        place = self._choose(rid, params, adapter)
        if place.opening is not None:
            try:
                place.session.tokens = (await self._edge.link.call(place.opening)).tokens
            except BaseException:
                self.leave(place)
                raise
        return place

    def accepted(self, place: RequestPlace, turn: LiveTurn) -> None:
        """Records that the engine has accepted the request's turn, and ends the requests it replaces."""
        place.turn = turn
        if place.replaces:
            for other in self.places:
                if other is not place and other.turn is not None and _follows(other.parent, place.parent):
                    self._edge.spawn(self._edge.turns.abort_quietly(other.turn))

    def leave(self, place: RequestPlace) -> None:
        """Frees the place of a request whose turn has ended or did not start."""
        if place not in self.places:
            return
        self.places.discard(place)
        place.session.busy = False
        turn = place.turn
        if turn is None:
            place.session.tokens = -1  # a turn whose start was cancelled may still commit
        elif turn.ticket is not None and turn.result is not None and turn.result.committed:
            start = turn.ticket.prompt_tokens
            self._end(place, EndedRequest(place.session, start, start + turn.result.kept, place.parent))
        self._release(place.session)
        self._watch()

    async def close(self) -> None:
        """Closes the session. Open turns may end first."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        sessions, self.sessions = self.sessions, set()
        self.ended.clear()
        for session in sessions:
            await self._close(session)

    # -- choosing a place

    def _choose(self, rid: str, params: SessionParams, adapter: str | None) -> RequestPlace:
        if self.closed:
            raise InvalidRequest(f"there is no session {self._id!r}; it was closed")
        parent, position = self._point(params)
        if parent is not None and not parent.session.busy and position == parent.session.tokens:
            session, opening = parent.session, None
        else:
            session = HiddenSession(hidden_session_id())
            self.sessions.add(session)
            opening = self._opening(session.id, parent if position else None, position, adapter)
        place = RequestPlace(rid, session, parent, bool(params.replace), opening)
        session.busy = True
        session.uses += 1
        self.places.add(place)
        return place

    def _point(self, params: SessionParams) -> tuple[EndedRequest | None, int]:
        """Returns the request to continue, and the number of its tokens to keep."""
        if params.rid is None:
            return None, 0
        parent = self.ended.get(params.rid)
        if parent is None:
            if any(place.rid == params.rid for place in self.places):
                raise InvalidRequest(f"request {params.rid!r} has not ended; wait for its end, or give replace")
            raise InvalidRequest(
                f"session {self._id!r} has no request {params.rid!r}; it never existed, or was rolled back or replaced"
            )
        self.ended.move_to_end(params.rid)
        end = parent.input_end if params.drop_previous_output else parent.end
        return parent, len(range(end)[: params.offset]) if params.offset else end

    async def _interrupt(self, rid: str) -> None:
        """Ends the request if it is open, keeping its delivered output."""
        for place in [place for place in self.places if place.rid == rid]:
            if place.turn is not None:
                await self._edge.turns.abort(place.turn, keep="delivered")

    def _opening(
        self, child: str, parent: EndedRequest | None, position: int, adapter: str | None
    ) -> Fork | OpenSession:
        """Returns the message that opens a session with the first `position` tokens of `parent`."""
        if parent is None:
            return open_message(self._tenant, child, ttl=None, adapter=adapter, hidden=True)
        tenant, limits = self._tenant.name, self._tenant.limits
        return Fork(tenant=tenant, session=parent.session.id, child=child, position=position, limits=limits)

    # -- ends

    def _end(self, place: RequestPlace, ended: EndedRequest) -> None:
        """Makes an ended request available to be continued."""
        ended.session.tokens = ended.end
        if self.closed:
            return
        if place.replaces:
            for rid in [rid for rid, other in self.ended.items() if _follows(other.parent, place.parent)]:
                self._drop(rid)
        self._drop(place.rid)
        self.ended[place.rid] = ended
        ended.session.uses += 1
        while len(self.ended) > MAX_ENDED:
            self._drop(next(iter(self.ended)))

    def _drop(self, rid: str) -> None:
        ended = self.ended.pop(rid, None)
        if ended is not None:
            self._release(ended.session)

    def _release(self, session: HiddenSession) -> None:
        session.uses -= 1
        if session.uses == 0 and session in self.sessions:
            self.sessions.discard(session)
            self._edge.spawn(self._close(session))

    async def _close(self, session: HiddenSession) -> None:
        await self._edge.turns.close_if_open((self._tenant.name, session.id), finish=session.busy)

    # -- timeout

    def _watch(self) -> None:
        """Restarts the timeout."""
        if self._timer is not None:
            self._timer.cancel()
        if self._timeout is not None and not self.closed:
            self._timer = asyncio.get_running_loop().call_later(self._timeout, self._expire)

    def _expire(self) -> None:
        if not self.places:  # otherwise the end of a turn restarts the timeout
            self._forget()
            self._edge.spawn(self.close())


def _follows(ended: EndedRequest | None, root: EndedRequest | None) -> bool:
    """Whether `ended` is `root` or continues it. Every request continues `None`."""
    while ended is not root and ended is not None:
        ended = ended.parent
    return ended is root
