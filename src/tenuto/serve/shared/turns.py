"""The registry of open and recently ended turns."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec

from tenuto.base.errors import Disconnected, IllegalTransition, KeyReused, NotFound, ResultNotKept, TenutoError
from tenuto.base.turns import Delta, Keep
from tenuto.base.views import Erased, SessionKey, Ticket
from tenuto.base.wire.fleet_messages import TakeMove
from tenuto.base.wire.link import Link, TurnNews
from tenuto.base.wire.messages import AbortTurn, CloseSession, EraseSession, FindTurn, StartTurn, Withdraw
from tenuto.base.wire.moves import LiveStream
from tenuto.serve.shared.idempotency import REUSED, IdempotencyKeys, RequestKey
from tenuto.serve.shared.live_turn import LiveTurn, Source
from tenuto.serve.shared.retention import EndedTurns
from tenuto.serve.shared.session_queue import SessionQueues
from tenuto.serve.shared.spared import SparedTurns
from tenuto.serve.shared.tasks import Background


class Turns:
    """Starts turns on an engine and ends them.

    Invariant: `_turns` has every open turn, counted by `open`, and those that `_ended` retains.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._turns: dict[str, LiveTurn] = {}  # by id
        self._ended = EndedTurns()
        self.queues = SessionQueues()
        self._keys = IdempotencyKeys(self._outlived)
        self._background = Background()
        self.open = Counter[str]()  # open turns, by tenant
        self.spared = SparedTurns()  # open turns that count at other replicas
        # Called, in the context of its request, with every turn that goes to the engine.
        self.on_start: list[Callable[[LiveTurn], None]] = []
        self.on_delta: list[Callable[[LiveTurn, Delta], None]] = []  # called with every delta of a turn
        self.on_moved: list[Callable[[LiveTurn], None]] = []  # called with every turn that has moved to another replica
        self.on_end: list[Callable[[LiveTurn], None]] = []  # called with every accepted turn that ends

    # -- looking up

    def find(self, tenant: str, session: str | None, turn_id: str) -> LiveTurn:
        """Returns a turn of one session by id. Raises `NotFound`."""
        turn = self._turns.get(turn_id)
        if turn is None or turn.tenant != tenant or turn.request.session != session:
            raise NotFound(f"there is no turn {turn_id!r} here; it never existed, or ended too long ago")
        return turn

    def open_turns(self, tenant: str | None = None) -> list[LiveTurn]:
        """Returns the open turns of `tenant`, or of all tenants."""
        return [turn for turn in self._turns.values() if not turn.ended and tenant in (None, turn.tenant)]

    # -- starting

    async def start(
        self,
        request: StartTurn,
        *,
        queue: bool = False,
        continues: bool = False,
        request_key: RequestKey | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> LiveTurn:
        """Starts a turn and returns it when the engine has accepted it. If cancelled, this leaves no turn behind.

        `queue`: if the session has an open turn, wait for its end, unless too many turns of the tenant wait already.
        Without `queue`, raise `SessionBusy`. `continues`: the turn continues without readers. `request_key`: if it was
        used before, return the earlier turn. `check` may raise to refuse a new turn.
        """
        if request_key is not None and request.session is not None:
            request = msgspec.structs.replace(request, once=request_key)
        turn = LiveTurn(request, continues=continues, once=request_key, name=request.name or None)
        if (request.resumable or request.about) and request_key is None:  # other replicas find the result by its name
            turn.request = msgspec.structs.replace(turn.request, once=(turn.id, b""))
        if request_key is not None and (known := await self._keys.find(request, request_key)) is not None:
            return await self._attach(known)
        check()
        if request_key is not None:
            self._keys.add(turn)
        self._add(turn)
        starting = asyncio.ensure_future(self._start(turn, queue=queue))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            self.abandon(turn)
            raise
        turn.require_accepted()
        return turn

    def begin_again(self, request: StartTurn) -> LiveTurn:
        """Starts a turn that another replica had accepted, under the same name, unless it is here."""
        if (known := self._turns.get(request.name)) is not None and not known.ended:
            if known.elsewhere is None:
                return known
            self.moved(known)  # its stream continues with the output of the new one
        turn = LiveTurn(request, continues=True, once=request.once, name=request.name)
        turn.reading = request.reading
        if turn.once is not None:
            self._keys.add(turn)
        self._add(turn)
        self.spared.came(turn)
        self._background.begin(self._start(turn, queue=True))
        return turn

    def again(self, turn: LiveTurn) -> LiveTurn | None:
        """Returns the turn that has taken the place of `turn`, if there is one: it had moved, and was begun again
        here."""
        found = self._turns.get(turn.id)
        return found if found is not turn else None

    def relayed(self, turn_id: str) -> LiveTurn | None:
        """Returns the open turn of this id, if it has moved to another replica and readers here follow it."""
        known = self._turns.get(turn_id)
        return known if known is not None and not known.ended and known.elsewhere is not None else None

    def stays(self, turn: LiveTurn) -> None:
        """Records that the session of a turn has not left. If the engine has ended the turn meanwhile, it ends now."""
        turn.elsewhere = None
        lost, turn.lost = turn.lost, None
        if lost is not None and turn.source is not None:
            self._deliver(turn.source, lost)

    def moved(self, turn: LiveTurn) -> None:
        """Records that the session of a turn belongs to another replica, which counts the turn: its next turn need not
        wait for this one."""
        turn.lost = None
        for heard in self.on_moved:
            heard(turn)
        self.spared.add(turn)
        if turn.request.key is not None:
            self.queues.leave(turn, turn.request.key)

    def _add(self, turn: LiveTurn) -> None:
        self._turns[turn.id] = turn
        self.open[turn.tenant] += 1

    async def recall(self, tenant: str, session: str, turn_id: str) -> LiveTurn:
        """Returns a turn like `find`, or one that was committed in another process and whose result is kept. Raises
        `NotFound`."""
        try:
            return self.find(tenant, session, turn_id)
        except NotFound:
            found = (await self._link.call(FindTurn(tenant=tenant, session=session, name=turn_id))).turn
            if found is None or found.omitted:
                raise
        turn = LiveTurn(StartTurn(kind="turn", tenant=tenant, session=session, about=found.about), name=turn_id)
        turn.reading = found.reading
        turn.deliver(found.ticket)
        turn.deliver(found.output)
        return turn

    async def _attach(self, turn: LiveTurn) -> LiveTurn:
        """Waits until the engine has accepted the turn, as a reader, so that it is not abandoned meanwhile."""
        turn.readers += 1
        try:
            await turn.answered.wait()
        except asyncio.CancelledError:
            turn.readers -= 1
            self.abandon(turn)
            raise
        turn.readers -= 1
        turn.require_accepted()
        return turn

    async def _start(self, turn: LiveTurn, *, queue: bool) -> None:
        request: StartTurn | None = turn.request
        try:
            if turn.request.key is not None:
                request = await self._begin(turn, turn.request.key, queue=queue)
            if request is None:
                return
            for heard in self.on_start:
                heard(turn)
            await self._link.start(request, partial(self._deliver, Source(turn, (0, 0))))
        except TenutoError as error:
            turn.fail(error)
            self._end(turn)
        except Exception:
            turn.fail(TenutoError("the server failed; its log says why"))
            self._end(turn)
            raise

    async def _begin(self, turn: LiveTurn, session: SessionKey, *, queue: bool) -> StartTurn | None:
        """Waits until the turn may begin in its session. Returns its request as `SessionQueues.begin` does, or `None`
        if the turn was committed before. Later turns of the session do not overtake it during the lookup."""
        once = turn.once
        with self.queues.arriving(session) as all_before:
            if once is not None and await self._found(turn, once):
                return None
            await all_before()
            if turn.refused is not None:
                raise turn.refused
            begun = self.queues.begin(turn, session, queue=queue)
        return await begun

    async def _found(self, turn: LiveTurn, once: tuple[str, bytes]) -> bool:
        """Looks for an earlier commit of the turn in the engine. Returns whether there is one; `turn` then ends with
        its result. Raises `KeyReused` if its request was a different one, or `ResultNotKept`."""
        key, digest = once
        asked = FindTurn(tenant=turn.tenant, session=turn.request.session or "", once=key)
        found = (await self._link.call(asked)).turn
        if found is None:
            return False
        if found.digest != digest:
            raise KeyReused(REUSED)
        if found.omitted:
            version = found.output.result.version if found.output.result is not None else 0
            raise ResultNotKept(
                f"the turn of this idempotency key was committed, as version {version} of its session, but its answer "
                f"took {found.omitted} bytes and was not kept; allowed: read its tokens among the session's turns"
            )
        if found.name not in self._turns:
            self._turns[found.name] = self._turns.pop(turn.id)
            turn.id = found.name
        turn.deliver(found.ticket)
        turn.deliver(found.output)
        self._end(turn)
        return True

    async def _outlived(self, turn: LiveTurn) -> bool:
        """Whether the session of an ended turn with a key was closed, and another one has its id."""
        if turn.request.session is None or turn.once is None or turn.ticket is None:
            return False
        asked = FindTurn(tenant=turn.tenant, session=turn.request.session, once=turn.once[0])
        birth = (await self._link.call(asked)).birth
        return birth is not None and turn.ticket.birth not in (birth, 0)

    # -- deltas and ends

    def relay(self, source: Source, delta: Delta) -> None:
        """Takes a delta of a turn from the replica to which it has moved, which counts it."""
        turn = source.turn
        if not turn.ended and (new := source.new(delta)) is not None:
            turn.deliver(new)
            if new.result is not None:
                self._end(turn)

    def lose(self, turn: LiveTurn, error: TenutoError) -> None:
        """Ends a turn that no longer runs anywhere, as far as this replica can find out."""
        if not turn.ended:
            turn.fail(error)
            self._end(turn)

    async def receive(self, turn: LiveTurn, stream: LiveStream, request: TakeMove) -> None:
        """Takes over a turn of another replica, whose readers there have got `stream`. `turn`: a new one, or the one
        that was here before (`relayed`), whose relay has ended. If the engine refuses it, raises the refusal, and the
        turn is not here."""
        key = turn.request.key
        assert key is not None
        before, gone = self._turns.get(turn.id), turn.elsewhere
        if turn is not before:
            self._add(turn)
            if turn.once is not None:
                self._keys.add(turn)
        self.queues.continues(turn, key)
        source: Source | None = None

        def deliver(news: TurnNews) -> None:
            nonlocal source
            if isinstance(news, Ticket):  # it comes first
                turn.elsewhere, source = None, turn.goes_on(stream)
            if source is not None:
                self._deliver(source, news)

        try:
            await self._link.start(request, deliver)
        except BaseException as error:
            self.queues.leave(turn, key)
            turn.elsewhere = gone
            if turn is not before:
                self._not_received(turn, before, error)
            raise
        self.spared.came(turn)

    def _not_received(self, turn: LiveTurn, before: LiveTurn | None, error: BaseException) -> None:
        """Undoes what `receive` has done for a new turn. `before`: the one that had its id."""
        self.open[turn.tenant] -= 1
        self._keys.release(turn)
        del self._turns[turn.id]
        if before is not None:
            self._turns[turn.id] = before
        turn.fail(error if isinstance(error, TenutoError) else Disconnected("the turn has not moved here"))

    def _deliver(self, source: Source, news: TurnNews) -> None:
        """Handles a message of this replica's engine about a turn."""
        turn = source.turn
        if not source.current:  # it has moved
            return
        if turn.elsewhere is not None and isinstance(news, TenutoError):
            turn.lost = news  # kept until its move is settled: it may continue elsewhere
            return
        new = source.new(news) if isinstance(news, Delta) else news
        if new is None:
            return
        turn.deliver(new)
        if isinstance(new, Delta):
            for heard in self.on_delta:
                heard(turn, new)
            if new.result is None:
                return
        if turn.ended and turn.ticket is not None:
            for heard_end in self.on_end:
                heard_end(turn)
            self._end(turn)

    def _end(self, turn: LiveTurn) -> None:
        """Lets the next turn of the session begin. The ended turn is retained if the engine had accepted it, unless
        another replica may go on with it."""
        self.open[turn.tenant] -= 1
        self.spared.count(turn)
        if not turn.committed:
            self._keys.release(turn)
        else:
            turn.request = msgspec.structs.replace(turn.request, about=b"")  # kept with the result
        if self.again(turn) is not None:  # it was begun again here, or has come back as another one
            pass
        elif turn.ticket is None or (turn.request.resumable and turn.error is not None):
            self._turns.pop(turn.id, None)
        else:
            for dropped in self._ended.add(turn):
                if self._turns.get(dropped.id) is dropped:
                    del self._turns[dropped.id]
                self._keys.release(dropped)
        if turn.request.key is not None:
            self.queues.leave(turn, turn.request.key)

    async def abort(
        self, turn: LiveTurn, keep: Keep = None, refusal: TenutoError | None = None, *, unread: bool = False
    ) -> None:
        """Ends the turn and commits the part given by `keep`; "delivered" is the part its readers have received. An
        ended turn stays as it is; one that still waits for its session gets `refusal`. `unread`: only for lack of
        readers, so it goes on if it has moved, and has readers there."""
        self._refuse_waiting(turn, refusal)
        await turn.answered.wait()
        if turn.ended or turn.ticket is None:
            return
        if keep == "delivered":
            keep = turn.delivered
        if not unread:
            turn.begin_abort()
        if turn.elsewhere is not None and await turn.elsewhere(keep, unread):
            if turn.rolling_back or not unread:
                with suppress(TenutoError):
                    await turn.finished()
            return
        turn.begin_abort()
        await self._link.call(
            AbortTurn(tenant=turn.tenant, session=turn.ticket.session, turn=turn.ticket.turn, keep=keep)
        )
        with suppress(TenutoError):
            await turn.finished()

    async def abort_quietly(self, turn: LiveTurn) -> None:
        """Calls `abort` and ignores errors: the turn, its session or the engine may have ended meanwhile."""
        with suppress(TenutoError):
            await self.abort(turn)

    def abandon(self, turn: LiveTurn) -> None:
        """Handles the departure of a reader. If it was the last, the turn is rolled back unless it continues without
        readers."""
        if turn.readers == 0 and not turn.ended and not turn.continues:
            turn.rolling_back = True
            self._background.spawn(self._roll_back(turn))

    async def unread(self, turn: LiveTurn, follower: str) -> bool:
        """Rolls a turn back for which the replica `follower`, which relays it, has no readers any more. Returns whether
        it goes on, since it has other readers here, or where it has moved."""
        if turn.readers > turn.followers[follower]:
            return True
        if not turn.ended:
            turn.rolling_back = True
            await self._roll_back(turn)
        return not turn.ended

    async def _roll_back(self, turn: LiveTurn) -> None:
        self._refuse_waiting(turn)
        if not turn.answered.is_set():
            await self.withdraw(turn.id)
        with suppress(TenutoError):
            await self.abort(turn, unread=True)

    def _refuse_waiting(self, turn: LiveTurn, refusal: TenutoError | None = None) -> None:
        refusal = refusal or IllegalTransition("the turn was aborted before it began")
        turn.refused = refusal  # it may not be in the queue yet
        self.queues.refuse(turn, refusal)

    async def withdraw(self, name: str) -> None:
        """Withdraws the input of this name, which no client waits for; see `messages.Withdraw`."""
        with suppress(TenutoError):
            await self._link.call(Withdraw(name=name))

    async def close_if_open(self, session: SessionKey, *, finish: bool = False, version: int | None = None) -> None:
        """Calls `close_session` and ignores errors: the session may not be open, or the engine may have ended."""
        with suppress(TenutoError):
            await self.close_session(session, finish=finish, version=version)

    async def close_session(self, session: SessionKey, *, finish: bool = False, version: int | None = None) -> None:
        """Closes a session and refuses the turns that wait for it. Raises the engine's refusal."""
        tenant, session_id = session
        with self.queues.closing(session):
            await self._link.call(CloseSession(tenant=tenant, session=session_id, finish=finish, version=version))

    async def erase_session(self, session: SessionKey, *, version: int | None = None) -> Erased:
        """Closes a session, refuses the turns that wait for it, and forgets those that have ended. Returns the
        receipt."""
        tenant, session_id = session
        with self.queues.closing(session):
            erased = await self._link.call(EraseSession(tenant=tenant, session=session_id, version=version))
        return msgspec.structs.replace(erased, answers=self.forget_ended(session))

    def forget_ended(self, session: SessionKey) -> int:
        """Forgets the ended turns of a session, and returns their number."""
        ended = [turn for turn in self._turns.values() if turn.request.key == session and turn.ended]
        for turn in ended:
            self._ended.forget(turn)
            self._keys.release(turn)
            del self._turns[turn.id]
        return len(ended)
