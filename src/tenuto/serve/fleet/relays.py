"""Relays: turns that have moved to other replicas go on in the streams of this one's clients."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from tenuto.base.errors import Disconnected, NotFound, TenutoError
from tenuto.base.turns import Keep
from tenuto.base.views import SessionKey
from tenuto.base.wire.between import Abort, Follow
from tenuto.base.wire.messages import error_of
from tenuto.serve.fleet.asking import Between, news_of
from tenuto.serve.fleet.peers import Broken, Reply
from tenuto.serve.shared.live_turn import LiveTurn
from tenuto.serve.shared.turns import Turns

PAUSE_SECONDS = 0.05
PATIENCE_SECONDS = 10.0
"""How long, besides a lease, a turn is looked for that its last replica no longer tells about."""

Locate = Callable[[SessionKey], Awaitable[str | None]]
"""Returns the address of a session's owner; `None` if that is this replica, or there is no such session."""
Silent = Callable[[Reply, str], "asyncio.Task[None]"]
"""Watches an answer of the replica at an address, and breaks it once that replica no longer lives."""


class Relays:
    """Passes on what other replicas tell about turns that have moved there, from where this replica's own stream ended.

    If the connection breaks, the session may have moved again, or another replica has begun the turn again: it is asked
    for at the owner. Only if it is nowhere for too long, the stream ends with an error.
    """

    def __init__(self, turns: Turns, between: Between, locate: Locate, watch: Silent, lease: float) -> None:
        self._turns = turns
        self._between = between
        self._locate = locate
        self._watch = watch
        self._patience = lease + PATIENCE_SECONDS
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by the turn's name

    def begin(self, turn: LiveTurn, reading: Callable[[], Awaitable[None]] | None = None) -> None:
        """Relays a turn. `reading`: reads what is told at first."""
        self.end(turn)
        self._tasks[turn.id] = asyncio.ensure_future(self._run(turn, reading))

    def end(self, turn: LiveTurn) -> None:
        """Ends a relay: the turn has come back, or has ended."""
        if (task := self._tasks.pop(turn.id, None)) is not None:
            task.cancel()

    async def read(self, turn: LiveTurn, reply: Reply, url: str) -> None:
        """Passes on an answer with news. Raises `Broken`."""
        watching = self._watch(reply, url)
        try:
            async for news in news_of(reply):
                if news.delta is not None:
                    self._turns.relay(turn, news.delta)
                elif news.refusal is not None:
                    raise Broken(str(error_of(news.refusal)))
        finally:
            watching.cancel()

    async def _run(self, turn: LiveTurn, reading: Callable[[], Awaitable[None]] | None) -> None:
        clock = asyncio.get_running_loop().time
        if reading is not None:
            with suppress(Broken, TenutoError):
                await reading()
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
        self._tasks.pop(turn.id, None)
        if not turn.ended:
            self._turns.relay(turn, error)

    async def _follow(self, turn: LiveTurn) -> None:
        key = turn.request.key
        assert key is not None
        if (url := await self._locate(key)) is None:
            raise NotFound("its session is here, or was closed")
        tenant, session = key
        said = turn.reply()
        tokens, characters = len(said.tokens), len(said.text)
        follow = Follow(tenant=tenant, session=session, name=turn.id, tokens=tokens, characters=characters)
        async with self._between.stream(url, follow) as reply:
            await self.read(turn, reply, url)

    async def abort(self, turn: LiveTurn, keep: Keep) -> None:
        """Aborts a relayed turn where it runs. Raises that replica's refusal."""
        key = turn.request.key
        assert key is not None
        if (url := await self._locate(key)) is not None:
            await self._between.ask(url, Abort(tenant=key[0], session=key[1], name=turn.id, keep=keep))
