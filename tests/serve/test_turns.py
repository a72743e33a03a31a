"""The registry of turns in the API process, on an engine in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from tenuto.base.config import Limits, WorkerSettings
from tenuto.base.errors import KeyReused, LimitReached, NotFound, ResultNotKept, SessionClosed
from tenuto.base.options import Policy, TurnParams
from tenuto.base.tools.definitions import Tools
from tenuto.base.tools.grammar import Grammar
from tenuto.base.turns import Message
from tenuto.base.wire.messages import (
    CloseSession,
    ExportSession,
    Fork,
    GetSession,
    ImportSession,
    OpenSession,
    StartTurn,
    Withdraw,
)
from tenuto.serve.shared import retention
from tenuto.serve.shared.idempotency import RequestKey
from tenuto.serve.shared.live_turn import LiveTurn
from tenuto.serve.shared.turns import Turns
from tenuto.session import results
from tests.runtime.local import LocalLink


def play(story: Callable[[Turns, LocalLink], Awaitable[None]]) -> None:
    async def whole() -> None:
        link = LocalLink(WorkerSettings(model="witness", config={"context_length": 3000}))
        turns = Turns(link)
        await story(turns, link)
        assert turns.open.total() == turns.queues.waiting.total() == 0
        assert not turns.queues._open
        assert not turns.queues._queues
        assert not turns.queues._arriving
        await link.close()

    asyncio.run(whole())


def one_shot(tokens: int, session: str | None = None) -> StartTurn:
    return StartTurn(kind="turn", tenant="t", session=session, input=[1], params=TurnParams(max_new_tokens=tokens))


def test_ended_turns_are_evicted_oldest_first_by_number_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MAX_TURNS", 5)
    monkeypatch.setattr(retention, "MAX_WEIGHT", 100)

    async def story(turns: Turns, _: LocalLink) -> None:
        small = [await turns.start(one_shot(3), request_key=RequestKey(f"k{n}", b"")) for n in range(8)]
        for turn in small:
            await turn.finished()
        kept = [turn for turn in small if turn.id in turns._turns]
        assert kept == small[-5:]
        assert len(turns._keys) == 5
        large = await turns.start(one_shot(2000))
        await large.finished()
        assert list(turns._turns.values()) == [large]
        with pytest.raises(NotFound):
            turns.find("t", None, small[-1].id)

    play(story)


def test_an_ended_turn_keeps_nothing_large_of_its_request() -> None:
    async def story(turns: Turns, _: LocalLink) -> None:
        source, tools = "x" * 100_000, Tools.of([{"name": "f", "description": "d" * 1000}])
        params = TurnParams(max_new_tokens=3, grammar=Grammar("choice", json.dumps(["ab", "cd" + source])))
        asked = msgspec.structs.replace(one_shot(3), input=[Message("user", "hi")], params=params, tools=tools)
        turn = await turns.start(asked)
        await turn.finished()
        assert len(msgspec.msgpack.encode(turn.request)) < 800

    play(story)


def test_log_probabilities_and_long_prompts_weigh_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MAX_WEIGHT", 100)

    async def story(turns: Turns, _: LocalLink) -> None:
        prompt = list(range(100))
        scored = TurnParams(max_new_tokens=1, logprobs=5, input_logprobs=5)
        for asked in (
            msgspec.structs.replace(one_shot(1), input=prompt, params=scored),  # 100 tokens of 16 each
            msgspec.structs.replace(one_shot(1), input=prompt * 25, echo=True),
        ):
            first, then = await turns.start(one_shot(1)), await turns.start(asked)
            for turn in (first, then):
                await turn.finished()
            small = await turns.start(one_shot(1))
            await small.finished()
            assert then.id not in turns._turns
            assert small.id in turns._turns

    play(story)


def test_a_repeated_request_starts_no_turn_and_is_not_refused_by_a_limit() -> None:
    async def story(turns: Turns, _: LocalLink) -> None:
        first = await turns.start(one_shot(5), request_key=RequestKey("k", b"same"))

        def refuse() -> None:
            raise LimitReached("no more")

        assert await turns.start(one_shot(5), request_key=RequestKey("k", b"same"), check=refuse) is first
        with pytest.raises(LimitReached):
            await turns.start(one_shot(5), check=refuse)
        await first.finished()

    play(story)


def test_a_request_cancelled_in_any_state_leaves_nothing() -> None:
    async def story(turns: Turns, link: LocalLink) -> None:
        await link.call(OpenSession(session="s", policy=Policy(tenant="t")))
        for delay in range(40):
            asked = [asyncio.ensure_future(turns.start(one_shot(500, "s"), queue=True)) for _ in range(4)]
            for _ in range(delay):
                await asyncio.sleep(0)
            for task in asked:
                task.cancel()
            done = await asyncio.gather(*asked, return_exceptions=True)
            for turn in done:
                if isinstance(turn, LiveTurn):
                    turns.abandon(turn)
        while turns.open_turns():
            await asyncio.sleep(0.01)
        last = await turns.start(one_shot(2, "s"))
        assert (await last.finished()).reason == "length"

    play(story)


def test_only_turns_that_wait_for_a_session_count_against_the_limit_on_waiting_turns() -> None:
    async def story(turns: Turns, link: LocalLink) -> None:
        await link.call(OpenSession(session="s", policy=Policy(tenant="t")))
        limited = msgspec.structs.replace(one_shot(2000, "s"), limits=Limits(queued=0))
        first = await turns.start(limited, queue=True)
        with pytest.raises(LimitReached):
            await turns.start(limited, queue=True)
        await turns.abort(first)

    play(story)


def test_a_repeated_request_reads_its_turn_even_if_the_first_was_cancelled() -> None:
    async def story(turns: Turns, link: LocalLink) -> None:
        await link.call(OpenSession(session="s", policy=Policy(tenant="t")))
        blocking = await turns.start(one_shot(300, "s"))
        first = asyncio.ensure_future(turns.start(one_shot(3, "s"), queue=True, request_key=RequestKey("k", b"")))
        second = asyncio.ensure_future(turns.start(one_shot(3, "s"), queue=True, request_key=RequestKey("k", b"")))
        await asyncio.sleep(0)
        first.cancel()
        await blocking.finished()
        turn = await second
        assert (await turn.finished()).committed

    play(story)


def test_a_key_is_free_again_in_another_session_of_its_sessions_id() -> None:
    async def story(turns: Turns, link: LocalLink) -> None:
        place: dict[str, Any] = {"tenant": "t", "session": "s"}
        opening = OpenSession(session="s", policy=Policy(tenant="t"))
        await link.call(msgspec.structs.replace(opening, session="other"))
        exported = await link.call(ExportSession(tenant="t", session="other"))
        imported = ImportSession(session="s", policy=Policy(tenant="t"), document=exported)
        ways = [opening, Fork(tenant="t", session="other", child="s"), imported, opening]
        before: list[LiveTurn] = []
        for number, way in enumerate(ways):
            await link.call(way)
            key = RequestKey("k", b"same" if number < len(ways) - 1 else b"another")
            both = await asyncio.gather(*(turns.start(one_shot(2, "s"), request_key=key) for _ in range(2)))
            turn = both[0]
            assert (await turn.finished()).version == (await link.call(GetSession(**place))).version == 1
            assert both[1] is turn
            assert turn not in before
            assert await turns.start(one_shot(2, "s"), request_key=key) is turn
            if number % 2:
                await turns.close_session(("t", "s"))
            else:
                await link.call(CloseSession(**place))  # not by a client: its time is over
            assert await turns.start(one_shot(2, "s"), request_key=key) is turn
            before.append(turn)

    play(story)


def test_a_kept_turn_of_an_earlier_version_belongs_to_the_session_that_keeps_it() -> None:
    async def story(turns: Turns, link: LocalLink) -> None:
        await link.call(OpenSession(session="s", policy=Policy(tenant="t")))
        key = RequestKey("k", b"")
        first = await turns.start(one_shot(2, "s"), request_key=key)
        await first.finished()
        turns._keys.release(first)  # as if another process had answered it
        kept = link._service._engine.registry.get("s", "t").results
        found = kept.find("k")
        assert found is not None
        ticket = msgspec.structs.replace(found.ticket, birth=0)
        kept.add("k", msgspec.msgpack.encode(msgspec.structs.replace(found, ticket=ticket)))
        assert await (await turns.start(one_shot(2, "s"), request_key=key)).finished() == first.result
        await turns.close_session(("t", "s"))
        await link.call(OpenSession(session="s", policy=Policy(tenant="t")))
        again = await turns.start(one_shot(2, "s"), request_key=key)
        assert (await again.finished()).version == (await link.call(GetSession(tenant="t", session="s"))).version == 1

    play(story)


def test_turns_whose_keys_are_being_looked_up_are_not_overtaken() -> None:
    async def story(turns: Turns, link: LocalLink) -> None:
        await link.call(OpenSession(session="s", policy=Policy(tenant="t")))
        first = await turns.start(one_shot(2, "s"), request_key=RequestKey("known", b""))
        await first.finished()
        turns._keys.release(first)  # as if it had ended long ago
        keys = [RequestKey("new", b""), None, RequestKey("known", b""), None, RequestKey("newer", b""), None]
        asked = [asyncio.ensure_future(turns.start(one_shot(2, "s"), queue=True, request_key=key)) for key in keys]
        versions = []
        for turn in await asyncio.gather(*asked):
            result = await turn.finished()
            versions.append(result.version)
        assert versions == [2, 3, 1, 4, 5, 6]

    play(story)


@pytest.mark.parametrize("key", ["new", None])
def test_a_request_cancelled_before_it_is_queued_never_begins(key: str | None) -> None:
    async def story(turns: Turns, link: LocalLink) -> None:
        await link.call(OpenSession(session="s", policy=Policy(tenant="t")))
        blocking = await turns.start(one_shot(2900, "s"))
        asked = [asyncio.ensure_future(turns.start(one_shot(1, "s"), queue=True, request_key=RequestKey("new", b"")))]
        if key is None:  # it waits until the other has been looked up
            asked.append(asyncio.ensure_future(turns.start(one_shot(1, "s"), queue=True)))
        for _ in range(4):
            await asyncio.sleep(0)
        asked.pop().cancel()
        for other in asked:
            await (await other).finished()
        await blocking.finished()
        while turns.open_turns():
            await asyncio.sleep(0.01)
        assert (await link.call(GetSession(tenant="t", session="s"))).version == 1 + len(asked)

    play(story)


def test_a_result_too_large_to_keep_does_not_make_its_turn_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "MAX_BYTES", 1000)

    async def story(turns: Turns, link: LocalLink) -> None:
        await link.call(OpenSession(session="s", policy=Policy(tenant="t")))
        scored = msgspec.structs.replace(
            one_shot(2, "s"), input=list(range(100)), params=TurnParams(max_new_tokens=2, input_logprobs=1)
        )
        for request, name in ((scored, "large"), (one_shot(2, "s"), "small")):
            turn = await turns.start(request, request_key=RequestKey(name, b"digest"))
            await turn.finished()
            turns._keys.release(turn)  # as if it had ended long ago
        with pytest.raises(ResultNotKept, match="committed, as version 1 of its session"):
            await turns.start(scored, request_key=RequestKey("large", b"digest"))
        with pytest.raises(KeyReused):
            await turns.start(scored, request_key=RequestKey("large", b"other"))
        again = await turns.start(one_shot(2, "s"), request_key=RequestKey("small", b"digest"))
        assert (await again.finished()).version == 2
        assert (await link.call(GetSession(tenant="t", session="s"))).version == 2
        assert link._service._engine.registry.get("s", "t").results.size < 1000

    play(story)


def test_a_repeated_request_does_not_join_a_turn_that_is_being_aborted() -> None:
    async def story(turns: Turns, _: LocalLink) -> None:
        first = await turns.start(one_shot(2000), request_key=RequestKey("k", b""))
        turns.abandon(first)
        second = await turns.start(one_shot(2), request_key=RequestKey("k", b""))
        assert second is not first
        assert (await second.finished()).committed

    play(story)


def test_turns_that_wait_for_a_session_are_refused_when_it_closes() -> None:
    async def story(turns: Turns, link: LocalLink) -> None:
        await link.call(OpenSession(session="s", policy=Policy(tenant="t")))
        first = await turns.start(one_shot(2000, "s"))
        waiting = asyncio.ensure_future(turns.start(one_shot(1, "s"), queue=True))
        await asyncio.sleep(0)
        await turns.close_session(("t", "s"))
        await link.call(OpenSession(session="s", policy=Policy(tenant="t")))
        with pytest.raises(SessionClosed):
            await waiting
        assert not (await first.finished()).committed
        assert (await link.call(GetSession(tenant="t", session="s"))).version == 0

    play(story)


def test_a_waiting_turn_does_not_begin_after_its_client_has_disconnected() -> None:
    async def story(turns: Turns, link: LocalLink) -> None:
        await link.call(OpenSession(session="s", policy=Policy(tenant="t")))
        first = await turns.start(one_shot(2000, "s"))
        asking = asyncio.ensure_future(turns.start(one_shot(1, "s"), queue=True))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        (waiting,) = turns.queues.waiting_for(("t", "s"))
        asked = link.call

        async def slow(request: Any) -> Any:
            if isinstance(request, Withdraw):
                await first.finished()  # its place comes up before the engine has answered
            return await asked(request)

        link.call = slow  # type: ignore[method-assign]
        asking.cancel()
        await first.finished()
        while not waiting.ended:
            await asyncio.sleep(0)
        assert waiting.ticket is None
        assert (await asked(GetSession(tenant="t", session="s"))).version == 1

    play(story)
