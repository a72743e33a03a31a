"""The turns of sessions, one at a time: a session's open turn, and the queue of turns that wait for it to end."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

import msgspec

from tenuto.base.errors import DeadlinePassed, LimitReached, Overloaded, SessionBusy, SessionClosed, TenutoError
from tenuto.base.fleet_views import TenantUse, Uses
from tenuto.base.options import TurnParams
from tenuto.base.views import SessionKey
from tenuto.base.wire.messages import StartTurn
from tenuto.serve.shared.live_turn import LiveTurn

MAX_WAITING = 64
"""Maximum number of turns that wait for one session."""
MAX_INPUT_BYTES = 2**27
"""Maximum size of all waiting turns' requests together."""
DEADLINES = ("queue_timeout", "timeout")
"""Options of a turn that set deadlines, in seconds from its arrival."""

NOTHING = TenantUse()
"""What tenants have of whom nothing is known."""
_counted = ContextVar("counted_elsewhere", default=False)


@contextmanager
def counted_elsewhere(counted: bool) -> Iterator[None]:
    """Handles a request in the block. `counted`: its turn was open, a moment ago, at a replica that the session has
    left meanwhile, so what is known of other replicas may include it."""
    token = _counted.set(counted)
    try:
        yield
    finally:
        _counted.reset(token)


class SessionQueues:
    """The open and waiting turns of all sessions.

    Invariant: a session's turn in `_open` was accepted by the engine, or is being offered to it. Turns in `_queues`
    wait for its end; a session without waiting turns has no queue. `_arriving` has one event for each turn that has
    come and is in neither, in order of arrival.
    """

    def __init__(self) -> None:
        self.waiting = Counter[str]()  # number of waiting turns by tenant
        self.used_elsewhere: Uses = {}  # what tenants with limits have at other replicas; replaced by the fleet
        self._open: dict[SessionKey, LiveTurn] = {}
        self._queues: dict[SessionKey, deque[tuple[LiveTurn, asyncio.Future[None]]]] = {}
        self._arriving: dict[SessionKey, list[asyncio.Event]] = {}
        self._input_bytes = 0  # bytes of the waiting turns' requests
        self._closing = Counter[SessionKey]()  # calls of `closing` in progress, by session; its turns may not begin

    def elsewhere(self, tenant: str) -> TenantUse:
        """Returns the known use of a tenant with limits at other replicas."""
        return self.used_elsewhere.get(tenant, NOTHING) if not _counted.get() else NOTHING

    def open_turn(self, session: SessionKey) -> LiveTurn | None:
        """Returns the session's turn that has begun but not ended."""
        return self._open.get(session)

    def waiting_for(self, session: SessionKey) -> list[LiveTurn]:
        """Returns the turns that wait for the session, in the order in which they will begin."""
        return [turn for turn, _ in self._queues.get(session, ())]

    @contextmanager
    def arriving(self, session: SessionKey) -> Iterator[Callable[[], Awaitable[None]]]:
        """Keeps the place of a turn that is not in the queue yet. Yields a function that waits until all turns that
        came before it have entered the queue or left."""
        arriving = self._arriving.setdefault(session, [])
        before, own = tuple(arriving), asyncio.Event()
        arriving.append(own)

        async def wait() -> None:
            for other in before:
                await other.wait()

        try:
            yield wait
        finally:
            own.set()
            arriving.remove(own)
            if not arriving:
                del self._arriving[session]

    def begin(self, turn: LiveTurn, session: SessionKey, *, queue: bool) -> Awaitable[StartTurn]:
        """Makes `turn` the session's open turn until `leave`: at once or, with `queue`, when the turns before it have
        ended. Returns an awaitable of its request, with the remaining time of its deadlines. It must be awaited.

        Raises `SessionBusy` without `queue`, `LimitReached` if too many turns of its tenant wait, and `Overloaded`.
        Awaiting raises `DeadlinePassed`, or the error given to `refuse` while the turn waits.
        """
        if session not in self._open and session not in self._queues:
            self._open[session] = turn
            return _at_once(turn.request)
        if not queue:
            raise SessionBusy("the session has an open turn; allowed: wait for its end, or abort it")
        size = self._check_room(turn, session)
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(session, deque()).append((turn, ready))
        self.waiting[turn.tenant] += 1
        self._input_bytes += size
        return self._wait(turn, ready, size)

    def continues(self, turn: LiveTurn, session: SessionKey) -> None:
        """Makes a turn that goes on here the open turn of a session that was not here before."""
        self._open[session] = turn

    async def _wait(self, turn: LiveTurn, ready: asyncio.Future[None], size: int) -> StartTurn:
        try:
            params = await _until_deadline(ready, turn.request.params)
        finally:
            self.waiting[turn.tenant] -= 1
            self._input_bytes -= size
        return msgspec.structs.replace(turn.request, params=params)

    def _check_room(self, turn: LiveTurn, session: SessionKey) -> int:
        """Returns the size of the turn's request in bytes. Raises `LimitReached` or `Overloaded` if no more turns may
        wait."""
        waiting, allowed = self.waiting[turn.tenant], turn.request.limits.queued
        waiting += self.elsewhere(turn.tenant).queued
        if allowed is not None and waiting >= allowed:
            raise LimitReached(f"{waiting} turns wait for a session; allowed: {allowed}; wait for one to begin")
        if len(self._queues.get(session, ())) >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} turns wait for this session, the most allowed; try again later")
        size = len(msgspec.msgpack.encode(turn.request))
        if self._input_bytes + size > MAX_INPUT_BYTES:
            raise Overloaded(f"turns that wait for a session have {self._input_bytes} bytes; try again later")
        return size

    def leave(self, turn: LiveTurn, session: SessionKey) -> None:
        """Removes a turn that has ended or will not begin, so that the next one may begin."""
        if self._open.get(session) is turn:
            del self._open[session]
        elif session in self._queues:
            self._queues[session] = deque(entry for entry in self._queues[session] if entry[0] is not turn)
        self._promote(session)

    def refuse(self, turn: LiveTurn, error: TenutoError) -> None:
        """Ends the turn's wait with `error`, if it is waiting."""
        for waiting, ready in self._queues.get(turn.request.key, ()) if turn.request.key is not None else ():
            if waiting is turn and not ready.done():
                ready.set_exception(error)

    def refuse_all(self, error: TenutoError) -> None:
        """Ends the wait of all waiting turns with `error`."""
        for session in self._queues:
            for turn in self.waiting_for(session):
                self.refuse(turn, error)

    @contextmanager
    def closing(self, session: SessionKey) -> Iterator[None]:
        """Prevents waiting turns from beginning while the engine closes their session. Once it is closed they are
        refused, before another session can take its id."""
        self._closing[session] += 1
        try:
            yield
            for turn in self.waiting_for(session):
                self.refuse(turn, SessionClosed("the session was closed before the turn began"))
        finally:
            self._closing[session] -= 1
            if not self._closing[session]:
                del self._closing[session]
            self._promote(session)

    def _promote(self, session: SessionKey) -> None:
        """Lets the first waiting turn begin, unless the session has an open turn or is being closed."""
        queue = self._queues.get(session)
        while queue and session not in self._open and session not in self._closing:
            turn, ready = queue.popleft()
            if not ready.done():
                self._open[session] = turn
                ready.set_result(None)
        if not queue:
            self._queues.pop(session, None)


async def _at_once(request: StartTurn) -> StartTurn:
    return request


async def _until_deadline(ready: asyncio.Future[None], params: TurnParams) -> TurnParams:
    """Waits for `ready`. Returns `params` with the remaining time of the deadlines. Raises `DeadlinePassed` when one
    passes."""
    deadlines = {name: seconds for name in DEADLINES if (seconds := getattr(params, name)) is not None}
    began = time.monotonic()
    try:
        async with asyncio.timeout(min(deadlines.values(), default=None)):
            await ready
    except TimeoutError:
        raise DeadlinePassed("the turn waited for its session until its deadline") from None
    waited = time.monotonic() - began
    return replace(params, **{name: max(1e-3, seconds - waited) for name, seconds in deadlines.items()})
