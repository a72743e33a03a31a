"""A session over its WebSocket, by both clients of a server."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading

import pytest
from websockets.sync.server import ServerConnection, serve

import tenuto
from tenuto.base.errors import (
    Disconnected,
    EngineStopped,
    InvalidRequest,
    NotFound,
    SessionBusy,
    TooLarge,
    Unauthorized,
    Unreachable,
    VersionMismatch,
)
from tenuto.base.turns import EndReason
from tenuto.client import feed
from tenuto.client.core import SessionCore
from tests.client.conftest import CONTEXT, Proxy
from tests.eventually import eventually
from tests.said import said
from tests.serve.server import Server, serving


def unasked(engine: tenuto.RemoteEngine, session_id: str) -> tenuto.RemoteSession:
    """Returns a session through `engine` without checking that it exists."""
    return tenuto.RemoteSession(engine, SessionCore(engine._core, session_id))


def test_turns_go_over_one_connection_and_mean_the_same(remote: tenuto.RemoteEngine, proxy: Proxy) -> None:
    name = remote.session().id
    with tenuto.connect(proxy.url) as engine, unasked(engine, name).socket() as session:
        expected: list[int] = []
        for number in range(3):
            turn = session.turn([number, 7], max_new_tokens=6, ignore_eos=True)
            expected += [number, 7]
            assert list(turn.tokens()) == said(expected, 6)
            expected += said(expected, 6)
            result = turn.result()
            assert (result.reason, result.version, result.kept) == (EndReason.LENGTH, number + 1, 6)
            assert (result.usage.prompt, result.usage.cached) == (len(expected) - 6, max(0, len(expected) - 9))
            assert turn.time_to_first_token is not None
            assert turn.turn_id is not None
        assert session.append([1, 2, 3]).reason is EndReason.APPENDED
        assert session.rewind(turn=3).tokens == len(expected)
        assert session.regenerate(max_new_tokens=3, ignore_eos=True).result().kept == 3
        session.draft(range(50))
        session.abort()
        text = session.turn([4], max_new_tokens=9, ignore_eos=True)
        assert "".join(text) == text.text
        assert proxy.connections == 1
        history = session.history
        assert history == [*expected[:-3], 4, *text.token_ids]
        fork = session.fork()
        assert fork.turn([5], max_new_tokens=2, ignore_eos=True).result().usage.cached == len(history) - 1
        assert session.info.turns == 4
        assert fork.history[: len(history)] == history == remote.attach(name).history


def test_a_turn_waits_for_the_one_before_it(remote: tenuto.RemoteEngine) -> None:
    with remote.session().socket() as session:
        first = session.turn([1], ignore_eos=True)
        results = list[tenuto.TurnResult]()
        waiting = threading.Thread(target=lambda: results.append(session.append([2])))
        waiting.start()
        list(itertools.islice(first.tokens(), 10))
        assert session.info.turn is not None  # is answered meanwhile
        assert first.abort(keep=10).version == 1
        waiting.join()
        assert results[0].usage.prompt == 12


def test_a_barge_in_keeps_what_its_reader_was_given(remote: tenuto.RemoteEngine) -> None:
    with remote.session().socket() as session:
        turn = session.turn([5], ignore_eos=True, speculate=False)
        heard = [next(turn.tokens()) for _ in range(40)]
        result = turn.abort(keep="delivered")
        assert 30 < result.kept <= 40
        assert session.history == [5, *heard[: result.kept]]
        assert turn.abort() == turn.result() == result
        for _ in range(20):
            assert not session.turn([1], ignore_eos=True).abort().committed
        assert session.turn([1], max_new_tokens=3).result().version == 2


def test_dropping_a_stream_aborts_its_turn_and_leaves_the_connection(remote: tenuto.RemoteEngine) -> None:
    with remote.session().socket() as session:

        def read_a_little() -> None:
            for _ in session.turn([1], ignore_eos=True).tokens():
                return

        read_a_little()
        gc.collect()
        eventually(lambda: session.info.turn is None)
        with session.turn([1], ignore_eos=True) as turn:
            next(turn.tokens())
        assert session.turn([2], max_new_tokens=4, ignore_eos=True).result().version == 1
        assert session.history == [2, *said([2], 4)]


def test_a_turn_that_continues_outlives_its_stream(remote: tenuto.RemoteEngine) -> None:
    with remote.session().socket() as session:
        with session.turn([1], max_new_tokens=200, ignore_eos=True, on_disconnect="continue") as turn:
            next(turn.tokens())
        assert turn.turn_id is not None
        assert session.append([3]).version == 2
        assert session.follow(turn.turn_id).result().kept == 200
        assert session.history == [1, *said([1], 200), 3]


def test_the_end_of_the_block_rolls_back_the_open_turn(remote: tenuto.RemoteEngine) -> None:
    session = remote.session()
    with session.socket() as over:
        turn = over.turn([1], ignore_eos=True)
        next(turn.tokens())
    with pytest.raises(Disconnected, match="rolled back"):
        turn.result()
    eventually(lambda: session.info.turn is None)
    assert session.info.version == 0
    for call in (over.append, over.turn, over.draft):
        with pytest.raises(Disconnected, match="closed"):
            call([1])
    assert over.history == []


def test_a_broken_connection_ends_the_turn_and_all_later_operations(remote: tenuto.RemoteEngine, proxy: Proxy) -> None:
    same = remote.session()
    with tenuto.connect(proxy.url) as engine, unasked(engine, same.id).socket() as session:
        turn = session.turn([1], ignore_eos=True)
        next(turn.tokens())
        proxy.cut()
        with pytest.raises(Disconnected, match="rolled back"):
            turn.result()
        with pytest.raises(Disconnected):
            session.append([1])
    eventually(lambda: same.info.turn is None)
    assert same.history == []


def test_a_turn_that_continues_misses_no_token_wherever_its_connection_breaks(
    remote: tenuto.RemoteEngine, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "FIRST_PAUSE", 0.001)
    whole = remote.session().turn([1], max_new_tokens=8, ignore_eos=True)
    text, expected = "".join(whole), said([1], 8)
    broken = 0
    for cut in range(250, 2000, 70):
        named = remote.session()
        with tenuto.connect(proxy.url) as engine:
            proxy.connections, proxy.cuts = 0, [cut, cut]
            with unasked(engine, named.id).socket() as session:
                turn = session.turn([1], max_new_tokens=8, ignore_eos=True, on_disconnect="continue")
                assert list(turn.tokens()) == expected
                assert (turn.result().kept, turn.text) == (8, text)
                broken += proxy.connections > 1
        assert named.history == [1, *expected]
        assert named.info.version == 1
    assert broken > 10


def test_a_turn_that_continues_can_be_aborted_after_its_connection_broke(
    remote: tenuto.RemoteEngine, proxy: Proxy
) -> None:
    same = remote.session()
    with tenuto.connect(proxy.url) as engine, unasked(engine, same.id).socket() as session:
        turn = session.turn([1], ignore_eos=True, on_disconnect="continue")
        next(turn.tokens())
        proxy.cut()
        list(itertools.islice(turn.tokens(), 200))
        assert turn.abort(keep=5).kept == 5
    assert same.history == [1, *said([1], 5)]


def test_a_refusal_is_a_typed_error_and_leaves_the_connection(remote: tenuto.RemoteEngine) -> None:
    other = remote.session()
    with other.socket() as session:
        with pytest.raises(InvalidRequest) as refused:
            session.turn([10**6])
        assert refused.value.param == "input"
        for options in ({"temperature": -1}, {"if_version": -1}, {"if_busy": "never"}):
            with pytest.raises(InvalidRequest):
                session.turn([1], **options)
        with pytest.raises(InvalidRequest):
            session.rewind(turn=7)
        with pytest.raises(VersionMismatch):
            session.append([1], if_version=7)
        with pytest.raises(TooLarge):  # the server does not read its name
            session.turn([1] * 2**21)
        open_turn = other.turn([1], ignore_eos=True)
        with pytest.raises(SessionBusy):
            session.turn([2])
        open_turn.abort()
        assert session.append([1], if_version=0).version == 1
        other.close()
        with pytest.raises(NotFound):
            session.turn([2])


def test_a_socket_that_cannot_be_opened_is_a_typed_error(remote: tenuto.RemoteEngine, proxy: Proxy) -> None:
    for name in ("nobody", "", ".."):
        with pytest.raises((NotFound, InvalidRequest)), unasked(remote, name).socket():
            raise AssertionError
    with tenuto.connect(proxy.url) as engine:
        proxy.refuse = True
        with pytest.raises(Unreachable, match="WebSocket"), unasked(engine, "nobody").socket():
            raise AssertionError
    proxy.close()
    with tenuto.connect(proxy.url) as engine, pytest.raises(Unreachable), unasked(engine, "nobody").socket():
        raise AssertionError


def test_the_api_key_is_sent() -> None:
    with serving("--model", "witness", env={"TENUTO_API_KEY": "secret"}) as server:
        with tenuto.connect(server.url, "secret") as engine, engine.session("keyed").socket() as session:
            assert session.append([1]).version == 1
        for key in (None, "other"):
            with tenuto.connect(server.url, key) as engine, pytest.raises(Unauthorized):
                unasked(engine, "keyed").socket().__enter__()


def test_a_server_that_sends_something_else_ends_the_connection() -> None:
    def answer(socket: ServerConnection) -> None:
        socket.recv()
        socket.send("something else")
        socket.recv()

    with serve(answer, "127.0.0.1", 0) as other:
        running = threading.Thread(target=other.serve_forever)
        running.start()
        with (
            tenuto.connect(f"http://127.0.0.1:{other.socket.getsockname()[1]}") as engine,
            unasked(engine, "any").socket() as session,
            pytest.raises(Disconnected, match="JSON"),
        ):
            session.append([1])
        other.shutdown()
        running.join()


def test_closing_the_client_ends_its_sockets(witness: Server) -> None:
    engine = tenuto.connect(witness.url)
    with engine.session(ttl=1).socket() as session:
        turn = session.turn([1], ignore_eos=True)
        next(turn.tokens())
        engine.close()
        with pytest.raises(EngineStopped, match="closed"):
            turn.result()
        with pytest.raises(EngineStopped):
            session.append([1])


def test_the_asynchronous_client_does_the_same(witness: Server) -> None:
    async def talk() -> None:
        async with tenuto.connect_async(witness.url) as engine, await engine.session() as named:
            async with named.socket() as session:
                await session.append([1, 2])
                turns = [session.turn([number], max_new_tokens=5, ignore_eos=True) for number in range(20)]
                assert [(await turn.result()).version for turn in turns] == [*range(2, 22)]
                assert turns[0].token_ids == said([1, 2, 0], 5)
                await session.draft([9])
                await session.abort()
                assert (await session.rewind(turn=1)).tokens == 2
                reading = asyncio.Event()

                async def read() -> None:
                    async for _ in session.turn([1], ignore_eos=True).tokens():
                        reading.set()

                task = asyncio.create_task(read())
                await reading.wait()
                appending = asyncio.create_task(session.append([6]))  # waits, and is never sent
                await asyncio.sleep(0)
                appending.cancel()
                task.cancel()
                for each in (task, appending):
                    with pytest.raises(asyncio.CancelledError):
                        await each
                assert (await session.turn([4], max_new_tokens=CONTEXT // 100).result()).committed
                assert (await session.history())[:3] == [1, 2, 4]
            assert (await named.info()).state == "open"
            with pytest.raises(Disconnected):
                await session.append([1])

    asyncio.run(asyncio.wait_for(talk(), 60))
