"""Relays: turns that have moved to other replicas continue in the streams of this replica's clients."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import msgspec
import structlog

from tenuto.base.errors import Disconnected, NotFound, TenutoError
from tenuto.base.turns import Keep
from tenuto.base.views import SessionKey
from tenuto.base.wire.between import Abort, Follow, News, Unsaid
from tenuto.base.wire.replies import error_of, refusal_of
from tenuto.serve.fleet.asking import Between, news_of
from tenuto.serve.fleet.peers import Broken, Reply
from tenuto.serve.shared.live_turn import LiveTurn, Source
from tenuto.serve.shared.turns import Turns

log = structlog.get_logger("tenuto.fleet")

PAUSE_SECONDS = 0.05
PATIENCE_SECONDS = 10.0
"""How long, besides a lease, a turn is looked for after its last replica has fallen silent."""

Locate = Callable[[SessionKey], Awaitable[str | None]]
"""Returns the address of a session's owner; `None` if that is this replica, or there is no such session."""


@dataclass(frozen=True, eq=False, slots=True)
class _Teller:
    """A replica at `url`, as long as a relay has its answer."""

    url: str


class Relays:
    """Passes on the output of turns that have moved to other replicas, from where this replica's own stream ended.

    If a connection breaks, the session may have moved again, or another replica may have begun the turn again. So the
    relay follows the turn at the session's owner. The stream ends with an error only if the turn cannot be found for
    too long.

    Invariant: a replica that relays a turn counts as one of the turn's readers at the replica from which it relays, for
    as long as it may have readers itself. So a turn continues while it has a reader anywhere, however many replicas are
    in between.
    """

    def __init__(self, turns: Turns, between: Between, locate: Locate, lease: float) -> None:
        self._turns = turns
        self._between = between
        self._locate = locate
        self._patience = lease + PATIENCE_SECONDS
        self._tasks: dict[LiveTurn, asyncio.Task[None]] = {}
        self._tellers: dict[LiveTurn, _Teller] = {}  # the replicas from which turns are being relayed
        self.reader = secrets.token_hex(8)
        """Stands for this replica among the readers of turns at others."""

    def begin(self, turn: LiveTurn, reading: Callable[[], Awaitable[bool]] | None = None, url: str = "") -> None:
        """Relays a turn. `reading`: first reads an answer of the replica at `url`, and returns False if the turn has
        not moved."""
        self.end(turn)
        self._tasks[turn] = asyncio.ensure_future(self._run(turn, reading, url))

    def end(self, turn: LiveTurn) -> None:
        """Ends a relay, since the turn comes back or has not moved."""
        if (task := self._tasks.pop(turn, None)) is not None:
            task.cancel()

    async def read(self, source: Source, reply: Reply) -> None:
        """Passes on the output of a turn in an answer. Raises `Broken`."""
        async for each in news_of(reply):
            self._pass_on(source, each)

    def _pass_on(self, source: Source, each: News) -> None:
        if each.delta is not None:
            self._turns.relay(source, each.delta)
        elif each.refusal is not None:
            raise Broken(str(error_of(each.refusal)))

    async def _run(self, turn: LiveTurn, reading: Callable[[], Awaitable[bool]] | None, url: str) -> None:
        try:
            await self._relay(turn, reading, url)
        except Exception:  # a bug of ours, whose turn must not stay open
            log.exception("a relay failed")
            self._turns.lose(turn, TenutoError("the server failed; its log says why"))
        finally:
            if self._tasks.get(turn) is asyncio.current_task():
                del self._tasks[turn]

    async def _relay(self, turn: LiveTurn, reading: Callable[[], Awaitable[bool]] | None, url: str) -> None:
        clock = asyncio.get_running_loop().time
        if reading is not None:
            with suppress(Broken, TenutoError), self._telling(turn, url):
                if not await reading():
                    return
        heard = clock()
        error: TenutoError = Disconnected("the replica to which the turn has moved is gone; ask again")
        while not turn.ended and clock() < heard + self._patience:
            before = len(turn.deltas)
            try:
                await self._follow(turn)
            except (Broken, NotFound) as lost:
                error = Disconnected(f"the turn is lost with the replica to which it had moved: {lost}")
            except TenutoError as refusal:
                error = refusal
            if len(turn.deltas) > before:
                heard = clock()
            if not turn.ended:
                await asyncio.sleep(PAUSE_SECONDS)
        self._turns.lose(turn, error)

    async def _follow(self, turn: LiveTurn) -> None:
        key = turn.request.key
        assert key is not None
        url = await self._locate(key)
        tenant, session = key
        start = tokens, characters = turn.position
        source = Source(turn, start)
        if url is None:
            if (again := self._turns.again(turn)) is None:
                raise NotFound("its session is here, or was closed")
            async for each in news(again, start, self.reader):
                self._pass_on(source, each)
            return
        follow = Follow(
            tenant=tenant, session=session, name=turn.id, tokens=tokens, characters=characters, reader=self.reader
        )
        with self._telling(turn, url):
            async with self._between.stream(url, follow) as reply:
                await self.read(source, reply)

    @contextmanager
    def _telling(self, turn: LiveTurn, url: str) -> Iterator[None]:
        self._tellers[turn] = teller = _Teller(url)
        try:
            yield
        finally:
            if self._tellers.get(turn) is teller:
                del self._tellers[turn]

    async def abort(self, turn: LiveTurn, keep: Keep, *, unread: bool) -> bool:
        """Aborts a relayed turn at its owner, or for lack of readers (`unread`, see `Abort`) at the replica from which
        it is relayed, which may have other readers. Returns whether the turn continues. Raises the other replica's
        refusal."""
        key = turn.request.key
        assert key is not None
        teller = self._tellers.get(turn) if unread else None
        if (url := teller.url if teller is not None else await self._locate(key)) is not None:
            tenant, session = key
            asked = Abort(tenant=tenant, session=session, name=turn.id, keep=keep, unread=unread, reader=self.reader)
            answer = await self._between.ask(url, asked)
            return bool(answer) and msgspec.msgpack.decode(answer, type=bool)
        if (again := self._turns.again(turn)) is None:
            return False
        if unread:
            return await self._turns.unread(again, self.reader)
        await self._turns.abort(again, keep)
        return False


async def news(turn: LiveTurn, start: tuple[int, int], reader: str) -> AsyncIterator[News]:
    """Yields the output of a turn until it has ended. `start`: the numbers of tokens and characters to skip. `reader`:
    the replica that reads this."""
    changed = asyncio.Event()
    turn.listeners.append(changed.set)
    turn.readers += 1
    turn.followers[reader] += 1
    try:
        unsaid, told = Unsaid(*start), len(turn.deltas)
        if turn.deltas and (more := unsaid.of(turn.reply())) is not None:
            yield News(delta=more)
        while True:
            changed.clear()
            for delta in turn.deltas[told:]:
                told += 1
                if (more := unsaid.of(delta)) is not None:
                    yield News(delta=more)
            if turn.error is not None:
                yield News(refusal=refusal_of(0, turn.error))
            if turn.ended and told == len(turn.deltas):
                return
            await changed.wait()
    finally:
        turn.readers -= 1
        turn.followers[reader] -= 1
        turn.listeners.remove(changed.set)
