"""Turns as the edge sees them: started, followed by any number of readers, resumed, and remembered for a while."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec

from tenuto.base.errors import (
    DeadlinePassed,
    IllegalTransition,
    KeyReused,
    LimitReached,
    NotFound,
    Overloaded,
    SessionBusy,
    SessionClosed,
    TenutoError,
)
from tenuto.base.link import Link, TurnNews
from tenuto.base.messages import AbortTurn, CloseSession, StartTurn, Withdraw
from tenuto.base.turns import Delta, Keep, TurnResult, joined, kept
from tenuto.base.views import SessionKey, Ticket

MOST_REMEMBERED = 4096
"""Ended turns that are kept for readers who come back, and for repeated requests."""
MOST_UPDATES = 2**18
"""Updates of ended turns that are kept; those with log-probabilities count more."""
LOGPROBS_WEIGHT = 16
"""For how many updates one with log-probabilities counts."""
MOST_QUEUED = 64
"""Turns that may wait for one session."""
MOST_LINE_BYTES = 2**27
"""Input that all of them may have together."""
DEADLINES = ("queue_timeout", "timeout")
"""Options of a turn that are seconds from its arrival."""


@dataclass(frozen=True, slots=True)
class Key:
    """An idempotency key, where it counts."""

    tenant: str
    session: str | None
    key: str


class LiveTurn:
    """One turn, from its request on.

    Invariant: `updates` are what readers are given, in order; the last has a result once `ended`, unless `error` says
    why there is none. An update's place, counted from 1, is the id of its event.
    """

    def __init__(self, request: StartTurn, *, continues: bool) -> None:
        self.id = f"turn-{secrets.token_hex(12)}"
        self.request = msgspec.structs.replace(request, name=self.id)
        self.continues = continues  # also when nobody reads
        self.updates: list[Delta] = []
        self.ticket: Ticket | None = None
        self.result: TurnResult | None = None
        self.error: TenutoError | None = None
        self.readers = 0
        self.leaving = False  # nobody reads it any more, and it is being aborted
        self.asked = time.perf_counter()  # when it was requested
        self.heard: float | None = None  # when its last tokens came; written by the metrics
        self.answered = asyncio.Event()  # the engine has accepted it, or it has failed
        self.key: Key | None = None  # its idempotency key
        self._held: list[Delta] | None = None  # what comes after an abort; its result says what of it is kept
        self._wakers: list[asyncio.Future[None]] = []

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def ended(self) -> bool:
        return self.result is not None or self.error is not None

    @property
    def state(self) -> str:
        """waiting, open, committed, aborted or failed."""
        if self.result is not None:
            return "committed" if self.result.committed else "aborted"
        if self.error is not None:
            return "failed"
        return "open" if self.ticket is not None else "waiting"

    @property
    def delivered(self) -> int:
        """Leading output tokens whose text readers have been given."""
        return self.updates[-1].delivered if self.updates else 0

    @property
    def weight(self) -> int:
        """How much room its updates take."""
        return len(self.updates) * (LOGPROBS_WEIGHT if self.request.params.logprobs is not None else 1)

    def accept(self, ticket: Ticket) -> None:
        """The engine has it, and its input."""
        self.request = msgspec.structs.replace(self.request, input=[])
        self.ticket = ticket
        self.answered.set()

    def require_begun(self) -> None:
        """Raises the error that kept it from beginning, if one did."""
        if self.error is not None and self.ticket is None:
            raise self.error

    def hold(self) -> None:
        """An abort is under way: whatever comes is given out only as far as it is kept."""
        if self._held is None:
            self._held = []

    def take(self, update: Delta) -> None:
        """The turn has gone on."""
        if self._held is not None:
            self._held.append(update)
            if update.result is None:
                return
            update = kept(self._held, sum(len(said.tokens) for said in self.updates), self.delivered)
        if update.result is not None and (update.tokens or update.text):  # the end is an event of its own, to resume at
            self.updates.append(msgspec.structs.replace(update, result=None))
            update = Delta(delivered=update.delivered, result=update.result)
        self.updates.append(update)
        self.result = update.result
        self._wake()

    def fail(self, error: TenutoError) -> None:
        """The turn has ended without a result."""
        self.request = msgspec.structs.replace(self.request, input=[])
        self.error = error.with_traceback(None)  # which holds the input, too
        self.answered.set()
        self._wake()

    async def follow(self, position: int = 0) -> AsyncGenerator[tuple[int, list[Delta]], None]:
        """Updates after the first `position`, as they come: where they end, and all there are by then. Raises the error
        that ended the turn."""
        self.readers += 1
        try:
            while True:
                if position < len(self.updates):
                    news = self.updates[position:]
                    position = len(self.updates)
                    yield position, news
                if self.error is not None:
                    raise self.error
                if self.result is not None and position >= len(self.updates):
                    return
                if position >= len(self.updates):
                    waker = asyncio.get_running_loop().create_future()
                    self._wakers.append(waker)
                    await waker
        finally:
            self.readers -= 1

    async def finished(self) -> TurnResult:
        """Wait for the end. Raises the error that it ended with."""
        async for _ in self.follow(len(self.updates)):
            pass
        assert self.result is not None
        return self.result

    def reply(self) -> Delta:
        """What has been said so far."""
        return joined(self.updates)

    def _wake(self) -> None:
        wakers, self._wakers = self._wakers, []
        for waker in wakers:
            if not waker.done():
                waker.set_result(None)


class TurnDesk:
    """Starts turns on an engine, and knows all that are open and those that ended lately.

    Invariant: a session's `_open` turn is one that the engine has accepted, or is being asked to; those in its `_lines`
    wait for that to end.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._turns: dict[str, LiveTurn] = {}  # by id
        self._past: deque[LiveTurn] = deque()  # those that were accepted and have ended, in the order of their ends
        self._past_updates = 0  # of them all, weighted
        self._open: dict[SessionKey, LiveTurn] = {}
        self._lines: dict[SessionKey, deque[tuple[LiveTurn, asyncio.Future[None]]]] = {}
        self._keys: dict[Key, tuple[LiveTurn, bytes]] = {}
        self._line_bytes = 0  # of input, of all turns that wait for a session
        self._closing: Counter[SessionKey] = Counter()  # sessions that the engine is being asked to close, how often
        self._tasks: set[asyncio.Task[None]] = set()
        self.open = Counter[str]()  # turns that have not ended, by tenant
        self.in_line = Counter[str]()  # of them, those that wait for a session, by tenant
        self.on_update: list[Callable[[LiveTurn, Delta], None]] = []  # called with every update of a turn
        self.on_end: list[Callable[[LiveTurn], None]] = []  # called with every turn that was accepted and has ended

    def find(self, tenant: str, session: str | None, turn_id: str) -> LiveTurn:
        """Raises `NotFound`."""
        turn = self._turns.get(turn_id)
        if turn is None or turn.tenant != tenant or turn.request.session != session:
            raise NotFound(f"there is no turn {turn_id!r} here; it never was, or ended too long ago")
        return turn

    def open_turns(self, tenant: str | None = None) -> list[LiveTurn]:
        """Turns of `tenant` (`None`: of all) that have not ended."""
        return [turn for turn in self._turns.values() if not turn.ended and tenant in (None, turn.tenant)]

    def open_turn(self, session: SessionKey) -> LiveTurn | None:
        """The session's turn that has begun and not ended."""
        return self._open.get(session)

    async def start(
        self,
        request: StartTurn,
        *,
        queue: bool = False,
        continues: bool = False,
        key: str | None = None,
        body: bytes = b"",
        check: Callable[[], None] = lambda: None,
        most_in_line: int | None = None,
    ) -> LiveTurn:
        """A turn that the engine has accepted. With `queue` it waits for the session's open turn, unless its tenant has
        `most_in_line` that wait; otherwise it is refused with `SessionBusy`. `check` may refuse any that is new. A
        `key` used before with the same `body` gives the turn of then, if that has not been aborted; with another body
        it is refused with `KeyReused`. Cancelled, it leaves no turn behind."""
        turn = LiveTurn(request, continues=continues)
        if key is not None:
            turn.key = Key(request.tenant, request.session, key)
            while (known := self._keys.get(turn.key)) is not None:
                if not known[0].leaving or known[0].ended:
                    return await self._repeat(known, body)
                with suppress(TenutoError):
                    await known[0].finished()  # the key is free then, unless it was committed after all
        check()
        if turn.key is not None:
            self._keys[turn.key] = turn, body
        self._turns[turn.id] = turn
        self.open[turn.tenant] += 1
        starting = asyncio.ensure_future(self._start(turn, queue, most_in_line))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            self.abandon(turn)
            raise
        turn.require_begun()
        return turn

    async def _repeat(self, known: tuple[LiveTurn, bytes], body: bytes) -> LiveTurn:
        turn, first = known
        if first != body:
            raise KeyReused("this idempotency key was used with another request; allowed: the same one, or a new key")
        turn.readers += 1  # whoever waits here will read it
        try:
            await turn.answered.wait()
        except asyncio.CancelledError:
            turn.readers -= 1
            self.abandon(turn)
            raise
        turn.readers -= 1
        turn.require_begun()
        return turn

    async def _start(self, turn: LiveTurn, queue: bool, most_in_line: int | None) -> None:
        request = turn.request
        try:
            if request.key is not None:
                request = await self._turn_of(request.key, turn, queue, most_in_line)
            await self._link.start(request, lambda news: self._deliver(turn, news))
        except Exception as error:
            turn.fail(error if isinstance(error, TenutoError) else TenutoError("the server failed; its log says why"))
            self._ended(turn)
            if turn.error is not error:
                raise

    async def _turn_of(self, session: SessionKey, turn: LiveTurn, queue: bool, most_in_line: int | None) -> StartTurn:
        """Be the session's open turn, at once or when those before have ended. Of its deadlines, what waiting has left;
        raises `DeadlinePassed` if that is nothing."""
        line = self._lines.get(session)
        if session not in self._open and not line:
            self._open[session] = turn
            return turn.request
        if not queue:
            raise SessionBusy("the session has an open turn; allowed: wait for its end, abort it, or if_busy: queue")
        waiting = self.in_line[turn.tenant]
        if most_in_line is not None and waiting >= most_in_line:
            raise LimitReached(f"{waiting} turns wait for a session; allowed: {most_in_line}; wait for one to begin")
        line = self._lines.setdefault(session, deque())
        if len(line) >= MOST_QUEUED:
            raise Overloaded(f"{len(line)} turns wait for this session, the most allowed; try again later")
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        size = len(msgspec.msgpack.encode(turn.request.input))
        if self._line_bytes + size > MOST_LINE_BYTES:
            raise Overloaded(f"turns that wait for a session have {self._line_bytes} bytes of input; try again later")
        line.append((turn, ready))
        self.in_line[turn.tenant] += 1
        self._line_bytes += size
        params = turn.request.params
        deadlines = {name: seconds for name in DEADLINES if (seconds := getattr(params, name)) is not None}
        began = time.monotonic()
        try:
            async with asyncio.timeout(min(deadlines.values(), default=None)):
                await ready
        except TimeoutError:
            raise DeadlinePassed("the turn has waited for its session until its deadline") from None
        finally:
            self.in_line[turn.tenant] -= 1
            self._line_bytes -= size
        waited = time.monotonic() - began
        left = {name: max(1e-3, seconds - waited) for name, seconds in deadlines.items()}
        return msgspec.structs.replace(turn.request, params=replace(params, **left))

    def _deliver(self, turn: LiveTurn, news: TurnNews) -> None:
        match news:
            case Ticket():
                turn.accept(news)
            case Delta():
                turn.take(news)
                for told in self.on_update:
                    told(turn, news)
            case _:
                turn.fail(news)
        if turn.ended and turn.ticket is not None:
            for told_of_end in self.on_end:
                told_of_end(turn)
            self._ended(turn)

    def _ended(self, turn: LiveTurn) -> None:
        """The next one of its session may start; if it was not committed, its idempotency key is free."""
        session = turn.request.key
        self.open[turn.tenant] -= 1
        if turn.state != "committed":
            self._forget_key(turn)
        if turn.ticket is None:
            self._turns.pop(turn.id, None)
        else:
            self._remember(turn)
        if session is None:
            return
        if self._open.get(session) is not turn:
            self._lines[session] = deque(entry for entry in self._lines.get(session, ()) if entry[0] is not turn)
            self._promote(session)
        else:
            del self._open[session]
            self._promote(session)

    def _promote(self, session: SessionKey) -> None:
        """The first that waits for the session begins, unless the session has an open turn or is being closed."""
        line = self._lines.get(session)
        while line and session not in self._open and session not in self._closing:
            following, ready = line.popleft()
            if not ready.done():
                self._open[session] = following
                ready.set_result(None)
        if not line:
            self._lines.pop(session, None)

    def _remember(self, turn: LiveTurn) -> None:
        """The turn has ended; the oldest of those that have are forgotten."""
        self._past.append(turn)
        self._past_updates += turn.weight
        while len(self._past) > MOST_REMEMBERED or (self._past_updates > MOST_UPDATES and len(self._past) > 1):
            oldest = self._past.popleft()
            self._past_updates -= oldest.weight
            del self._turns[oldest.id]
            self._forget_key(oldest)

    def _forget_key(self, turn: LiveTurn) -> None:
        if turn.key is not None and self._keys.get(turn.key, (None, b""))[0] is turn:
            del self._keys[turn.key]

    async def abort(self, turn: LiveTurn, keep: Keep = None) -> None:
        """End the turn, committing what `keep` says; what was delivered is what its readers were given. One that has
        ended stays as it is."""
        self._leave_line(turn, IllegalTransition("the turn was aborted before it began"))
        await turn.answered.wait()
        if turn.ended or turn.ticket is None:
            return
        if keep == "delivered":
            keep = turn.delivered
        turn.hold()
        await self._link.call(
            AbortTurn(tenant=turn.tenant, session=turn.ticket.session, turn=turn.ticket.turn, keep=keep)
        )
        with suppress(TenutoError):
            await turn.finished()

    def _leave_line(self, turn: LiveTurn, error: TenutoError) -> None:
        line = self._lines.get(turn.request.key, ()) if turn.request.key is not None else ()
        for waiting, ready in line:
            if waiting is turn and not ready.done():
                ready.set_exception(error)

    async def close_session(self, session: SessionKey, *, finish: bool = False, version: int | None = None) -> None:
        """Have the engine close a session. Those that wait for it are refused, before another may have its id. Raises
        what the engine refuses with."""
        self._closing[session] += 1
        try:
            await self._link.call(CloseSession(tenant=session[0], session=session[1], finish=finish, version=version))
            for waiting, _ in list(self._lines.get(session, ())):
                self._leave_line(waiting, SessionClosed("the session was closed before the turn began"))
        finally:
            self._closing[session] -= 1
            if not self._closing[session]:
                del self._closing[session]
            self._promote(session)

    def refuse_lines(self, error: TenutoError) -> None:
        """Whoever waits for a session does so in vain."""
        for session in list(self._lines):
            for waiting, _ in list(self._lines[session]):
                self._leave_line(waiting, error)

    def abandon(self, turn: LiveTurn) -> None:
        """A reader has gone. If it was the last, and the turn does not continue without, the turn is aborted."""
        if turn.readers == 0 and not turn.ended and not turn.continues:
            turn.leaving = True
            task = asyncio.ensure_future(self._abort_quietly(turn))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _abort_quietly(self, turn: LiveTurn) -> None:
        self._leave_line(turn, IllegalTransition("the turn was aborted before it began"))
        with suppress(TenutoError):  # the session is gone, or the engine
            if not turn.answered.is_set():
                await self.withdraw(turn.id)
            await self.abort(turn)

    async def withdraw(self, name: str) -> None:
        """Nobody waits any more for what has this name; see `messages.Withdraw`."""
        with suppress(TenutoError):
            await self._link.call(Withdraw(name=name))
