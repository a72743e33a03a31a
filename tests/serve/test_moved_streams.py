"""Streams of turns that move between replicas, also back to one that has read them on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from tenuto.base.errors import Disconnected, Misdirected, NoRoom, NotAcknowledged, NotFound, TenutoError
from tenuto.base.wire.between import Abort, Follow, Put, Take
from tenuto.base.wire.fleet_messages import HoldMove, TakeMove
from tenuto.base.wire.messages import AbortTurn, StartTurn
from tenuto.base.wire.moves import LiveStream, StatePiece
from tenuto.serve.fleet import moving, receiving, relays
from tenuto.serve.fleet.peers import Broken
from tests.serve.moving_edges import KEY, TICKET, Edge, delta, held, result, settled, until

WHOLE = tuple(range(6))


def run(story: Callable[[], Awaitable[None]]) -> None:
    """Runs a story, which must end."""

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await story()

    asyncio.run(bounded())


def back(take: Take, tokens: int, sampled: int) -> Take:
    """Returns the request with which another replica gives the session back. Its readers have seen so many tokens, and
    its engine has sampled so many."""
    assert take.stream is not None
    said = msgspec.structs.replace(
        delta(tokens - 1), tokens=tuple(range(tokens)), text="".join(f"{token} " for token in range(tokens))
    )
    stream = msgspec.structs.replace(take.stream, said=said)
    if tokens > sampled:
        stream = msgspec.structs.replace(stream, ahead=(tokens - sampled, 2 * (tokens - sampled)))
    return msgspec.structs.replace(take, move="back", end=held(sampled), stream=stream)


def test_a_turn_that_comes_back_says_nothing_twice_although_its_old_relay_is_still_being_read() -> None:
    async def story() -> None:
        edge = Edge()
        turn, _ = await edge.start(delta(0), delta(1))
        await edge.move(2)
        edge.others.answers[0].tell(delta(2))
        await until(lambda: len(turn.deltas) == 3)
        edge.receive(back(edge.others.take(), 4, 4))
        asked = await edge.link.last(TakeMove)
        edge.others.answers[0].tell(delta(3))  # it was under way
        await settled()
        edge.link.answer(asked, TICKET)
        edge.link.tell(asked, delta(4), delta(5), result(6))
        await turn.over()
        assert turn.reply().tokens == WHOLE
        assert turn.reply().text == "0 1 2 3 4 5 "

    run(story)


def test_a_turn_that_does_not_come_back_after_all_is_followed_where_it_is() -> None:
    async def story() -> None:
        edge = Edge()
        turn, _ = await edge.start(delta(0))
        await edge.move(1)
        refused = edge.receive(back(edge.others.take(), 3, 3))
        edge.link.refuse(await edge.link.last(TakeMove), NoRoom("no room"))
        with pytest.raises(NoRoom):
            await refused
        await settled()
        assert isinstance(edge.others.asked[-1], Follow)
        edge.others.answers[-1].tell(*map(delta, range(1, 6)), result(6))
        await turn.over()
        assert turn.reply().tokens == WHOLE

    run(story)


def test_a_stream_ahead_of_its_engine_skips_what_it_has_also_after_the_next_move() -> None:
    """Its readers have five tokens. Then the turn was begun again elsewhere, and it comes back after two."""

    async def story() -> None:
        edge, next_one = Edge(), Edge()
        turn, _ = await edge.start(delta(0))
        await edge.move(1)
        edge.others.answers[0].tell(*map(delta, range(1, 5)))
        await until(lambda: len(turn.deltas) == 5)
        asked = await edge.arrive(back(edge.others.take(), 2, 2))
        edge.link.tell(asked, delta(2))
        assert turn.reply().tokens == WHOLE[:5]
        await edge.move(3)
        asked = await next_one.arrive(edge.others.take())
        moved = next_one.turns.find("", "s", turn.id)
        next_one.link.tell(asked, *map(delta, range(3, 6)), result(6))
        assert moved.reply().tokens == WHOLE
        assert moved.reply().text == "0 1 2 3 4 5 "

    run(story)


def test_a_stream_is_handed_over_with_all_that_the_engine_has_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session is to move on before the engine's answer to the move before is here, which its output follows."""
    monkeypatch.setattr(moving, "RETRY_SECONDS", 0)

    async def story() -> None:
        first, edge = Edge(), Edge()
        await first.start(delta(0))
        await first.move(1)
        edge.receive(first.others.take())
        asked = await edge.link.last(TakeMove)
        edge.link.holds = held(3)
        edge.link.stays = True
        moving_on = asyncio.ensure_future(edge.moving.move(KEY, "other"))
        await edge.link.last(HoldMove)
        await settled()
        edge.link.answer(asked, TICKET)
        edge.link.tell(asked, delta(1), delta(2))
        await moving_on
        stream = edge.others.take().stream
        assert stream is not None
        assert stream.said.tokens == WHOLE[:3]

    run(story)


def test_the_error_that_ends_a_turn_while_it_moves_is_told_if_the_move_fails() -> None:
    async def story() -> None:
        edge = Edge()
        turn, started = await edge.start(delta(0))
        edge.link.holds, edge.others.error = held(1), NoRoom("no room")
        moved = asyncio.ensure_future(edge.moving.move(KEY, "other"))
        await edge.link.last(HoldMove)
        edge.link.refuse(started, NotAcknowledged("the disk is full"))
        with pytest.raises(NoRoom):
            await moved
        assert turn.ended
        assert isinstance(turn.error, NotAcknowledged)

    run(story)


def test_a_move_that_fails_says_what_failed_first() -> None:
    """The next pieces are copied while the ones before are sent, and by then nothing can be copied any more."""

    async def story() -> None:
        edge = Edge()
        edge.link.copies = [[StatePiece(0, 0, memoryview(b"unit"), [0])], NotFound("the session was closed")]
        edge.others.refusals[Put] = NoRoom("no room")
        with pytest.raises(NoRoom):
            await edge.moving.move(KEY, "other")

    run(story)


def test_a_move_that_fails_unexpectedly_says_so_and_the_turn_goes_on() -> None:
    async def story() -> None:
        edge = Edge()
        turn, started = await edge.start(delta(0))
        edge.link.holds, edge.others.error = held(1), ValueError("a bug")
        moved = asyncio.ensure_future(edge.moving.move(KEY, "other"))
        await settled()
        assert moved.done()
        assert isinstance(moved.exception(), ValueError)
        edge.link.tell(started, *map(delta, range(1, 6)), result(6))
        assert turn.reply().tokens == WHOLE

    run(story)


def test_readers_of_a_turn_that_was_begun_again_here_follow_it_when_it_moves() -> None:
    async def story() -> None:
        edge = Edge()
        turn, started = await edge.start(delta(0))
        await edge.move(1)
        edge.others.answers[0].tell(delta(1))
        await until(lambda: len(turn.deltas) == 2)
        edge.owner = None  # type: ignore[assignment] # this replica
        edge.relays.begin(turn)
        again = edge.turns.begin_again(StartTurn(kind="turn", tenant="", session="s", name=turn.id, resumable=True))
        await until(lambda: edge.link.asked[-1] != started and isinstance(edge.link.asked[-1], StartTurn))
        asked = await edge.link.last(StartTurn)
        edge.link.answer(asked, TICKET)
        edge.link.tell(asked, *map(delta, range(3)))
        await until(lambda: len(turn.deltas) == 3)
        await edge.move(3)
        edge.others.answers[-1].tell(*map(delta, range(3, 6)), result(6))
        await again.over()
        await turn.over()
        assert turn.reply().tokens == again.reply().tokens == WHOLE

    run(story)


def test_what_is_held_back_since_an_abort_began_moves_with_the_stream() -> None:
    async def story() -> None:
        edge, next_one = Edge(), Edge()
        turn, started = await edge.start(delta(0))
        turn.begin_abort()
        edge.link.tell(started, delta(1), delta(2))
        await edge.move(3)
        take = edge.others.take()
        asked = await next_one.arrive(take)
        next_one.link.tell(asked, delta(3))
        moved = next_one.turns.find("", "s", turn.id)
        assert moved.reply().tokens == WHOLE[:4]
        edge.others.answers[0].tell(delta(3), result(4))
        await turn.over()
        assert turn.reply().tokens == WHOLE[:4]

    run(story)


def test_a_stream_of_a_replica_without_this_version_is_not_ahead() -> None:
    stream = LiveStream(name="t", ticket=TICKET, said=delta(0), reading=None, once=None, continues=True, resumable=True)
    old = {name: value for name, value in msgspec.to_builtins(stream).items() if name != "ahead"}
    assert msgspec.convert(old, LiveStream).ahead == (0, 0)


def test_a_relay_that_fails_unexpectedly_ends_its_turn() -> None:
    async def story() -> None:
        edge = Edge()
        turn, _ = await edge.start(delta(0))
        await edge.move(1)
        edge.others.error = ValueError("a bug")
        edge.relays.begin(turn)
        await settled()
        assert turn.ended
        assert isinstance(turn.error, TenutoError)

    run(story)


def test_a_turn_goes_on_for_its_readers_here_when_those_at_a_replica_that_relays_it_have_left() -> None:
    """Its client has repeated the request where the session is now."""

    async def story() -> None:
        edge, next_one = Edge(), Edge()
        turn, _ = await edge.start(delta(0), continues=False)
        await edge.move(1)
        asked = await next_one.arrive(edge.others.take())
        moved = next_one.turns.find("", "s", turn.id)
        reading = asyncio.ensure_future(moved.finished())
        await settled()
        edge.others.answer = msgspec.msgpack.encode(True)
        edge.turns.abandon(turn)
        await until(lambda: isinstance(edge.others.asked[-1], Abort))
        answering = asyncio.ensure_future(next_one.answer(edge.others.asked[-1]))
        await settled()
        assert not any(isinstance(each, AbortTurn) for each in next_one.link.asked)
        assert await answering == [edge.others.answer]
        assert turn.ended  # its relay does not count as a reader any more
        next_one.link.tell(asked, *map(delta, range(1, 6)), result(6))
        assert (await reading).committed

    run(story)


def test_a_turn_that_nobody_reads_anywhere_is_rolled_back() -> None:
    async def story() -> None:
        edge, next_one = Edge(), Edge()
        turn, _ = await edge.start(delta(0), continues=False)
        await edge.move(1)
        asked = await next_one.arrive(edge.others.take())
        moved = next_one.turns.find("", "s", turn.id)
        await settled()
        edge.turns.abandon(turn)
        await until(lambda: isinstance(edge.others.asked[-1], Abort))
        answering = asyncio.ensure_future(next_one.answer(edge.others.asked[-1]))
        aborting = await next_one.link.last(AbortTurn)
        assert aborting.keep is None
        assert moved.rolling_back  # a repeated request begins anew once it has ended
        next_one.link.answer(aborting, True)
        next_one.link.tell(asked, result(0))
        assert await answering == [msgspec.msgpack.encode(False)]

    run(story)


class Three:
    """Three replicas. A turn has moved from the first to the second and from there to the third. Its readers at the
    first were the only ones at the start."""

    def __init__(self) -> None:
        self.first, self.second, self.third = Edge(), Edge(), Edge()

    async def begin(self) -> None:
        self.turn, _ = await self.first.start(delta(0), continues=False)
        await self.first.move(1)
        await self.second.arrive(self.first.others.take())
        self.passed = self.second.turns.find("", "s", self.turn.id)
        await settled()
        await self.second.move(1)
        self.asked = await self.third.arrive(self.second.others.take())
        await settled()

    async def abort(self, by: Edge) -> Abort:
        """Returns the request with which a replica asks for an abort."""
        await until(lambda: isinstance(by.others.asked[-1], Abort))
        asked = by.others.asked[-1]
        assert isinstance(asked, Abort)
        return asked

    @property
    def aborts(self) -> bool:
        """Whether the turn is aborted where it runs."""
        return any(isinstance(each, AbortTurn) for each in self.third.link.asked)


def test_a_turn_goes_on_for_readers_at_a_replica_through_which_it_has_passed() -> None:
    """Those of the first replica leave. The third has one reader, the second, and does not see that one's readers."""

    async def story() -> None:
        three = Three()
        await three.begin()
        reading = asyncio.ensure_future(three.passed.finished())  # a client came back there with `Last-Event-ID`
        await settled()
        three.first.others.answer = msgspec.msgpack.encode(True)
        three.first.turns.abandon(three.turn)
        asked = await three.abort(three.first)
        there = {"other": three.second, "elsewhere": three.third}[three.first.others.urls[-1]]
        answering = asyncio.ensure_future(there.answer(asked))
        await settled()
        assert not three.aborts
        assert await answering == [msgspec.msgpack.encode(True)]
        assert three.turn.ended
        assert not three.first.others.open  # it does not count as a reader any more
        three.second.others.answers[-1].tell(*map(delta, range(1, 6)), result(6))
        assert (await reading).committed

    run(story)


def test_a_turn_that_has_passed_through_a_replica_ends_with_its_last_reader() -> None:
    async def story() -> None:
        three = Three()
        await three.begin()
        three.first.turns.abandon(three.turn)
        answering = asyncio.ensure_future(three.second.answer(await three.abort(three.first)))
        assert three.first.others.urls[-1] == "other"  # the second
        passed_on = asyncio.ensure_future(three.third.answer(await three.abort(three.second)))
        aborting = await three.third.link.last(AbortTurn)
        three.third.link.answer(aborting, True)
        three.third.link.tell(three.asked, result(0))
        assert await passed_on == [msgspec.msgpack.encode(False)]
        three.second.others.answers[-1].tell(result(0))
        assert await answering == [msgspec.msgpack.encode(False)]

    run(story)


def test_a_replica_whose_readers_are_gone_without_a_word_says_so_where_the_turn_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receiving, "GRACE_SECONDS", 0)

    async def story() -> None:
        three = Three()
        await three.begin()
        three.second.others.answer = msgspec.msgpack.encode(True)
        three.second.leave()
        assert (await three.abort(three.second)).unread
        await settled()
        assert three.passed.ended  # it goes on there, and is not relayed any more

    run(story)


def test_a_replica_without_readers_relays_no_longer_although_it_could_not_say_so() -> None:
    async def story() -> None:
        edge = Edge()
        turn, _ = await edge.start(delta(0), continues=False)
        await edge.move(1)
        edge.others.refusals[Abort] = Disconnected("it is gone")
        edge.turns.abandon(turn)
        await settled()
        assert turn.ended

    run(story)


def test_a_turn_that_its_engine_has_dropped_for_its_move_goes_on() -> None:
    """The engine may say so before it is known that the session has left."""

    async def story() -> None:
        edge = Edge()
        turn, started = await edge.start(delta(0))
        edge.link.holds, edge.link.stays = held(1), False
        moving = asyncio.ensure_future(edge.moving.move(KEY, "other"))
        await edge.link.last(HoldMove)
        edge.link.refuse(started, NotAcknowledged("another replica owns the session"))
        await moving
        await until(lambda: bool(edge.others.answers))
        edge.others.answers[-1].tell(*map(delta, range(1, 6)), result(6))
        await settled()
        assert turn.committed
        assert turn.reply().tokens == WHOLE

    run(story)


def test_a_turn_that_nobody_tells_about_any_more_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "PATIENCE_SECONDS", 0)

    async def story() -> None:
        edge = Edge()
        turn, _ = await edge.start(delta(0))
        edge.others.error = Broken("it is gone")
        edge.relays.begin(turn)
        await settled()
        assert isinstance(turn.error, Disconnected)

    run(story)


def test_a_turn_that_waits_for_a_session_that_moves_is_sent_after_it() -> None:
    async def story() -> None:
        edge = Edge()
        await edge.start(delta(0))
        next_one = StartTurn(kind="turn", tenant="", session="s", input=[2])
        waiting = asyncio.ensure_future(edge.turns.start(next_one, queue=True))
        await settled()
        await edge.move(1)
        await settled()
        assert waiting.done()
        assert isinstance(waiting.exception(), Misdirected)
        assert edge.turns.queues.open_turn(KEY) is None  # it counts where it is

    run(story)


def test_a_turn_goes_on_for_a_replica_that_relays_it_when_another_one_has_no_readers_any_more() -> None:
    """The first replica has lost the second, and has the turn from the third as well."""

    async def story() -> None:
        three = Three()
        await three.begin()
        about = {"tenant": "", "session": "s", "name": three.turn.id, "reader": three.first.relays.reader}
        following = asyncio.ensure_future(three.third.answer(Follow(**about, tokens=1, characters=2)))
        await settled()
        answering = asyncio.ensure_future(three.third.answer(Abort(**about, keep=None, unread=True)))
        await settled()
        assert not three.aborts
        assert await answering == [msgspec.msgpack.encode(True)]
        three.third.link.tell(three.asked, *map(delta, range(1, 6)), result(6))
        await following

    run(story)


def test_what_an_engine_tells_of_a_turn_that_has_moved_is_not_said() -> None:
    async def story() -> None:
        edge = Edge()
        turn, started = await edge.start(delta(0))
        await edge.move(1)
        edge.link.tell(started, delta(1))
        edge.others.answers[-1].tell(*map(delta, range(1, 6)), result(6))
        await turn.over()
        assert turn.reply().tokens == WHOLE

    run(story)
