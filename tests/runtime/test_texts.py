"""Text work is done outside the engine's thread: its calls are noted, or held, where they happen."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from tenuto.base.config import WorkerSettings
from tenuto.base.options import Policy, TurnParams
from tenuto.base.turns import Delta, Message
from tenuto.base.views import Ticket
from tenuto.base.wire.link import TurnNews
from tenuto.base.wire.messages import (
    Detokenize,
    Draft,
    Fork,
    GetSession,
    ListTurns,
    OpenSession,
    Rewind,
    StartTurn,
    Trim,
)
from tenuto.runtime.lanes import LONG
from tenuto.text.template import Template
from tenuto.text.tokenizer import Tokenizer
from tests.runtime.local import LocalLink

SECONDS = 60
TEXT_WORK: tuple[tuple[type, str], ...] = (
    (Tokenizer, "encode"),
    (Tokenizer, "decode"),
    (Tokenizer, "least_tokens"),
    (Tokenizer, "written_bytes"),
    (Template, "render"),
)
"""All work that takes longer than the text of one sampled token."""


class Threads:
    """Notes the threads of text work. Decoding more than `LONG` tokens waits while it is held."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.of: dict[str, set[str]] = defaultdict(set)
        self.held, self.may_go = threading.Event(), threading.Event()
        self.may_go.set()
        for owner, name in TEXT_WORK:
            patch.setattr(owner, name, self._noting(name, getattr(owner, name)))

    def _noting(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            self.of[name].add(threading.current_thread().name)
            if name == "decode" and len(args[1]) >= LONG and not self.may_go.is_set():
                self.held.set()
                assert self.may_go.wait(SECONDS)
            return work(*args, **options)

        return noted

    def clear(self) -> None:
        """Clears the notes from making the engine."""
        self.of.clear()


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Threads]:
    noted = Threads(monkeypatch)
    yield noted
    noted.may_go.set()


def play(story: Callable[[LocalLink], Awaitable[None]]) -> None:
    async def whole() -> None:
        link = LocalLink(WorkerSettings(model="witness", config={"context_length": 2 * LONG}))
        try:
            async with asyncio.timeout(SECONDS):
                await link.call(OpenSession(session="s", policy=Policy(tenant="t"), system="Be brief."))
                await story(link)
        finally:
            await link.close()

    asyncio.run(whole())


class Reader:
    def __init__(self) -> None:
        self.news: list[TurnNews] = []
        self.ended = asyncio.Event()

    def __call__(self, news: TurnNews) -> None:
        self.news.append(news)
        if isinstance(news, Delta) and news.result is not None:
            self.ended.set()

    @property
    def ticket(self) -> Ticket:
        (ticket,) = (news for news in self.news if isinstance(news, Ticket))
        return ticket


def turn(given: Any, session: str | None = "s", kind: Any = "turn", **rest: Any) -> StartTurn:
    params = TurnParams(max_new_tokens=3, logprobs=2, input_logprobs=None if kind == "regenerate" else 1)
    return StartTurn(kind=kind, tenant="t", session=session, input=given, params=params, echo=True, **rest)


async def ended(link: LocalLink, request: StartTurn) -> Reader:
    reader = Reader()
    await link.start(request, reader)
    await reader.ended.wait()
    return reader


def said(text: str) -> list[Message]:
    return [Message("user", text)]


@pytest.mark.parametrize("length", [20, LONG // 2 + 1, LONG + 1])
def test_the_engines_thread_only_decodes_sampled_tokens_whatever_is_requested(threads: Threads, length: int) -> None:
    text = "x" * length

    async def story(link: LocalLink) -> None:
        threads.clear()
        await link.call(Fork(tenant="t", session="s", child="fork"))
        for request in (
            turn(said(text)),
            turn((), kind="regenerate"),
            turn(text, None),
            turn(text, None, markup=True),
            turn(said(text), None),
        ):
            reader = await ended(link, request)
            assert reader.news[0] is reader.ticket
            assert text in (reader.ticket.text or "")
            deltas = [news for news in reader.news if isinstance(news, Delta)]
            assert all(entry.raw and entry.top[0].raw for delta in deltas for entry in delta.logprobs)
        await link.call(Draft(tenant="t", session="fork", input=said(text)))
        page = await link.call(ListTurns(tenant="t", session="s"))
        assert text in (page.records[0].input_text or "")
        assert await link.call(Detokenize(tokens=page.records[0].input_tokens)) == page.records[0].input_text
        await ended(link, turn(said("short")))
        await ended(link, turn(said("short again")))
        await link.call(Trim(tenant="t", session="s", turns=[1, 3], child="trimmed"))
        await link.call(Rewind(tenant="t", session="s", turn=1))
        await ended(link, turn(said("short")))

    play(story)
    assert set(threads.of) == {name for _, name in TEXT_WORK}
    assert "tenuto-engine" not in set().union(*threads.of.values())


def test_only_its_own_turn_waits_for_the_text_of_a_long_echo(threads: Threads) -> None:
    async def story(link: LocalLink) -> None:
        await link.call(OpenSession(session="plain", policy=Policy(tenant="t")))
        threads.may_go.clear()
        reader = Reader()
        starting = asyncio.ensure_future(link.start(turn([7] * (LONG + 9), "plain"), reader))
        assert await asyncio.to_thread(threads.held.wait, SECONDS)
        other = await ended(link, turn(said("hello"), None))
        assert other.ticket.text is not None
        while (await link.call(GetSession(tenant="t", session="plain"))).turns == 0:
            await asyncio.sleep(0)
        assert not starting.done()
        assert not reader.news
        threads.may_go.set()
        await starting
        await reader.ended.wait()
        assert reader.news[0] is reader.ticket

    play(story)
