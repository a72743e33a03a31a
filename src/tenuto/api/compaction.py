"""Compaction of sessions of an engine in this process, which carries out the requests of a
`base.compaction.Compaction`."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from threading import Timer
from typing import Any, cast

from tenuto.base.checks import MAX_COUNT, whole
from tenuto.base.compaction import ASKED, SUMMARY_TOKENS, Compaction, Ended, Idle, Span
from tenuto.base.config import Limits
from tenuto.base.errors import EngineStopped, InvalidRequest, TenutoError, TurnAborted
from tenuto.base.options import TurnOptions, turn_params
from tenuto.base.tools.answers import Reading
from tenuto.base.tools.definitions import ModelHabits
from tenuto.base.tools.tool_use import ToolUse
from tenuto.base.turns import Message, Transcript, TurnInput, TurnState, turn_input
from tenuto.base.views import Compacted, SessionInfo
from tenuto.base.wire.messages import CloseSession, GetSession, StartTurn
from tenuto.base.wire.request import Request
from tenuto.client.compaction import CompactionOptions, compaction_body
from tenuto.client.futures import chained
from tenuto.client.transport import Event, Options, Transport
from tenuto.client.wire import version_in

PAUSE = 0.02
"""The number of seconds after which a session with an open turn is looked at again."""


def compacted(
    transport: Transport, habits: ModelHabits, session: str, first: int, last: int | None, options: Options
) -> Future[Compacted]:
    """Compacts a session; see `Session.compact`. `habits`: those of the model. Raises `InvalidRequest`."""
    compaction_body(first, last, options)  # which checks the options
    given = cast("CompactionOptions", options)
    span = Span(whole("first", first, 1, MAX_COUNT), last, version_in(options))
    asking, reading = _asking(habits, given)
    return chained(_steps(transport, Compaction("", session, span, Limits()), _summary(given, asking), asking, reading))


def _asking(habits: ModelHabits, given: CompactionOptions) -> tuple[StartTurn, Reading]:
    """Returns the turn that asks for the summary, and how its answer is parsed."""
    words = _text("instructions", given.get("instructions"))
    usual = {"max_new_tokens": SUMMARY_TOKENS}
    own = {name: given[name] for name in ("max_new_tokens", "temperature", "priority") if given.get(name) is not None}
    params = turn_params(cast("TurnOptions", {**usual, **own}))
    use = replace(ToolUse.among({"tools": given.get("tools")}) or ToolUse(), choice="none")
    after = habits.after("user")
    params = replace(params, grammar=use.grammar(after, None), marks=use.marks(after))
    message = Message("user", words or ASKED)
    asking = StartTurn(kind="turn", tenant="", input=[message], params=params, tools=use.definitions)
    return asking, use.reading(after, params.grammar)


def _summary(given: CompactionOptions, asking: StartTurn) -> TurnInput | None:
    """Returns the input of the turn with the given summary; `None` if the model writes it. Raises `InvalidRequest`."""
    text, other = _text("summary", given.get("summary")), given.get("input")
    if text is not None and other is not None:
        raise InvalidRequest("summary and input are given; allowed: one of them", param="input")
    if text is not None:
        return [*cast("list[Message]", asking.input), Message("assistant", text)]
    if other is None:
        return None
    parsed = turn_input(other)
    if not parsed:
        raise InvalidRequest("input is empty; allowed: the input of a turn", param="input")
    return parsed


def _text(name: str, value: object) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise InvalidRequest(f"{name} is {value!r}; allowed: text, or none", param=name)
    return value


def _steps(
    transport: Transport, compaction: Compaction, summary: TurnInput | None, asking: StartTurn, reading: Reading
) -> Generator[Future[Any], Any, Compacted]:
    steps = compaction.run(summary, asking, reading)
    try:
        wanted = next(steps)
        while True:
            try:
                answer = yield _carried(transport, compaction.session, wanted)
            except TenutoError as error:
                wanted = steps.throw(error)
            else:
                wanted = steps.send(answer)
    except StopIteration as end:
        done: Compacted = end.value
        return done
    finally:
        for hidden in compaction.hidden:
            with suppress(EngineStopped):
                transport.call(CloseSession(tenant="", session=hidden))  # also aborts its turn


def _carried(transport: Transport, session: str, wanted: Request[Any] | Idle) -> Future[Any]:
    """Returns the answer to a request; see `base.compaction.Steps`."""
    if isinstance(wanted, StartTurn):
        return _Reader(transport, wanted).outcome
    return transport.call(wanted) if not isinstance(wanted, Idle) else chained(_idle(transport, session))


def _idle(transport: Transport, session: str) -> Generator[Future[Any], Any, None]:
    """Waits until the session has no submitted turn."""
    while True:
        state: SessionInfo = yield transport.call(GetSession(tenant="", session=session))
        if state.turn in (None, TurnState.DRAFTING):
            return
        later = Future[None]()
        Timer(PAUSE, later.set_result, (None,)).start()
        yield later


class _Reader(Transcript):
    """Reads a turn to its end. `outcome`: gets an `Ended`, or the error that ended it."""

    def __init__(self, transport: Transport, request: StartTurn) -> None:
        super().__init__()
        self.outcome = Future[Ended]()
        self._running = transport.start(request, {}, None, self._hear)

    def _hear(self, event: Event) -> None:
        try:
            self.take(event)
        except TenutoError as error:
            self.outcome.set_exception(error)
            return
        if self.result is None:
            return
        if self.result.committed:
            self.outcome.set_result(Ended(self.result, self.text, "summary"))
        else:
            self.outcome.set_exception(TurnAborted(f"the turn was rolled back: {self.result.reason.value}"))
