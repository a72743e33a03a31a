"""The stream of one turn: its deltas, kept for any number of readers, which can resume."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator

import msgspec

from tenuto.base.errors import InvariantError, TenutoError
from tenuto.base.options import TurnParams
from tenuto.base.tools.answer_part import AnswerPart
from tenuto.base.tools.answers import Reading
from tenuto.base.tools.definitions import NO_TOOLS
from tenuto.base.tools.variables import NO_VARIABLES
from tenuto.base.turns import AbortGate, Delta, Keep, TurnResult, joined
from tenuto.base.views import Ticket
from tenuto.base.wire.between import Unsaid
from tenuto.base.wire.link import TurnNews
from tenuto.base.wire.messages import StartTurn
from tenuto.base.wire.moves import LiveStream


class LiveTurn:
    """One turn, from its request to its end.

    Invariant: `deltas` are the deltas for readers, in order. Once the turn has ended, the last one has its result,
    unless `error` says why there is no result. A delta's number, counted from 1, is the id of its event.
    """

    def __init__(
        self,
        request: StartTurn,
        *,
        continues: bool = False,
        once: tuple[str, bytes] | None = None,
        name: str | None = None,
    ) -> None:
        """`continues`: the turn continues without readers. `once`: the client's idempotency key and a digest of its
        request. `name`: the id of a turn that has one."""
        self.id = name or f"turn-{secrets.token_hex(12)}"
        self.request = msgspec.structs.replace(request, name=self.id)  # most of it is dropped once the engine has it
        self.continues = continues
        self.once = once
        self.requested_at = time.perf_counter()
        self.accepted_at: float | None = None  # when the engine had accepted it; by the same clock, like the next two
        self.first_at: float | None = None  # when its first tokens came
        self.last_at = self.requested_at  # when its last delta came
        self.deltas: list[Delta] = []
        self.ticket: Ticket | None = None  # set once, by `deliver`, like the next two
        self.result: TurnResult | None = None
        self.error: TenutoError | None = None
        self.reading: Reading | None = None  # how the answer is parsed, if at all; set by the caller of `start`
        self.answered = asyncio.Event()  # set once the engine has accepted the turn, or it has failed
        self.readers = 0  # how many want the turn to continue; each counts itself
        self.followers = Counter[str]()  # the readers that are replicas; each counts while it may have readers itself
        self.listeners: list[Callable[[], None]] = []  # called after every delta and at the end; must not raise
        self.refused: TenutoError | None = None  # why the turn must not begin; set by an abort
        self.rolling_back = False  # whether it is being aborted for lack of readers
        # Set when its session leaves for another replica: aborts it there, or returns False if it has stayed here. The
        # second argument: see `Turns.abort`.
        self.elsewhere: Callable[[Keep, bool], Awaitable[bool]] | None = None
        self.lost: TenutoError | None = None  # the engine's error, until it is known whether the turn has moved
        # Invariant: a turn has one source at a time, and each source begins where the deltas end. Written by `Source`.
        self.source: Source | None = None
        self._gate = AbortGate()
        self.begin_abort = self._gate.begin_abort
        self._over = asyncio.Event()

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def ended(self) -> bool:
        return self.result is not None or self.error is not None

    @property
    def committed(self) -> bool:
        return self.result is not None and self.result.committed

    @property
    def state(self) -> str:
        """One of waiting, open, committed, aborted and failed."""
        if self.result is not None:
            return "committed" if self.result.committed else "aborted"
        if self.error is not None:
            return "failed"
        return "open" if self.ticket is not None else "waiting"

    @property
    def delivered(self) -> int:
        """Number of leading output tokens whose text readers have received."""
        return self._gate.delivered

    @property
    def waited(self) -> float | None:
        """Seconds from the request until the turn began to compute, or to its end; `None` if it has no result."""
        if self.accepted_at is None or self.result is None:
            return None
        return self.accepted_at - self.requested_at + self.result.queued

    def require_accepted(self) -> None:
        """Raises the error with which the engine refused the turn, if it did."""
        if self.error is not None and self.ticket is None:
            raise self.error

    @property
    def accepted(self) -> bool:
        """Whether this replica's engine has the turn."""
        return self.ticket is not None and self.source is not None and self.elsewhere is None

    # -- written by its owner, `Turns`

    def goes_on(self, stream: LiveStream) -> Source:
        """Adds what another replica's `stream` of the turn has and this one lacks. Returns the source that follows: the
        engine of this replica, to which the turn has moved."""
        more = Unsaid(*self.position).of(stream.said)
        if more is not None and (more.tokens or more.text):
            self.deliver(more)
        tokens, characters = stream.ahead
        return Source(self, (len(stream.said.tokens) - tokens, len(stream.said.text) - characters))

    def deliver(self, news: TurnNews) -> None:
        """Handles a message about the turn from the link."""
        match news:
            case Delta():
                if (delta := self._gate.take(news)) is not None:
                    self._add(delta)
            case Ticket():
                self._drop_contents()
                self.ticket, self.accepted_at = news, time.perf_counter()
                self.answered.set()
            case _:
                self.fail(news)

    def fail(self, error: TenutoError) -> None:
        """Ends the turn without a result."""
        self._drop_contents()
        self.error = error.with_traceback(None)  # a traceback would keep the input alive
        self.answered.set()
        self._tell()

    def _add(self, delta: Delta) -> None:
        self.last_at = time.perf_counter()
        if delta.tokens and self.first_at is None:
            self.first_at = self.last_at
        if delta.result is not None and (delta.tokens or delta.text):  # the end is its own event, to resume at
            self.deltas.append(msgspec.structs.replace(delta, result=None))
            delta = Delta(delivered=delta.delivered, result=delta.result)
        self.deltas.append(delta)
        self.result = delta.result
        self._tell()

    def _drop_contents(self) -> None:
        """Drops the input, options, tools and variables: they may be large, and the turn is kept after its end."""
        self.request = msgspec.structs.replace(
            self.request, input=[], params=TurnParams(), tools=NO_TOOLS, variables=NO_VARIABLES
        )

    # -- for readers

    async def finished(self) -> TurnResult:
        """Waits for the end, as a reader. Raises the error that ended the turn."""
        self.readers += 1
        try:
            await self._over.wait()
        finally:
            self.readers -= 1
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result

    async def over(self) -> None:
        """Waits for the end without being a reader."""
        await self._over.wait()

    def reply(self) -> Delta:
        """Returns all deltas so far, joined into one."""
        return joined(self.deltas)

    def received(self) -> Delta:
        """Returns all deltas so far, with those that are held back since an abort began, joined into one."""
        return joined([*self.deltas, *self._gate.held])

    @property
    def position(self) -> tuple[int, int]:
        """The numbers of tokens and characters received so far."""
        received = self.received()
        return len(received.tokens), len(received.text)

    @property
    def pieces(self) -> Iterator[tuple[str, int]]:
        """The text and the number of tokens of each delta so far."""
        return ((delta.text, len(delta.tokens)) for delta in self.deltas)

    def said(self) -> AnswerPart | None:
        """Returns the reply so far in parsed form, or `None` if the turn's answer is not parsed."""
        if self.reading is None:
            return None
        return self.reading.reader(self.id).read(self.reply().text, ended=self.ended)

    def _tell(self) -> None:
        if self.result is not None or self.error is not None:
            self._over.set()
        for listener in self.listeners:
            listener()


class Source:
    """A source of a turn's output: this replica's engine, or another replica that relays it. A source begins when it is
    made, and ends when the next one begins: later deltas of it are dropped."""

    def __init__(self, turn: LiveTurn, start: tuple[int, int]) -> None:
        """`start`: the numbers of tokens and characters of the output that precede its first delta. If the turn has
        more already, that part of the deltas is skipped. Raises `InvariantError` if it has less."""
        tokens, characters = turn.position
        if start[0] > tokens or start[1] > characters:
            raise InvariantError(
                f"{turn.id} has an output of {(tokens, characters)}; its next source begins at {start}"
            )
        self.turn = turn
        self._unsaid = Unsaid(tokens - start[0], characters - start[1])
        turn.source = self

    @property
    def current(self) -> bool:
        """Whether no other source has followed."""
        return self.turn.source is self

    @property
    def ahead(self) -> tuple[int, int]:
        """The numbers of tokens and characters that readers have, and that this source is still to repeat."""
        return self._unsaid.left

    def new(self, delta: Delta) -> Delta | None:
        """Returns the part of its next delta that is new to readers, if any."""
        return self._unsaid.of(delta) if self.current else None
