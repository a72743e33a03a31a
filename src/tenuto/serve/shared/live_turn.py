"""The stream of one turn: its deltas, kept for any number of readers, who can resume."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

import msgspec

from tenuto.base.errors import TenutoError
from tenuto.base.options import TurnParams
from tenuto.base.tools.answers import Reading, Said
from tenuto.base.tools.definitions import NO_TOOLS
from tenuto.base.tools.variables import NO_VARIABLES
from tenuto.base.turns import AbortGate, Delta, TurnResult, joined
from tenuto.base.views import Ticket
from tenuto.base.wire.link import TurnNews
from tenuto.base.wire.messages import StartTurn


class LiveTurn:
    """One turn, from its request to its end.

    Invariant: `deltas` are what readers are given, in order. Once the turn has ended, the last of them has its result,
    unless `error` says why there is none. A delta's number, counted from 1, is the id of its event.
    """

    def __init__(self, request: StartTurn, *, continues: bool = False) -> None:
        """`continues`: even when nobody reads it any more."""
        self.id = f"turn-{secrets.token_hex(12)}"
        self.request = msgspec.structs.replace(request, name=self.id)  # most of it is dropped once the engine has it
        self.continues = continues
        self.requested_at = time.perf_counter()
        self.deltas: list[Delta] = []
        self.ticket: Ticket | None = None  # set once, by `deliver`, as are the next two
        self.result: TurnResult | None = None
        self.error: TenutoError | None = None
        self.reading: Reading | None = None  # how its answer is taken apart, if it is; written by who started it
        self.answered = asyncio.Event()  # the engine has accepted the turn, or it has failed
        self.readers = 0  # who want it to go on; counted by themselves
        self.listeners: list[Callable[[], None]] = []  # called after every delta and after the end; they do not raise
        self.refused: TenutoError | None = None  # why it is not to begin; written by who aborts it
        self.rolling_back = False  # it is being aborted because nobody reads it
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
        """waiting, open, committed, aborted or failed."""
        if self.result is not None:
            return "committed" if self.result.committed else "aborted"
        if self.error is not None:
            return "failed"
        return "open" if self.ticket is not None else "waiting"

    @property
    def delivered(self) -> int:
        """Leading output tokens whose text readers have received."""
        return self._gate.delivered

    def require_accepted(self) -> None:
        """Raises the error with which the engine refused the turn, if it did."""
        if self.error is not None and self.ticket is None:
            raise self.error

    # -- written by its owner, `Turns`

    def deliver(self, news: TurnNews) -> None:
        """Handle news from the link."""
        match news:
            case Delta():
                if (delta := self._gate.take(news)) is not None:
                    self._add(delta)
            case Ticket():
                self._drop_contents()
                self.ticket = news
                self.answered.set()
            case _:
                self.fail(news)

    def fail(self, error: TenutoError) -> None:
        """End without a result."""
        self._drop_contents()
        self.error = error.with_traceback(None)  # which would keep the input alive
        self.answered.set()
        self._tell()

    def _add(self, delta: Delta) -> None:
        if delta.result is not None and (delta.tokens or delta.text):  # the end is its own event, to resume at
            self.deltas.append(msgspec.structs.replace(delta, result=None))
            delta = Delta(delivered=delta.delivered, result=delta.result)
        self.deltas.append(delta)
        self.result = delta.result
        self._tell()

    def _drop_contents(self) -> None:
        """The input, the options, the tools and the variables may be large, and the turn is kept after its end."""
        self.request = msgspec.structs.replace(
            self.request, input=[], params=TurnParams(), tools=NO_TOOLS, variables=NO_VARIABLES
        )

    # -- read by anyone

    async def finished(self) -> TurnResult:
        """Wait for the end, as a reader. Raises the error that ended the turn."""
        self.readers += 1
        try:
            await self._over.wait()
        finally:
            self.readers -= 1
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result

    def reply(self) -> Delta:
        """All deltas so far as one."""
        return joined(self.deltas)

    def said(self) -> Said | None:
        """The reply so far, taken apart, if it is to be."""
        if self.reading is None:
            return None
        return self.reading.reader(self.id).read(self.reply().text, ended=self.ended)

    def _tell(self) -> None:
        if self.result is not None or self.error is not None:
            self._over.set()
        for listener in self.listeners:
            listener()
