"""Input on its way into the engine: input that cannot fit is never encoded, long input delays no other turn, and
withdrawn input starts none. Encodings are counted, and held, where they happen."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest

from tenuto.base.config import Limits, WorkerSettings
from tenuto.base.errors import ContextExceeded, NotFound, SessionClosed, TenutoError, TurnAborted, VersionMismatch
from tenuto.base.options import Policy, TurnParams
from tenuto.base.turns import MESSAGE_SIZE, Delta, Message
from tenuto.base.views import Ticket, Transition
from tenuto.base.wire.link import TurnNews
from tenuto.base.wire.messages import (
    Audit,
    CloseSession,
    Draft,
    GetSession,
    GetStats,
    OpenSession,
    Rewind,
    StartTurn,
    Withdraw,
)
from tenuto.engine.engine import Engine
from tenuto.engine.turn_operations import TurnOperations
from tenuto.runtime.intake import SHORT_INPUT
from tenuto.runtime.lanes import LONG as LONG_INPUT
from tenuto.runtime.preparation import size_of
from tenuto.serve.shared.turns import Turns
from tenuto.session.turn import Turn
from tenuto.text.tokenizer import Tokenizer
from tests.runtime.local import LocalLink

CONTEXT = 70_000
LARGE_INPUT = LONG_INPUT + 1000
"""The size that counts as large in tests; the witness would need seconds for the real one."""
LONGEST = len("<|im_start|>")
"""Bytes of the witness's longest token."""
SECONDS = 60


class Encoder:
    """Wraps `Tokenizer.encode`: notes the length of each text and the thread that encodes it. After `hold`, long texts
    wait until `release`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[int, str]] = []
        self.held = threading.Event()  # a text is waiting
        self._may_go = threading.Event()
        self._may_go.set()
        encode = Tokenizer.encode

        def noted(tokenizer: Tokenizer, text: str, **options: Any) -> list[int]:
            self.seen.append((len(text), threading.current_thread().name))
            if len(text) >= LONG_INPUT and not self._may_go.is_set():
                self.held.set()
                assert self._may_go.wait(SECONDS)
            return encode(tokenizer, text, **options)

        patch.setattr(Tokenizer, "encode", noted)

    def hold(self) -> None:
        self.held.clear()
        self._may_go.clear()

    def release(self) -> None:
        self._may_go.set()

    def lengths(self) -> list[int]:
        """Returns the lengths of the texts that are more than a template's."""
        return [length for length, _ in self.seen if length > 60]


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Encoder]:
    encoder = Encoder(monkeypatch)
    yield encoder
    encoder.release()


def play(story: Callable[[LocalLink], Awaitable[None]], context: int = CONTEXT) -> None:
    async def whole() -> None:
        link = LocalLink(WorkerSettings(model="witness", config={"context_length": context}))
        try:
            async with asyncio.timeout(SECONDS):
                await link.call(OpenSession(session="s", policy=Policy(tenant="t")))
                await story(link)
            assert "every unit accounted for" in str(await link.call(Audit()))
        finally:
            await link.close()

    asyncio.run(whole())


class Reader:
    def __init__(self) -> None:
        self.ticket: Ticket | None = None
        self.ended = asyncio.Event()

    def __call__(self, news: TurnNews) -> None:
        if isinstance(news, Ticket):
            self.ticket = news
        elif not isinstance(news, Delta) or news.result is not None:
            self.ended.set()


def said(text: str) -> list[Any]:
    return [Message("user", text)]


def turn(given: str | list[Any], session: str | None = "s", **rest: Any) -> StartTurn:
    return StartTurn(kind="turn", tenant="t", session=session, input=given, params=TurnParams(max_new_tokens=1), **rest)


async def ended(link: LocalLink, request: StartTurn) -> Ticket:
    """Runs a turn to its end and returns its ticket."""
    reader = Reader()
    await link.start(request, reader)
    await reader.ended.wait()
    assert reader.ticket is not None
    return reader.ticket


async def waiting(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, SECONDS)


TOO_LONG = "x" * (LONGEST * (CONTEXT + 3))


@pytest.mark.parametrize("given", [TOO_LONG, said(TOO_LONG), said("x" * 99) + said(TOO_LONG), [1] * (CONTEXT + 9)])
def test_input_that_cannot_fit_is_refused_and_never_encoded(encoder: Encoder, given: str | list[Any]) -> None:
    async def story(link: LocalLink) -> None:
        for request in (turn(given), turn(given, None), turn(given, markup=True), turn(given, None, markup=True)):
            with pytest.raises(ContextExceeded):
                await link.start(request, Reader())
        with pytest.raises(ContextExceeded):
            await link.call(Draft(tenant="t", session="s", input=given))
        view = await link.call(GetSession(tenant="t", session="s"))
        assert (view.version, view.turn) == (0, None)
        await ended(link, turn(said("x")))

    play(story)
    assert encoder.lengths() == []


def test_only_the_rest_of_a_context_counts(encoder: Encoder) -> None:
    context = 20_000

    async def story(link: LocalLink) -> None:
        await ended(link, turn([1] * (context - 1000)))
        encoder.seen.clear()
        with pytest.raises(ContextExceeded):
            await link.start(turn("x" * LONGEST * 1001), Reader())
        assert encoder.lengths() == []
        with pytest.raises(ContextExceeded):
            await link.start(turn("x" * LONGEST * 900), Reader())
        assert encoder.lengths()  # it might have fitted
        await link.call(Rewind(tenant="t", session="s", turn=0))
        await ended(link, turn("x" * LONGEST * 1001))

    play(story, context)


def test_a_system_message_that_cannot_fit_opens_no_session(encoder: Encoder) -> None:
    async def story(link: LocalLink) -> None:
        with pytest.raises(ContextExceeded):
            await link.call(OpenSession(session="big", policy=Policy(tenant="t"), system=TOO_LONG))
        with pytest.raises(NotFound):
            await link.call(GetSession(tenant="t", session="big"))

    play(story)
    assert encoder.lengths() == []


@pytest.mark.parametrize("length", [100, SHORT_INPUT + 1, LONG_INPUT + 1, LARGE_INPUT + 1])
@pytest.mark.parametrize("as_messages", [False, True])
def test_input_is_encoded_outside_the_engines_thread(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch, length: int, *, as_messages: bool
) -> None:
    monkeypatch.setattr("tenuto.runtime.lanes.LARGE", LARGE_INPUT)

    async def story(link: LocalLink) -> None:
        text = "x" * length
        given: str | list[Any] = said(text) if as_messages else text
        for session in ("s", None):
            assert (await ended(link, turn(given, session))).prompt_tokens >= length
        await link.call(Rewind(tenant="t", session="s", turn=0))
        await link.call(Draft(tenant="t", session="s", input=given))

    play(story)
    assert len(encoder.lengths()) == 3
    assert "tenuto-engine" not in {thread for _, thread in encoder.seen}


def test_other_turns_continue_while_long_input_is_encoded(encoder: Encoder) -> None:
    async def story(link: LocalLink) -> None:
        encoder.hold()
        long = asyncio.ensure_future(ended(link, turn(said("x" * LONG_INPUT))))
        await waiting(encoder.held)
        await link.call(OpenSession(session="other", policy=Policy(tenant="t")))
        for text in ("hello", "a word " * 900):
            assert (await ended(link, turn(said(text[:SHORT_INPUT]), "other"))).prompt_tokens > 5
        assert not long.done()
        encoder.release()
        assert (await long).prompt_tokens > LONG_INPUT

    play(story)


def test_input_is_prepared_again_if_its_session_changes_meanwhile(encoder: Encoder) -> None:
    async def story(link: LocalLink) -> None:
        opening, first = said("x" * LONG_INPUT), said("first")
        alone = (await ended(link, turn(opening, None))).prompt_tokens
        await ended(link, turn(first))
        encoder.hold()
        starting = asyncio.ensure_future(ended(link, turn(opening)))
        await waiting(encoder.held)
        await link.call(Rewind(tenant="t", session="s", turn=0))
        encoder.release()
        ticket = await starting
        assert (ticket.history, ticket.prompt_tokens) == (0, alone)  # as an opening, not as what follows a message
        await ended(link, turn(said("and then?")))

    play(story)


def test_input_prepared_for_an_outdated_version_is_refused(encoder: Encoder) -> None:
    async def story(link: LocalLink) -> None:
        await ended(link, turn(said("first")))
        encoder.hold()
        starting = asyncio.ensure_future(ended(link, turn(said("x" * LONG_INPUT), version=1)))
        await waiting(encoder.held)
        await link.call(Rewind(tenant="t", session="s", turn=0))
        encoder.release()
        with pytest.raises(VersionMismatch):
            await starting
        assert (await link.call(GetSession(tenant="t", session="s"))).version == 2

    play(story)


def test_input_prepared_for_a_session_closed_meanwhile_is_refused(encoder: Encoder) -> None:
    async def story(link: LocalLink) -> None:
        encoder.hold()
        starting = asyncio.ensure_future(ended(link, turn(said("x" * LONG_INPUT))))
        await waiting(encoder.held)
        await link.call(CloseSession(tenant="t", session="s"))
        encoder.release()
        with pytest.raises(NotFound):
            await starting

    play(story)


@pytest.mark.parametrize("length", [SHORT_INPUT + 1, LONG_INPUT])
def test_input_of_a_closed_session_does_not_start_in_the_next_one_with_its_id(encoder: Encoder, length: int) -> None:
    async def story(link: LocalLink) -> None:
        encoder.hold()
        other = asyncio.ensure_future(link.start(turn("x" * LONG_INPUT, None), Reader()))
        await waiting(encoder.held)  # and with it the lane of long texts
        first = Draft(tenant="t", session="s", input="x" * LONG_INPUT)
        starting: list[asyncio.Future[object]] = [asyncio.ensure_future(link.call(first)) for _ in range(2)]
        starting.append(asyncio.ensure_future(link.start(turn("y" * length), Reader())))
        await asyncio.sleep(0)  # they are sent
        await link.call(CloseSession(tenant="t", session="s"))
        await link.call(OpenSession(session="s", policy=Policy(tenant="t")))
        encoder.release()
        for start in starting:
            with pytest.raises(SessionClosed):
                await start
        await other
        view = await link.call(GetSession(tenant="t", session="s"))
        assert (view.turns, view.turn) == (0, None)

    play(story)


def test_input_sent_before_its_session_was_opened_is_refused(encoder: Encoder) -> None:
    async def story(link: LocalLink) -> None:
        encoder.hold()
        other = asyncio.ensure_future(link.start(turn("x" * LONG_INPUT, None), Reader()))
        await waiting(encoder.held)  # and with it the lane of long texts
        starting = asyncio.ensure_future(link.start(turn("y" * LONG_INPUT, "later"), Reader()))
        await asyncio.sleep(0)  # it is sent
        await link.call(OpenSession(session="later", policy=Policy(tenant="t")))
        encoder.release()
        with pytest.raises(NotFound):
            await starting
        await other
        assert (await link.call(GetSession(tenant="t", session="later"))).turn is None

    play(story)


def test_a_turn_refused_for_other_reasons_is_refused_before_long_input_is_encoded(encoder: Encoder) -> None:
    async def story(link: LocalLink) -> None:
        long = said("x" * LONG_INPUT)
        for request in (turn(long, "nowhere"), turn(long, version=7), turn(long, limits=Limits(tokens=0))):
            with pytest.raises(TenutoError):
                await link.start(request, Reader())

    play(story)
    assert encoder.lengths() == []


def test_withdrawn_input_starts_no_turn_and_is_not_encoded_if_still_waiting(encoder: Encoder) -> None:
    async def story(link: LocalLink) -> None:
        encoder.hold()
        names = ["first", "second"]
        requests = [turn("x" * LONG_INPUT, None, name=name) for name in names]
        starting = [asyncio.ensure_future(link.start(request, Reader())) for request in requests]
        await waiting(encoder.held)
        for name in names:
            assert await link.call(Withdraw(name=name))
        encoder.release()
        for start in starting:
            with pytest.raises(TurnAborted):
                await start
        assert not await link.call(Withdraw(name="first"))
        stats = await link.call(GetStats())
        assert (stats.sessions, stats.transitions.get(Transition("submit"), 0)) == (1, 0)

    play(story)
    assert encoder.lengths() == [LONG_INPUT]


def test_a_client_that_disconnects_while_its_input_is_prepared_leaves_no_turn(encoder: Encoder) -> None:
    async def story(link: LocalLink) -> None:
        turns = Turns(link)
        encoder.hold()
        starting = asyncio.ensure_future(turns.start(turn("x" * LONG_INPUT)))
        await waiting(encoder.held)
        starting.cancel()
        with suppress(asyncio.CancelledError):
            await starting
        while turns.open_turns() and not any(live.rolling_back for live in turns.open_turns()):
            await asyncio.sleep(0.01)
        await link.call(GetStats())  # earlier messages have arrived by now
        encoder.release()
        while turns.open_turns():
            await asyncio.sleep(0.01)
        stats = await link.call(GetStats())
        assert (stats.generated_tokens, stats.prompt_tokens, stats.steps) == (0, 0, stats.steps)
        assert (await link.call(GetSession(tenant="t", session="s"))).turn is None
        assert turns.open.total() == 0

    play(story)


def test_input_of_one_session_keeps_its_order(encoder: Encoder) -> None:
    async def story(link: LocalLink) -> None:
        encoder.hold()
        long = asyncio.ensure_future(link.call(Draft(tenant="t", session="s", input="x" * LONG_INPUT)))
        await waiting(encoder.held)
        short = asyncio.ensure_future(link.call(Draft(tenant="t", session="s", input="yy")))
        await link.call(GetStats())
        assert not short.done()
        encoder.release()
        await asyncio.gather(long, short)
        assert (await ended(link, turn("yy"))).prompt_tokens == 2

    play(story)
    assert [length for length, _ in encoder.seen if length in (2, LONG_INPUT)] == [LONG_INPUT, 2, 2]


@pytest.mark.parametrize(
    ("given", "size"),
    [("abc", 3), ([5] * 9, 9), (said("") * 9999, 9999 * MESSAGE_SIZE), (said("abc"), 3 + MESSAGE_SIZE)],
)
def test_input_has_a_size_even_if_its_messages_are_empty(given: str | list[Any], size: int) -> None:
    assert size_of(given) == size


class Gate:
    """Holds the engine's thread at the point where it is queued among the commands, until `open`."""

    def __init__(self, link: LocalLink) -> None:
        self.reached, self._opened = threading.Event(), threading.Event()
        link._service._loop.call(self._wait)

    def _wait(self, _: Engine) -> None:
        self.reached.set()
        self._opened.wait(SECONDS)

    def open(self) -> None:
        self._opened.set()


def test_input_that_must_be_prepared_again_is_not_overtaken(monkeypatch: pytest.MonkeyPatch) -> None:
    drafted: list[int] = []
    draft = TurnOperations.draft

    def noted(turns: TurnOperations, session_id: str, tokens: Sequence[int], **rest: Any) -> Turn:
        drafted.append(len(tokens))
        return draft(turns, session_id, tokens, **rest)

    monkeypatch.setattr(TurnOperations, "draft", noted)

    async def story(link: LocalLink) -> None:
        await ended(link, turn(said("first")))
        before, between = Gate(link), None
        try:
            await waiting(before.reached)
            rewinding = asyncio.ensure_future(link.call(Rewind(tenant="t", session="s", turn=0)))
            await asyncio.sleep(0)
            between = Gate(link)
            older = asyncio.ensure_future(link.call(Draft(tenant="t", session="s", input="older")))
            await asyncio.sleep(0)  # it is prepared for a history that is about to change
            before.open()
            await waiting(between.reached)
            newer = asyncio.ensure_future(link.call(Draft(tenant="t", session="s", input="new")))
            await asyncio.sleep(0)
        finally:
            before.open()
            if between is not None:
                between.open()
        await asyncio.gather(rewinding, older, newer)

    play(story)
    assert drafted == [len("older"), len("new")]
