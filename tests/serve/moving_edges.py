"""Edges of replicas between which turns move, for tests: their engines, and what they tell each other, are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import msgspec

from tenuto.base.errors import TenutoError
from tenuto.base.options import Policy, TurnParams
from tenuto.base.turns import Delta, EndReason, TurnResult, Usage
from tenuto.base.views import SessionKey, Ticket
from tenuto.base.wire.between import AnyBetween, News, Take
from tenuto.base.wire.fleet_messages import BeginMove, CopyMove, HoldMove, SettleMove, TakeMove
from tenuto.base.wire.frames import frame
from tenuto.base.wire.link import Link
from tenuto.base.wire.messages import StartTurn
from tenuto.base.wire.moves import MovedTurn, StateEnd, StateOffer, StatePiece
from tenuto.base.wire.replies import Answer, Refusal, Updates, error_of, refusal_of
from tenuto.base.wire.request import Request
from tenuto.serve.fleet.asking import PATH, SECRET
from tenuto.serve.fleet.moving import Moving
from tenuto.serve.fleet.receiving import Receiving
from tenuto.serve.fleet.relays import Relays
from tenuto.serve.shared.live_turn import LiveTurn
from tenuto.serve.shared.tasks import Background
from tenuto.serve.shared.turns import Turns

R = TypeVar("R", bound=Request[Any])

KEY: SessionKey = ("", "s")
TICKET = Ticket(turn=1, session="s", history=0, prompt_tokens=1, max_new_tokens=100, version=1)
OFFER = StateOffer(
    tenant="",
    session="s",
    owner=1,
    identity="",
    page_size=4,
    unit_bytes=[],
    units=[],
    length=10,
    policy=Policy(),
    params=None,
)


def delta(token: int) -> Delta:
    """Returns the output of one token; its text is the token's number."""
    return Delta((token,), f"{token} ", token + 1)


def result(kept: int) -> Delta:
    """Returns the end of a turn of so many tokens."""
    usage = Usage(prompt=1, cached=0, generated=kept, computed=kept)
    ended = TurnResult(EndReason.LENGTH, True, 1, kept, usage, 100, 10)
    return Delta(delivered=kept, result=ended)


def held(tokens: int) -> StateEnd:
    """Returns the end of a held session whose open turn has sampled so many tokens."""
    turn = MovedTurn(
        params=TurnParams(),
        base_length=0,
        replaces=False,
        input=b"",
        output=b"\0\0\0\0" * tokens,
        max_new_tokens=100,
        conversation=None,
        prediction=b"",
        elapsed=0,
        begun=None,
        started=True,
        recorded=False,
        cached=0,
        computed_before=0,
        computed_tokens=0,
        guessed=0,
        accepted=0,
        recomputed={},
        versions=[],
        output_logprobs=[],
        input_scores=[],
        once=None,
        ticket=None,
    )
    return StateEnd(identity="", epoch=1, position=0, units=[], kept=[], pieces=[], turn=turn)


class Engine(Link):
    """A link to an engine whose answers the test controls. `holds`: answers to `HoldMove`. Other requests about moves
    are answered at once."""

    def __init__(self) -> None:
        super().__init__()
        self.holds = held(0)
        self.stays = True  # what `SettleMove` says
        self.copies: list[list[StatePiece] | TenutoError] = []  # the next answers to `CopyMove`; then nothing is left
        self.asked: list[Request[Any]] = []

    def send(self, request: Request[Any]) -> None:
        self.asked.append(request)
        answers: dict[type[Request[Any]], Callable[[], object]] = {
            BeginMove: lambda: OFFER,
            CopyMove: lambda: self.copies.pop(0) if self.copies else [],
            HoldMove: lambda: self.holds,
            SettleMove: lambda: self.stays,
        }
        if type(request) in answers:
            asyncio.get_running_loop().call_soon(self.answer, request, answers[type(request)]())

    def answer(self, request: Request[Any], value: object) -> None:
        if isinstance(value, TenutoError):
            self.refuse(request, value)
            return
        self.take(Answer(call=request.call, value=msgspec.Raw(msgspec.msgpack.encode(value))))

    def tell(self, request: Request[Any], *news: Delta) -> None:
        """Tells of output of the turn that this request has begun here."""
        self.take(Updates(updates=[(request.call, each) for each in news]))

    def refuse(self, request: Request[Any], error: TenutoError) -> None:
        self.take(refusal_of(request.call, error))

    async def last(self, kind: type[R]) -> R:
        """Returns the last request of a kind, once there is one."""
        await until(lambda: any(isinstance(each, kind) for each in self.asked))
        return next(each for each in reversed(self.asked) if isinstance(each, kind))

    async def close(self) -> None:
        """Does nothing: there is no process."""


class Answering:
    """The part of another replica's answer that has come so far."""

    def __init__(self) -> None:
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue()

    async def piece(self) -> bytes:
        return await self._pieces.get()

    def tell(self, *deltas: Delta) -> None:
        for each in deltas:
            self._pieces.put_nowait(b"".join(frame(msgspec.msgpack.encode(News(delta=each)))))


class Others:
    """The other replicas, as an edge sees them. The test makes their streamed answers, through `answers`."""

    def __init__(self) -> None:
        self.asked: list[AnyBetween] = []
        self.urls: list[str] = []  # where each was asked
        self.answers: list[Answering] = []
        self.open = 0  # the number of answers that are being read
        self.error: BaseException | None = None  # raised instead of streamed answers
        self.answer = b""  # to other requests
        self.refusals: dict[type[AnyBetween], TenutoError] = {}  # of these, by kind

    async def ask(self, url: str, request: AnyBetween) -> bytes:
        self.asked.append(request)
        self.urls.append(url)
        if type(request) in self.refusals:
            raise self.refusals[type(request)]
        return self.answer

    @asynccontextmanager
    async def stream(self, url: str, request: AnyBetween) -> AsyncIterator[Answering]:
        self.asked.append(request)
        self.urls.append(url)
        if self.error is not None:
            raise self.error
        self.answers.append(Answering())
        self.open += 1
        try:
            yield self.answers[-1]
        finally:
            self.open -= 1

    def take(self) -> Take:
        """Returns the last request to take a session over, as the other replica gets it."""
        last = next(each for each in reversed(self.asked) if isinstance(each, Take))
        return msgspec.msgpack.decode(msgspec.msgpack.encode(last), type=Take)


class Edge:
    """The part of a replica's edge that moves turns. `owner`: the address of the session's owner, `None` for this
    replica."""

    def __init__(self) -> None:
        self.link, self.others, self.owner = Engine(), Others(), "elsewhere"
        self.turns = Turns(self.link)
        self._background = Background()
        between = cast("Any", self.others)
        self.relays = Relays(self.turns, between, self._locate, 0)
        edge = SimpleNamespace(
            turns=self.turns, link=self.link, spawn=self._background.spawn, draining=False, leaving=False
        )
        self.moving = Moving(cast("Any", edge), between, self.relays)
        fleet = SimpleNamespace(
            edge=edge,
            relays=self.relays,
            moving=self.moving,
            is_forwarded=lambda _: True,
            arrived=lambda _: None,
        )
        self._receiving = Receiving(cast("Any", None), cast("Any", fleet))
        self._asking: list[asyncio.Queue[Any]] = []  # what comes from each replica that asks

    async def _locate(self, _: SessionKey) -> str | None:
        return self.owner

    async def start(self, *news: Delta, continues: bool = True) -> tuple[LiveTurn, Request[Any]]:
        """Starts a turn with this output so far. Returns it, and the request that the engine has got."""
        request = StartTurn(kind="turn", tenant="", session="s", input=[1], resumable=continues)
        starting = asyncio.ensure_future(self.turns.start(request, continues=continues))
        asked = await self.link.last(StartTurn)
        self.link.answer(asked, TICKET)
        self.link.tell(asked, *news)
        return await starting, asked

    def leave(self) -> None:
        """Lets the replica whose request came last leave before its answer ends."""
        self._asking[-1].put_nowait({"type": "http.disconnect"})

    async def move(self, tokens: int) -> None:
        """Moves the session, whose turn has sampled so many tokens, to another replica."""
        self.link.holds, self.link.stays = held(tokens), False
        before = len(self.others.answers)
        await self.moving.move(KEY, "other")
        await until(lambda: len(self.others.answers) > before)

    def receive(self, take: Take) -> asyncio.Task[list[Delta]]:
        """Gets a request to take the session over. Returns all of the answer to the asking replica, or raises the
        refusal."""
        return asyncio.ensure_future(self._receive(take))

    async def _receive(self, take: Take) -> list[Delta]:
        news = [msgspec.msgpack.decode(each[4:], type=News) for each in await self.answer(take)]
        return [each.delta for each in news if each.delta is not None]

    async def answer(self, request: AnyBetween) -> list[bytes]:
        """Answers a request of another replica. Returns the pieces of the answer's body; raises the refusal."""
        told: list[Any] = []
        got: asyncio.Queue[Any] = asyncio.Queue()
        self._asking.append(got)
        got.put_nowait({"type": "http.request", "body": msgspec.msgpack.encode(request)})

        async def send(message: Any) -> None:
            told.append(message)

        scope = {"type": "http", "path": PATH, "headers": [(SECRET.encode(), b"")]}
        await self._receiving(scope, got.get, send)
        if told[0]["status"] != 200:
            raise error_of(msgspec.msgpack.decode(told[1]["body"], type=Refusal))
        return [each["body"] for each in told[1:] if each["body"]]

    async def arrive(self, take: Take) -> TakeMove:
        """Takes the session over. Returns the request that the engine has got, and has answered."""
        self.receive(take)
        count = len([each for each in self.link.asked if isinstance(each, TakeMove)])
        await until(lambda: len([each for each in self.link.asked if isinstance(each, TakeMove)]) > count)
        asked = await self.link.last(TakeMove)
        self.link.answer(asked, TICKET)
        return asked


async def until(condition: Callable[[], bool]) -> None:
    """Lets others run until a condition holds."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


async def settled() -> None:
    """Lets others run until they have nothing to do but wait."""
    for _ in range(50):
        await asyncio.sleep(0)
