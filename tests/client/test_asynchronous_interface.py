"""The asynchronous session interface, once in this process and once over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

import tenuto
from tenuto.base.errors import ContextExceeded
from tests.client.conftest import CONTEXT
from tests.eventually import eventually
from tests.said import said
from tests.serve.server import Server

AnyAsyncEngine = tenuto.AsyncEngine | tenuto.AsyncRemoteEngine
AnyAsyncSession = tenuto.AsyncSession | tenuto.AsyncRemoteSession
AnyAsyncStream = tenuto.AsyncTurnStream | tenuto.AsyncRemoteTurnStream


@pytest.fixture(params=["in this process", "over HTTP"])
def make_async(request: pytest.FixtureRequest, witness: Server) -> Callable[[], AnyAsyncEngine]:
    if request.param == "over HTTP":
        return lambda: tenuto.connect_async(witness.url)
    return lambda: tenuto.AsyncEngine("witness", page_size=4, context_length=CONTEXT)


def test_asynchronous_clients_export_and_import(make_async: Callable[[], AnyAsyncEngine], tmp_path: Path) -> None:
    async def main() -> None:
        async with make_async() as engine:
            session = await engine.session()
            await session.chat("hello", max_new_tokens=5).result()
            copy = await engine.import_session(await session.export(), session_id="a-copy")
            assert await copy.history() == await session.history()
            await copy.close()
            await session.export_file(tmp_path / "file")
            copy = await engine.import_file(tmp_path / "file", session_id="a-copy")
            assert (await copy.info()).computed == (await session.info()).computed
            await copy.close()

    asyncio.run(main())


def test_the_asynchronous_client_does_the_same(make_async: Callable[[], AnyAsyncEngine]) -> None:
    async def talk() -> None:
        async with make_async() as engine:
            session = await engine.session()
            await session.append([1, 2])
            turn = session.turn([3], max_new_tokens=5, ignore_eos=True)
            assert [token async for token in turn.tokens()] == said([1, 2, 3], 5)
            text = session.turn([4], max_new_tokens=9, ignore_eos=True)
            assert "".join([piece async for piece in text]) == text.text
            fork = await session.fork(turn=1)
            assert await fork.history() == [1, 2]
            assert await (await session.trim([1])).history() == [1, 2]
            assert await (await engine.attach(fork.id)).history() == [1, 2]
            assert (await session.rewind(turn=1)).tokens == 2
            both = [engine.generate([n], max_new_tokens=9, ignore_eos=True) for n in (1, 2)]
            assert [(await one.result()).kept for one in both] == [9, 9]
            await session.draft([9])
            await session.abort()
            assert (await session.turn([1], max_new_tokens=4, ignore_eos=True).result()).kept == 4
            assert (await session.regenerate(max_new_tokens=2, ignore_eos=True).result()).kept == 2
            with pytest.raises(ContextExceeded):
                await session.turn([1] * (CONTEXT + 1)).result()
            open_turn = session.turn([1], ignore_eos=True)
            async for _ in open_turn.tokens():
                break
            assert (await open_turn.abort(keep=0)).kept == 0
            async with fork, session:
                assert len(await engine.sessions()) == 3
                assert (await session.info()).turn is None
            await engine.audit()

    asyncio.run(talk())


def test_cancelling_a_task_aborts_its_turn(make_async: Callable[[], AnyAsyncEngine]) -> None:
    async def talk() -> None:
        async with make_async() as engine, await engine.session() as session:
            reading = asyncio.Event()

            async def read() -> None:
                async for _ in session.turn([1], ignore_eos=True).tokens():
                    reading.set()

            task = asyncio.create_task(read())
            await reading.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while (await session.info()).turn is not None:
                await asyncio.sleep(0.01)
            assert await session.history() == []

    asyncio.run(talk())


def test_an_event_loop_that_ends_leaves_no_turn_behind(make_async: Callable[[], AnyAsyncEngine]) -> None:
    engine = make_async()

    async def start() -> tuple[AnyAsyncSession, AnyAsyncStream]:
        session = await engine.session()
        return session, session.turn([1], ignore_eos=True)

    session, turn = asyncio.run(start())
    eventually(lambda: asyncio.run(session.info()).turn is None)
    assert turn.token_ids == []
    asyncio.run(session.close())
    asyncio.run(engine.close())


def test_cancelling_the_opening_of_a_session_leaves_none(make_async: Callable[[], AnyAsyncEngine]) -> None:
    async def open_and_cancel() -> None:
        async with make_async() as engine:
            for _ in range(30):
                opening = asyncio.create_task(engine.session())
                await asyncio.sleep(0)
                opening.cancel()
                await asyncio.gather(opening, return_exceptions=True)
            while await engine.sessions():
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(open_and_cancel(), 20))


def test_a_cancelled_append_commits_nothing_uncomputed(
    make_async: Callable[[], AnyAsyncEngine],
) -> None:
    async def append_and_cancel() -> None:
        async with make_async() as engine, await engine.session() as session:
            first = session.turn([1], ignore_eos=True)
            async for _ in first.tokens():
                break
            appending = asyncio.create_task(session.append([2]))  # refused, or cancelled before
            await asyncio.sleep(0)
            appending.cancel()
            await asyncio.gather(appending, return_exceptions=True)
            await first.abort()
            assert await session.history() == []
            assert (await session.append([3])).committed
            assert await session.history() == [3]

    asyncio.run(append_and_cancel())
