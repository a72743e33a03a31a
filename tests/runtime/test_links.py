"""An engine driven by messages behaves the same in this process and in a separate one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tenuto.base.config import Limits, WorkerSettings
from tenuto.base.errors import ConfigError, InvalidRequest, LimitReached, NotFound, TenutoError, VersionMismatch
from tenuto.base.options import Policy, TurnParams
from tenuto.base.sampling import Sampling
from tenuto.base.turns import Delta
from tenuto.base.views import Ticket
from tenuto.base.wire.link import Link, TurnNews
from tenuto.base.wire.messages import (
    AbortTurn,
    Audit,
    CloseSession,
    Describe,
    Detokenize,
    DropMemory,
    Fork,
    GetSession,
    GetStats,
    ListSessions,
    OpenSession,
    StartTurn,
)
from tenuto.base.wire.request import Request
from tenuto.serve.engine_process import EngineProcess
from tenuto.serve.process import ProcessLink
from tests.runtime.local import LocalLink

UNKNOWN = Sampling(logit_bias=((10**6, 1.0),))
"""Options for a token that the model does not have."""
SETTINGS = WorkerSettings(model="witness", config={"context_length": 2000})


async def local(settings: WorkerSettings) -> Link:
    return LocalLink(settings)


async def separate(settings: WorkerSettings) -> Link:
    return await ProcessLink.open(EngineProcess(settings))


@pytest.fixture(params=[local, separate], ids=["in this process", "in one of its own"])
def play(request: pytest.FixtureRequest) -> Callable[[Callable[[Link], Awaitable[None]]], None]:
    """Runs a story with a link, and audits memory at its end."""

    def run(story: Callable[[Link], Awaitable[None]], settings: WorkerSettings = SETTINGS) -> None:
        async def whole() -> None:
            link: Link = await request.param(settings)
            try:
                await story(link)
                assert "every unit accounted for" in str(await link.call(Audit()))
            finally:
                await link.close()
            assert link.stopped is not None
            with pytest.raises(TenutoError):
                await link.call(Describe())

        asyncio.run(whole())

    return run


class Reader:
    """Collects a turn's events and waits for its end."""

    def __init__(self) -> None:
        self.news: list[TurnNews] = []
        self.ended = asyncio.Event()

    def __call__(self, news: TurnNews) -> None:
        self.news.append(news)
        if isinstance(news, TenutoError) or (isinstance(news, Delta) and news.result is not None):
            self.ended.set()

    @property
    def tokens(self) -> list[int]:
        return [token for news in self.news if isinstance(news, Delta) for token in news.tokens]


def turn(session: str | None, tokens: list[int], most: int = 4, **rest: Any) -> StartTurn:
    params = TurnParams(max_new_tokens=most)
    return StartTurn(kind="turn", tenant="t", session=session, input=tokens, params=params, **rest)


def opened(session: str = "s", **rest: Any) -> OpenSession:
    return OpenSession(session=session, policy=Policy(tenant="t"), **rest)


def test_a_turn_sends_its_ticket_then_its_tokens_then_its_result(play) -> None:
    async def story(link: Link) -> None:
        await link.call(opened())
        reader = Reader()
        await link.start(turn("s", [1, 2]), reader)
        await reader.ended.wait()
        ticket, *updates = reader.news
        assert isinstance(ticket, Ticket)
        assert (ticket.session, ticket.history, ticket.prompt_tokens) == ("s", 0, 2)
        assert len(reader.tokens) == 4
        last = updates[-1]
        assert isinstance(last, Delta)
        assert last.result is not None
        assert (last.result.reason, last.result.committed, last.result.version) == ("length", True, 1)

    play(story)


def test_a_refused_turn_raises_and_sends_nothing(play) -> None:
    async def story(link: Link) -> None:
        for request, error in (
            (turn("nowhere", [1]), NotFound),
            (turn(None, [10**6]), InvalidRequest),
            (turn(None, []), InvalidRequest),
            (StartTurn(kind="turn", tenant="t", input=[1], params=TurnParams(sampling=UNKNOWN)), InvalidRequest),
        ):
            reader = Reader()
            with pytest.raises(error):
                await link.start(request, reader)
            assert reader.news == []

    play(story)


def test_many_calls_at_once_each_get_their_own_answer(play) -> None:
    async def story(link: Link) -> None:
        names = [f"{n}" for n in range(50)]
        views = await asyncio.gather(*(link.call(opened(name)) for name in names))
        assert [view.session_id for view in views] == names
        readers = [Reader() for _ in names]
        await asyncio.gather(
            *(link.start(turn(name, [n]), reader) for n, (name, reader) in enumerate(zip(names, readers, strict=True)))
        )
        await asyncio.gather(*(reader.ended.wait() for reader in readers))
        listed = await link.call(ListSessions(tenant="t", limit=1000))
        assert {view.session_id: view.tokens for view in listed.sessions} == dict.fromkeys(names, 5)
        stats = await link.call(GetStats())
        assert (stats.sessions, stats.generated_tokens, stats.held_tokens) == (50, 200, {"t": 250})

    play(story)


def test_a_tenant_sees_and_uses_only_its_own_visible_sessions(play) -> None:
    async def story(link: Link) -> None:
        await link.call(opened())
        await link.call(OpenSession(session="hidden", policy=Policy(tenant="t", hidden=True)))
        fork = await link.call(Fork(tenant="t", session="hidden", child="as hidden"))
        await link.call(OpenSession(session="s", policy=Policy(tenant="other", priority=5)))
        listed = await link.call(ListSessions(tenant="t"))
        assert [(view.session_id, view.priority) for view in listed.sessions] == [("s", 0)]
        assert (await link.call(GetSession(tenant="t", session=fork.session_id))).version == 0
        await link.call(CloseSession(tenant="other", session="s"))
        for tenant, session in (("other", "s"), ("other", "hidden"), ("", "s")):
            with pytest.raises(NotFound) as refused:
                await link.call(GetSession(tenant=tenant, session=session))
            assert "other" not in str(refused.value)
        assert (await link.call(GetSession(tenant="t", session="s"))).state == "open"

    play(story)


def test_an_abort_applies_only_to_the_turn_it_names(play) -> None:
    async def story(link: Link) -> None:
        await link.call(opened())
        reader = Reader()
        await link.start(turn("s", [1], most=1900), reader)
        ticket = reader.news[0]
        assert isinstance(ticket, Ticket)
        assert not await link.call(AbortTurn(tenant="t", session="s", turn=ticket.turn + 1))
        assert await link.call(AbortTurn(tenant="t", session="s", turn=ticket.turn, keep=2))
        await reader.ended.wait()
        view = await link.call(GetSession(tenant="t", session="s"))
        assert view.tokens <= 3

    play(story)


def test_versions_and_limits_are_checked_in_the_engine(play) -> None:
    async def story(link: Link) -> None:
        await link.call(opened(limits=Limits(sessions=1)))
        with pytest.raises(LimitReached):
            await link.call(opened("more", limits=Limits(sessions=1)))
        with pytest.raises(LimitReached):
            await link.call(Fork(tenant="t", session="s", child="c", limits=Limits(sessions=1)))
        with pytest.raises(VersionMismatch):
            await link.call(CloseSession(tenant="t", session="s", version=3))
        reader = Reader()
        await link.start(turn("s", [1, 2, 3]), reader)
        await reader.ended.wait()
        with pytest.raises(LimitReached):
            await link.start(turn("s", [1], limits=Limits(tokens=7)), Reader())

    play(story)


def test_recomputed_memory_is_counted_with_the_reason_it_was_dropped(play) -> None:
    async def story(link: Link) -> None:
        await link.call(opened())
        for _ in range(2):
            reader = Reader()
            await link.start(turn("s", [5] * 40), reader)
            await reader.ended.wait()
            await link.call(DropMemory())
        stats = await link.call(GetStats())
        assert stats.recomputed == {"flushed": 43}

    play(story)


def test_tokens_are_turned_back_into_text(play) -> None:
    async def story(link: Link) -> None:
        reader = Reader()
        await link.start(
            StartTurn(kind="turn", tenant="t", input="héllo", echo=True, params=TurnParams(max_new_tokens=1)), reader
        )
        ticket = reader.news[0]
        assert isinstance(ticket, Ticket)
        assert ticket.text == "héllo"
        assert await link.call(Detokenize(tokens=ticket.prompt)) == "héllo"
        await reader.ended.wait()

    play(story)


@pytest.mark.parametrize("link", [local, separate], ids=["in this process", "in one of its own"])
@pytest.mark.parametrize(
    "settings",
    [
        {"page_size": 0},
        {"config": {"nonsense": 1}},
        {"config": {"context_length": 2**30}},
        {"config": {"max_running": 99, "token_budget": 99}},
        {"model": "witness:fast"},
        {"memory": -1},
    ],
)
def test_an_engine_that_cannot_be_created_gives_the_reason(
    link: Callable[[WorkerSettings], Awaitable[Link]], settings
) -> None:
    with pytest.raises(ConfigError):
        asyncio.run(link(WorkerSettings(**{"model": "witness", **settings})))  # type: ignore[arg-type]


def test_an_unknown_request_is_refused() -> None:
    async def story() -> None:
        link = LocalLink(SETTINGS)
        with pytest.raises(InvalidRequest):
            await link.call(Request())
        await link.close()

    asyncio.run(story())
