"""The Python interface of an engine in this process, on the witness: no model, token ids only. `tests/client` has the
operations that clients of a server also have."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

import tenuto
from tenuto.base.config import WorkerSettings
from tenuto.base.errors import (
    ConfigError,
    ContextExceeded,
    EngineStopped,
    InvalidRequest,
    InvariantError,
    ModelError,
)
from tenuto.base.turns import EndReason
from tenuto.exec.witness import WitnessExecutor
from tenuto.runtime.models import load_model
from tenuto.runtime.opening import open_service
from tenuto.text.tokenizer import Tokenizer
from tests.eventually import eventually
from tests.present import present
from tests.said import said

CONTEXT = 4096


@pytest.fixture
def engine() -> Iterator[tenuto.Engine]:
    with tenuto.Engine("witness", page_size=4, context_length=CONTEXT, audit_every=20) as running:
        yield running
        running.audit()


def test_the_files_of_the_disk_tier_are_deleted_with_their_engine(tmp_path: Path) -> None:
    options: dict[str, Any] = {"context_length": 256, "memory_bytes": 10_000, "page_size": 4}
    for _ in range(2):
        with tenuto.Engine("witness", disk_tier=str(tmp_path), **options) as running:
            with pytest.raises(ConfigError, match="in use by another process"):
                tenuto.Engine("witness", disk_tier=str(tmp_path), **options)
            sessions = [running.session() for _ in range(12)]
            for number, session in enumerate(sessions):
                session.append([number + 3] * 150)
            assert list(tmp_path.glob("*.units"))
            turn = sessions[0].turn([1], max_new_tokens=5, ignore_eos=True)
            assert turn.result().committed
            assert turn.token_ids == said([3] * 150 + [1], 5)
            running.audit()
        assert not list(tmp_path.glob("*.units"))


def test_a_stream_that_is_left_but_kept_can_be_resumed(engine: tenuto.Engine) -> None:
    turn = engine.session().turn([1], max_new_tokens=30)
    for _ in turn.tokens():
        break
    assert turn.result().kept == 30
    assert turn.token_ids == said([1], 30)


def test_samples_of_one_prompt_are_forks_after_an_append(engine: tenuto.Engine) -> None:
    session = engine.session()
    assert session.append(range(40)).reason is EndReason.APPENDED
    turns = [session.fork().turn(max_new_tokens=5) for _ in range(4)]
    assert {turn.result().usage.cached for turn in turns} == {39}
    assert all(turn.token_ids == said(list(range(40)), 5) for turn in turns)


def test_wrong_configuration_is_refused_before_anything_is_built() -> None:
    for wrong in ({"context": 5}, {"context_length": 0}, {"page_size": 0}, {"memory_bytes": 10}, {"overlap": 2}):
        with pytest.raises(ConfigError):
            tenuto.Engine("witness", **wrong)  # type: ignore[arg-type]


def test_an_unreferenced_engine_stops() -> None:
    loop = tenuto.Engine("witness")._transport
    gc.collect()
    eventually(lambda: not loop._thread.is_alive())


def test_a_model_without_a_tokenizer_accepts_only_token_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = replace(load_model(WorkerSettings(model="witness", page_size=4)), tokenizer=None, chat=None)
    monkeypatch.setattr("tenuto.api.transport.load_model", lambda *_: bare)
    with tenuto.Engine("witness") as engine:
        session = engine.session()
        with pytest.raises(InvalidRequest, match="tokenizer"):
            session.turn("text")
        with pytest.raises(InvalidRequest, match="chat template"):
            session.chat("text")
        with pytest.raises(InvalidRequest, match="chat template"):
            engine.session(system="text")
        with pytest.raises(InvalidRequest, match="tokenizer"):
            session.turn([1], stop="x")
        reply = session.turn([1], max_new_tokens=2)
        assert list(reply) == []
        assert reply.token_ids == said([1], 2)


def test_a_model_is_loaded_for_the_configured_context(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts, model = [], str(smollm2_path)

    def load(_files: Any, options: Any, _checkpoint: Any) -> NoReturn:
        contexts.append(options.context)
        raise ModelError("no need to load it")

    monkeypatch.setattr("tenuto.exec.load.load_executor", load)
    for start in (
        lambda: tenuto.Engine(model, context_length=123),
        lambda: tenuto.Engine(model),
        lambda: open_service(WorkerSettings(model=model, config={"context_length": 77}), lambda _: None),
    ):
        with pytest.raises(ModelError, match="no need"):
            start()
    assert contexts == [123, 8192, 77]


def test_memory_has_two_names_and_may_be_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr("tenuto.api.transport.memory_bytes", lambda settings: given.append(settings.memory))
    for options in ({"memory_bytes": 2**20}, {"memory": 2**20}, {"memory": "1MiB"}, {"memory": "0.5"}, {}):
        tenuto.Engine("witness", **options).close()
    assert given == [2**20, 2**20, 2**20, 0.5, None]


def test_the_asynchronous_engine_does_the_same() -> None:
    async def talk() -> None:
        async with tenuto.AsyncEngine("witness", page_size=4) as engine:
            session = await engine.session("s")
            await session.append([1, 2])
            turn = session.turn([3], max_new_tokens=5)
            tokens = [token async for token in turn.tokens()]
            assert tokens == said([1, 2, 3], 5)
            reply = session.turn([4], max_new_tokens=9, ignore_eos=True)
            assert "".join([text async for text in reply]) == present(engine.tokenizer).decode(reply.token_ids)
            fork = await session.fork(turn=1)
            assert await fork.history() == [1, 2]
            assert (await session.rewind(turn=1)).tokens == 2
            both = [engine.generate([n], max_new_tokens=9) for n in (1, 2)]
            assert [(await one.result()).kept for one in both] == [9, 9]
            await session.draft([9])
            await session.abort()
            assert (await session.turn([1], max_new_tokens=4).result()).kept == 4
            assert (await session.regenerate(max_new_tokens=2).result()).kept == 2
            with pytest.raises(ContextExceeded):
                await session.turn([1] * 9000).result()
            open_turn = session.turn([1])
            async for _ in open_turn.tokens():
                break
            assert (await open_turn.abort(keep=0)).kept == 0
            async with fork:
                assert len(await engine.sessions()) == 2
            assert (await session.info()).turn is None
            await engine.audit()

    asyncio.run(talk())


def test_the_package_exports_exactly_its_public_names() -> None:
    assert "Engine" in dir(tenuto)
    assert all(getattr(tenuto, name) is not None for name in tenuto.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = tenuto.nonsense


@pytest.mark.parametrize(
    "options",
    [
        {"stop_ids": [2**40]},
        {"stop_ids": [float("nan")]},
        {"stop_ids": 5},
        {"stop_ids": list(range(65))},
        {"stop": 5},
        {"top_k": 2**63},
        {"top_k": float("nan")},
        {"top_p": float("nan")},
        {"temperature": None},
        {"seed": 1.5},
        {"priority": "x"},
        {"priority": 10**400},
        {"timeout": 10**400},
        {"timeout": "soon"},
        {"max_new_tokens": 1.5},
        {"max_new_tokens": float("nan")},
        {"ignore_eos": "no"},
    ],
    ids=str,
)
def test_invalid_options_are_refused_and_do_no_harm(engine: tenuto.Engine, options: dict) -> None:
    session = engine.session()
    with pytest.raises(InvalidRequest):
        session.turn([1], **options)
    assert (session.info.turn, session.info.version) == (None, 0)
    assert session.turn([1], max_new_tokens=2).result().kept == 2


@pytest.mark.parametrize(
    "given", [[1.9], ["12"], [float("inf")], [True], b"abc", bytearray(b"abc"), np.array(5), None, [None]], ids=str
)
def test_invalid_input_is_refused(engine: tenuto.Engine, given: Any) -> None:
    with pytest.raises(InvalidRequest):
        engine.session().turn(given, max_new_tokens=2)


@pytest.mark.parametrize("keep", [1.5, float("nan"), "most", True, -2, [1]], ids=str)
def test_an_invalid_keep_is_refused_and_the_turn_continues(engine: tenuto.Engine, keep: Any) -> None:
    turn = engine.session().turn([1], max_new_tokens=50)
    with pytest.raises(InvalidRequest):
        turn.abort(keep=keep)
    assert turn.result().reason in (EndReason.LENGTH, EndReason.STOP)
    assert turn.token_ids == said([1], 50)


def test_an_ended_turn_can_be_aborted_after_the_engine_was_closed() -> None:
    with tenuto.Engine("witness", context_length=CONTEXT) as engine:
        turn = engine.session().turn([1], max_new_tokens=2)
        result = turn.result()
    assert turn.abort() is result


def test_a_cancelled_abort_still_ends_the_turn() -> None:
    async def abort_and_cancel() -> None:
        async with tenuto.AsyncEngine("witness", context_length=CONTEXT) as engine:
            session = await engine.session()
            stream = session.turn([1], max_new_tokens=2000, ignore_eos=True)
            release = threading.Event()
            engine._transport._service._loop.call(lambda _: release.wait(60))  # so that the abort is still pending
            aborting = asyncio.create_task(stream.abort())
            await asyncio.sleep(0)
            aborting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await aborting
            release.set()
            assert (await stream.result()).reason is EndReason.ABORT
            assert await session.history() == []

    asyncio.run(abort_and_cancel())


def test_closing_a_stream_before_its_turn_begins_leaves_no_turn() -> None:
    async def close_early() -> None:
        async with tenuto.AsyncEngine("witness", context_length=CONTEXT) as engine:
            session = await engine.session()
            release = threading.Event()
            engine._transport._service._loop.call(lambda _: release.wait(60))  # so that nothing begins
            for given in ([1], "text " * 1000):
                session.turn(given, ignore_eos=True).close()
            release.set()
            await session.append([2])
            assert await session.history() == [2]

    asyncio.run(close_early())


def test_input_is_prepared_outside_the_engines_thread(engine: tenuto.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, encode = set[str](), Tokenizer.encode

    def watched(self: Tokenizer, text: str, **options: Any) -> list[int]:
        threads.add(threading.current_thread().name)
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    for text in ("short", "long " * 300):
        session = engine.session()
        session.chat(text, max_new_tokens=1).result()
        session.draft([{"role": "user", "content": text}])
        session.abort()
    assert threads
    assert "tenuto-engine" not in threads


def test_options_of_servers_are_refused(engine: tenuto.Engine) -> None:
    session = engine.session()
    of_servers: list[Any] = [{"if_busy": "queue"}, {"on_disconnect": "continue"}]
    for options in of_servers:
        with pytest.raises(InvalidRequest, match="unknown turn options"):
            session.turn([1], **options)
    assert session.info.turn is None


def test_a_broken_engine_raises_for_every_waiting_caller(engine: tenuto.Engine) -> None:
    broken = tenuto.Engine("witness", context_length=CONTEXT)
    session = broken.session()
    turn = session.turn([1], ignore_eos=True)
    release = threading.Event()

    def fail(_: object) -> None:
        release.wait(60)
        raise InvariantError("planted")

    broken._transport._service._loop.call(fail)
    waiting = broken._core.sessions()
    release.set()
    for answer in (waiting.result, turn.result, turn.abort, broken.audit, session.close):
        with pytest.raises(EngineStopped, match="planted"):
            answer()
    broken.close()


def test_numpy_token_ids_are_token_ids(engine: tenuto.Engine) -> None:
    turn = engine.session().turn(np.array([1, 2], np.int32), max_new_tokens=2)
    assert list(turn.tokens()) == said([1, 2], 2)


def test_a_turn_whose_end_was_not_read_can_be_aborted_after_the_engine_was_closed() -> None:
    with tenuto.Engine("witness", context_length=CONTEXT) as engine:
        session = engine.session()
        turn = session.turn([1], max_new_tokens=2)
        eventually(lambda: session.info.turn is None)
    assert turn.abort().kept == 2
    assert turn.result().kept == 2
    assert turn.token_ids == said([1], 2)


def test_collecting_an_engine_does_not_wait_for_its_thread() -> None:
    engine = tenuto.Engine("witness")
    loop, entered, release = engine._transport._service._loop, threading.Event(), threading.Event()

    def work(_: object) -> None:
        entered.set()
        release.wait(60)

    loop.call(work)
    assert entered.wait(60)
    del engine
    gc.collect()
    assert loop._thread.is_alive()
    assert not release.is_set()
    release.set()
    loop.close()


def test_closing_an_engine_closes_its_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[WitnessExecutor] = []
    monkeypatch.setattr(WitnessExecutor, "close", lambda executor: closed.append(executor))  # noqa: PLW0108 - a method
    with tenuto.Engine("witness"):
        assert closed == []
    assert len(closed) == 1
