"""Moves of this replica's sessions to others."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

import msgspec
import structlog

from tenuto.base.errors import Disconnected, EngineStopped, Misdirected, SessionBusy, TenutoError
from tenuto.base.fleet_views import MovesView
from tenuto.base.turns import Keep
from tenuto.base.views import SessionKey
from tenuto.base.wire.between import Drop, Put, Reserve, Take
from tenuto.base.wire.fleet_messages import BeginMove, CopyMove, HoldMove, SettleMove
from tenuto.base.wire.moves import LiveStream, StateEnd, Surplus
from tenuto.serve.fleet.asking import Between
from tenuto.serve.fleet.peers import Broken
from tenuto.serve.fleet.relays import Relays
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.live_turn import LiveTurn, Source

log = structlog.get_logger("tenuto.fleet")

MOVED = "the session has moved to another replica; ask again"
RETRY_SECONDS = 0.2
END_BYTES = 2**22
"""How much state is sent together with the request that changes the owner."""
ENDING_SECONDS = 1.0
TRIES = 8
"""How often a move waits for the end of a turn that cannot continue elsewhere."""


class Moving:
    """Moves sessions away from this replica; see `runtime.moves.Moves`, which carries out each part.

    After any failure, `_settle` finds out who owns the session. Until that is known, the session stays held, and
    requests for it wait. The stream of its open turn continues here, with deltas from the new owner.
    """

    def __init__(self, edge: Edge, between: Between, relays: Relays) -> None:
        self._edge = edge
        self._between = between
        self._relays = relays
        self._held: dict[SessionKey, asyncio.Event] = {}  # sessions that are held, until their owner is known
        self._under_way: dict[SessionKey, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._done = self._failed = 0
        self.on_move: list[Callable[[str, float], None]] = []  # called with the outcome of every move, and its seconds

    @property
    def view(self) -> MovesView:
        under_way = {session: url for (_, session), url in self._under_way.items()}
        return MovesView(under_way=under_way, done=self._done, failed=self._failed)

    async def settled(self, keys: Iterable[SessionKey]) -> None:
        """Waits until none of these sessions is held."""
        for key in keys:
            while (held := self._held.get(key)) is not None:
                await held.wait()

    async def move(self, key: SessionKey, url: str, relieves: Surplus | None = None) -> None:
        """Moves a session to the replica at `url`, even if the caller is cancelled meanwhile. `relieves`: see
        `BeginMove`; such a move does not wait for a turn that cannot continue elsewhere. Raises the error with which
        the move failed; the session then continues here."""
        moving = asyncio.ensure_future(self._move(key, url, relieves))
        self._tasks.add(moving)
        moving.add_done_callback(self._tasks.discard)
        moving.add_done_callback(_look)
        await asyncio.shield(moving)

    async def close(self) -> None:
        """Ends the moves that are under way. Those that do not end soon by themselves are given up."""
        for _ in range(2):
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=ENDING_SECONDS)
            for moving in self._tasks:
                moving.cancel()

    def holds(self, key: SessionKey) -> bool:
        """Whether this session is held, and its owner not known yet."""
        return key in self._held

    async def _move(self, key: SessionKey, url: str, relieves: Surplus | None) -> None:
        if key in self._under_way:
            raise SessionBusy(f"session {key[1]} is moving already")
        self._under_way[key] = url
        began, done = time.perf_counter(), False
        try:
            for last in range(TRIES if relieves is None else 1, 0, -1):
                try:
                    await self._try(key, url, relieves)
                    break
                except SessionBusy:  # its turn is of a kind that is waited for
                    if (turn := self._edge.turns.queues.open_turn(key)) is None or last == 1:
                        raise
                    if turn.accepted:
                        await turn.over()
                    else:  # it has just begun
                        await asyncio.sleep(RETRY_SECONDS)
        except BaseException as error:
            self._failed += 1
            log.warning("move failed", session=key[1], to=url, reason=str(error))
            raise
        else:
            done = True
            self._done += 1
            log.info("moved", session=key[1], to=url, ms=round(1000 * (time.perf_counter() - began)))
        finally:
            del self._under_way[key]
            for heard in self.on_move:
                heard("done" if done else "failed", time.perf_counter() - began)

    async def _try(self, key: SessionKey, url: str, relieves: Surplus | None) -> None:
        tenant, session = key
        name, link = secrets.token_hex(8), self._edge.link
        offer = await link.call(BeginMove(tenant=tenant, session=session, move=name, relieves=relieves))
        try:
            await self._between.ask(url, Reserve(move=name, offer=offer))
            pieces = await link.call(CopyMove(move=name))
            while pieces:
                ahead = asyncio.ensure_future(link.call(CopyMove(move=name)))  # copied while these are sent
                try:
                    for piece in pieces:
                        await self._between.ask(url, Put(move=name, piece=piece))
                finally:
                    await asyncio.wait((ahead,))
                pieces = ahead.result()
        except BaseException:
            await self._give_up(name, url)
            raise
        held = self._held[key] = asyncio.Event()
        try:
            await _Handover(self._edge, self._between, self._relays, key, url, name, held).carry_out()
        except BaseException:
            self._drop_there(name, url)
            raise
        finally:
            del self._held[key]
            held.set()

    async def _give_up(self, name: str, url: str) -> None:
        self._drop_there(name, url)
        with suppress(EngineStopped):
            await self._edge.link.call(SettleMove(move=name))

    def _drop_there(self, name: str, url: str) -> None:
        self._edge.spawn(_quietly(self._between, url, Drop(move=name)))


class _Handover:
    """The end of a move, once the session is held. If it fails, `carry_out` raises the error once it is known that the
    session is still here."""

    def __init__(
        self, edge: Edge, between: Between, relays: Relays, key: SessionKey, url: str, name: str, held: asyncio.Event
    ) -> None:
        self._edge = edge
        self._between = between
        self._relays = relays
        self._key = key
        self._url = url
        self._name = name
        self._held = held
        self._here = True  # whether this replica is the owner, once `held` is set
        self._asked = False  # whether the owner may have been changed

    async def carry_out(self) -> None:
        turn = self._edge.turns.queues.open_turn(self._key)
        accepted = turn is not None and turn.accepted
        if turn is not None:
            turn.elsewhere = partial(self._abort, turn)
        try:
            await self._hand_over(turn, accepted=accepted)
        except BaseException as error:
            if not isinstance(error, EngineStopped) and await self._settle():
                if turn is not None:
                    self._edge.turns.stays(turn)
                raise
            if isinstance(error, EngineStopped):
                if turn is not None:
                    self._edge.turns.lose(turn, error)
                raise
            self._gone(turn, None)

    async def _abort(self, turn: LiveTurn, keep: Keep, unread: bool) -> bool:
        """Aborts the turn if it has moved; returns whether it has. `unread`: see `Turns.abort`."""
        await self._held.wait()
        if self._here:
            return False
        try:
            goes_on = await self._relays.abort(turn, keep, unread=unread)
        except TenutoError:
            if not unread:
                raise
            goes_on = True  # as far as is known here; when this replica leaves, that has the effect of its request
        if goes_on:
            turn.rolling_back = False
            if not turn.readers:  # nobody needs it here, and a relay would count as a reader there
                self._relays.end(turn)
                self._edge.turns.lose(turn, Disconnected("the turn goes on at another replica"))
        return True

    async def _hand_over(self, turn: LiveTurn | None, *, accepted: bool) -> None:
        """`accepted`: whether the engine had accepted the turn. Only then has all of its output so far come before the
        answer to `HoldMove`."""
        end = await self._edge.link.call(HoldMove(move=self._name))
        if end.turn is None:
            if turn is not None:  # it has ended, or will be refused
                self._edge.turns.stays(turn)
            turn = None
        elif turn is None or not accepted:
            raise SessionBusy("the session's turn has just begun; move it again")
        tenant, session = self._key
        stream = _stream(turn)
        end = await self._send(end)
        reader = self._relays.reader
        take = Take(move=self._name, tenant=tenant, session=session, end=end, stream=stream, reader=reader)
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked = True
        reading = partial(self._read, take, turn, taken)
        if turn is None:
            await reading()
            await taken
        else:
            self._relays.begin(turn, reading, self._url)
            try:
                await taken
            except BaseException:
                self._relays.end(turn)
                raise
        self._gone(turn, taken)
        await self._edge.link.call(SettleMove(move=self._name, gone=True))

    async def _send(self, end: StateEnd) -> StateEnd:
        """Sends pieces of the state's end ahead if it is large. Returns the end with the other pieces."""
        left, kept, size = list(end.pieces), list(end.kept), sum(len(piece.data) for piece in end.pieces)
        while left and size > END_BYTES:
            piece = left.pop(0)
            await self._between.ask(self._url, Put(move=self._name, piece=piece))
            kept[piece.group] = piece.first + len(piece.checksums)
            size -= len(piece.data)
        return msgspec.structs.replace(end, pieces=left, kept=kept)

    async def _read(self, take: Take, turn: LiveTurn | None, taken: asyncio.Future[None]) -> bool:
        """Asks the other replica to take the session, and reads the turn's output from its answer. Returns False if it
        refuses; `taken` then has its error. Raises an error if the rest of the answer is lost."""
        try:
            async with self._between.stream(self._url, take) as reply:
                if not taken.done():
                    taken.set_result(None)
                if turn is None:
                    with suppress(Broken, TenutoError):  # it has moved, and the rest of the answer is empty
                        await reply.rest()
                else:
                    await self._relays.read(Source(turn, turn.position), reply)
        except BaseException as error:
            if taken.done():
                raise
            ended = isinstance(error, asyncio.CancelledError)
            taken.set_exception(Disconnected("the move was broken off") if ended else error)
            if not isinstance(error, Exception):
                raise
            return False
        return True

    def _gone(self, turn: LiveTurn | None, taken: asyncio.Future[None] | None) -> None:
        """Notes that another replica is the owner. Turns that wait here are started there."""
        self._here = False
        if turn is not None and taken is None and not turn.ended:  # from its present owner
            self._relays.begin(turn)
        for waiting in self._edge.turns.queues.waiting_for(self._key):
            self._edge.turns.queues.refuse(waiting, Misdirected(MOVED))
        if turn is not None:
            self._edge.turns.moved(turn)

    async def _settle(self) -> bool:
        """Finds out whether this replica is still the owner. If it is, the session continues here."""
        while True:
            try:
                return await self._edge.link.call(SettleMove(move=self._name, asked=self._asked))
            except EngineStopped:
                return True
            except TenutoError as error:
                log.warning("a move cannot be settled yet", session=self._key[1], reason=str(error))
                await asyncio.sleep(RETRY_SECONDS)


def _stream(turn: LiveTurn | None) -> LiveStream | None:
    if turn is None or turn.ticket is None or turn.source is None:
        return None
    return LiveStream(
        name=turn.id,
        ticket=turn.ticket,
        said=turn.received(),
        reading=turn.reading,
        once=turn.once,
        continues=turn.continues,
        resumable=turn.request.resumable,
        about=turn.request.about,
        ahead=turn.source.ahead,
    )


async def _quietly(between: Between, url: str, request: Drop) -> None:
    with suppress(TenutoError):
        await between.ask(url, request)


def _look(done: asyncio.Future[None]) -> None:
    """Marks an error as seen, if nobody waits for it any more."""
    if not done.cancelled():
        done.exception()
