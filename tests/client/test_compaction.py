"""Compaction of sessions, in this process and by both clients of a server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import tenuto
from tenuto.base.errors import (
    ContextExceeded,
    EngineStopped,
    IllegalTransition,
    InvalidRequest,
    NotFound,
    VersionMismatch,
)
from tests.client.conftest import CONTEXT
from tests.serve.server import Server, serving

SUMMARY = "They said hello."


@pytest.fixture(params=["here", "server"])
def engine(request: pytest.FixtureRequest, remote: tenuto.RemoteEngine) -> Iterator[Any]:
    if request.param == "server":
        yield remote
    else:
        with tenuto.Engine("witness", page_size=4, context_length=CONTEXT) as local:
            yield local
            local.audit()
            assert all(not info.session_id.startswith("~") for info in local.sessions())


@pytest.fixture
def session(engine: Any) -> Any:
    """A session of three turns."""
    opened = engine.session(system="Be brief.")
    for number in range(3):
        opened.chat(f"This is message {number}.", max_new_tokens=4, ignore_eos=True).result()
    return opened


def test_a_given_summary_takes_the_place_of_turns(engine: Any, session: Any) -> None:
    before, old, first = session.info, session.history, session.fork(turn=1)
    done = session.compact(2, np.int64(3), summary=SUMMARY)
    assert isinstance(done, tenuto.Compacted)
    assert (done.info.turns, done.info.version, done.summary) == (2, before.version + 1, None)
    assert (done.generated, done.info.computed) == (0, done.info.tokens - 1)
    assert session.info == done.info
    new, kept = session.history, done.info.computed - done.computed
    assert kept >= first.info.tokens - 1
    assert new[:kept] == old[:kept]
    assert SUMMARY in engine.detokenize(new)
    assert "message 1" not in engine.detokenize(new)
    assert session.chat("And now?", max_new_tokens=2).result().usage.cached == done.info.tokens - 1


def test_the_model_writes_a_summary_as_it_is_asked(engine: Any, session: Any) -> None:
    asked, other = session.fork().chat("Sum up.", max_new_tokens=20), session.fork()
    text = "".join(asked)
    done = session.compact(instructions="Sum up.", max_new_tokens=20, priority=-2)
    assert done.generated == len(asked.token_ids) == 20
    assert (done.info.turns, done.summary) == (1, text.strip())
    sampled = other.compact(instructions="Sum up.", max_new_tokens=20, temperature=2).summary
    assert (sampled == text.strip()) is isinstance(engine, tenuto.Engine), "a server draws another seed"


def test_any_input_can_replace_turns(engine: Any, session: Any) -> None:
    messages = [{"role": "user", "content": "What did we say?"}, {"role": "assistant", "content": SUMMARY}]
    assert session.compact(2, input=messages, if_version=3).info.version == 4
    plain = engine.session()
    plain.append([1, 2, 3])
    plain.compact(input=range(20, 30))
    assert plain.history == [*range(20, 30)]


def test_tools_of_a_replaced_first_turn_are_given_again(
    engine: Any,
) -> None:
    session, tool = engine.session(), {"name": "look", "parameters": {"type": "object", "properties": {}}}
    session.chat("Hello.", tools=[tool], tool_choice="none", max_new_tokens=4).result()
    with pytest.raises(IllegalTransition):
        session.compact(summary=SUMMARY)
    session.compact(summary=SUMMARY, tools=[{"type": "function", "function": tool}])
    assert "look" in engine.detokenize(session.history)


def test_a_refused_compaction_is_a_typed_error_and_changes_nothing(engine: Any, session: Any) -> None:
    before = session.info
    for first, last, options in (
        (0, None, {}),
        (4, None, {}),
        (3, 2, {}),
        (1, 9, {}),
        (True, None, {}),
        ("1", None, {}),
        (1, 1.5, {}),
        (1, None, {"summary": ""}),
        (1, None, {"summary": 5}),
        (1, None, {"input": "too"}),
        (1, None, {"summary": None, "input": ""}),
        (1, None, {"summary": None, "input": {"role": "user"}}),
        (1, None, {"instructions": ""}),
        (1, None, {"temperature": -1}),
        (1, None, {"max_new_tokens": "many"}),
        (1, None, {"priority": 5000}),
        (1, None, {"tools": "look"}),
        (1, None, {"if_version": -1}),
        (1, None, {"top_p": 0.5}),
    ):
        with pytest.raises(InvalidRequest):
            session.compact(first, last, **{"summary": SUMMARY, **options})
    with pytest.raises(InvalidRequest) as refused:
        session.compact(5, summary=SUMMARY)
    assert refused.value.param == "first"
    with pytest.raises(VersionMismatch):
        session.compact(summary=SUMMARY, if_version=1)
    with pytest.raises(ContextExceeded):
        session.compact(summary="word " * CONTEXT)
    assert session.info == before
    session.close()
    with pytest.raises(NotFound):
        session.compact(summary=SUMMARY)


@pytest.fixture(scope="module")
def slow() -> Iterator[Server]:
    """A server on which a summary of 2,000 tokens takes 10 seconds."""
    with serving("--model", "witness:0.005", "--context-length", "4096") as server:
        yield server
        server.audit()


def test_a_session_goes_on_while_it_is_compacted_and_stays_as_it_was_if_that_is_cancelled(slow: Server) -> None:
    async def talk() -> None:
        async with tenuto.connect_async(slow.url) as engine, await engine.session() as session:
            await session.chat("Hello.", max_new_tokens=4, ignore_eos=True).result()
            compacting = asyncio.create_task(session.compact(max_new_tokens=2000))
            said = session.chat("Meanwhile.", max_new_tokens=4, ignore_eos=True)
            assert (await said.result()).version == 2
            assert not compacting.done()
            compacting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await compacting
            done = await session.compact(1, 1, summary=SUMMARY)
            assert (done.info.version, done.info.turns) == (3, 2)
            assert (await session.history())[-4:] == said.token_ids

    asyncio.run(talk())


def test_an_engine_in_this_process_goes_on_while_a_session_is_compacted() -> None:
    async def talk() -> None:
        async with tenuto.AsyncEngine("witness:0.005", context_length=4096) as engine:
            session = await engine.session()
            await session.chat("Hello.", max_new_tokens=4, ignore_eos=True).result()
            compacting = asyncio.create_task(session.compact(max_new_tokens=2000))
            said = session.chat("Meanwhile.", max_new_tokens=4, ignore_eos=True)
            assert (await said.result()).version == 2
            assert not compacting.done()
            compacting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await compacting
            running = session.chat("A long one.", max_new_tokens=100, ignore_eos=True)
            compacting = asyncio.create_task(session.compact(1, 1, summary=SUMMARY))
            await running.result()
            done = await compacting
            assert (done.info.version, done.info.turns) == (4, 3)
            assert (await session.history())[-100:] == running.token_ids

    asyncio.run(talk())


def test_a_compaction_ends_with_its_engine() -> None:
    engine = tenuto.Engine("witness:0.005", context_length=4096)
    session = engine.session()
    session.chat("Hello.", max_new_tokens=4, ignore_eos=True).result()
    with ThreadPoolExecutor() as beside:
        compacting = beside.submit(session.compact, max_new_tokens=2000)
        time.sleep(0.1)
        engine.close()
        with pytest.raises(EngineStopped):
            compacting.result(60)
