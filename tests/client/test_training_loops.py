"""Calls that training loops make between rollouts, in this process and on a server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import tenuto
from tenuto.base.errors import InvalidRequest, MemoryReleased
from tests.serve.server import Server, serving


@pytest.fixture(scope="module")
def witness() -> Iterator[Server]:
    """A separate server, since its weights are replaced."""
    with serving("--model", "witness", "--context-length", "512") as server:
        yield server
        server.audit()


@pytest.fixture(params=["here", "server"])
def engine(request: pytest.FixtureRequest, witness: Server) -> Iterator[Any]:
    if request.param == "server":
        with tenuto.connect(witness.url) as remote:
            yield remote
    else:
        with tenuto.Engine("witness", context_length=512) as local:
            yield local


def test_memory_is_released_between_rollouts_and_other_weights_give_other_output(engine: Any) -> None:
    session, twin = engine.session(), engine.session()
    for each in (session, twin):
        each.turn([1, 2, 3], max_new_tokens=4).result()
    engine.release_memory_occupation()
    with pytest.raises(MemoryReleased):
        session.turn([4], max_new_tokens=2)
    engine.resume_memory_occupation(["kv_cache"])
    with pytest.raises(MemoryReleased):
        session.turn([4], max_new_tokens=2)
    engine.resume_memory_occupation(["weights"])
    old = list(twin.turn([4], max_new_tokens=12).tokens())
    engine.update_weights_from_disk("others")
    new = session.turn([4], max_new_tokens=12)
    assert list(new.tokens()) != old
    assert new.result().usage.cached == 0  # no memory of the old weights is used
    session.close()
    twin.close()


@pytest.mark.parametrize("retract", [False, True])
def test_a_turn_waits_while_generation_is_paused(engine: Any, retract: bool) -> None:
    session = engine.session()
    turn = session.turn([5, 6], max_new_tokens=200)
    read = [next(turn.tokens()) for _ in range(3)]
    engine.pause_generation(retract=retract)
    version = session.info.version
    engine.release_memory_occupation(["kv_cache"])
    assert session.info.version == version
    engine.resume_memory_occupation()
    engine.continue_generation()
    rest = list(turn.tokens())
    assert len(read) + len(rest) == 200
    assert turn.result().usage.generated == 200
    session.close()


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (lambda engine: engine.release_memory_occupation(["heap"]), "tags"),
        (lambda engine: engine.resume_memory_occupation([]), "tags"),
        (lambda engine: engine.release_memory_occupation("weights"), "tags"),
        (lambda engine: engine.pause_generation(retract="yes"), "retract"),
        (lambda engine: engine.update_weights_from_disk("x", abort=1), "abort"),
    ],
)
def test_wrong_arguments_are_refused_and_named(engine: Any, call: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        call(engine)
    assert refused.value.param == param


def test_the_asynchronous_client_does_the_same(witness: Server) -> None:
    async def main() -> None:
        async with tenuto.connect_async(witness.url) as engine:
            await engine.pause_generation()
            await engine.release_memory_occupation()
            await engine.resume_memory_occupation()
            await engine.update_weights_from_disk("others still")
            await engine.continue_generation()
            assert (await engine.generate([1], max_new_tokens=2).result()).committed

    asyncio.run(main())
