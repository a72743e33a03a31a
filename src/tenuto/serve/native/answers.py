"""The native interface's answers: sessions, turns and their events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from fastapi import Response

from tenuto.base.errors import TenutoError
from tenuto.base.sampling import Candidate, TokenLogprob
from tenuto.base.tools.answer_part import AnswerPart
from tenuto.base.turns import Delta
from tenuto.base.views import SessionInfo, Ticket
from tenuto.base.wire.bodies import body_of
from tenuto.base.wire.request import Request
from tenuto.serve.native.answer_schemas import Session, Turn, etag
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.errors import Failure
from tenuto.serve.shared.live_turn import LiveTurn
from tenuto.serve.shared.settings import Tenant
from tenuto.serve.shared.sse import Answer, event


async def shown(edge: Edge, tenant: Tenant, request: Request[SessionInfo], response: Response) -> Session:
    """Returns the session in the engine's answer to `request`, and puts its version into the response's headers."""
    info = await edge.link.call(request)
    response.headers["etag"] = etag(info.version)
    return session_body(edge, tenant, info)


def session_body(edge: Edge, tenant: Tenant, info: SessionInfo) -> Session:
    """Returns a session in its current state."""
    turn = edge.turns.queues.open_turn((tenant.name, info.session_id))
    return listed_body(info, {info.session_id: turn.id} if turn is not None else {})


def listed_body(info: SessionInfo, turns: Mapping[str, str | None]) -> Session:
    """Returns a session. `turns`: the ids of open turns, by session."""
    return Session.model_validate({**body_of(info), "turn_id": turns.get(info.session_id)})


def turn_body(turn: LiveTurn) -> Turn:
    """Returns a turn in its current state."""
    reply, said = turn.reply(), turn.said()
    known: dict[str, Any] = turn.ticket.counts if turn.ticket is not None else {}
    if turn.result is not None:
        known = body_of(turn.result)
    of_input = [_logprob(entry) if entry is not None else None for entry in reply.input_logprobs]
    return Turn.model_validate(
        {
            "id": turn.id,
            "session_id": turn.request.session or "",
            "state": turn.state,
            "text": reply.text,
            "message": said.message() if said is not None else None,
            "tokens": reply.tokens,
            "logprobs": [_logprob(entry) for entry in reply.logprobs] or None,
            "input_logprobs": of_input or None,
            **known,
        }
    )


CHARACTERS = 2**32
"""More characters than the text of a turn has; see `Position.id`."""
MAX_POSITION = 2**53


class Plain(msgspec.Struct, gc=False):
    """The body of a delta without logprobs or message parts. Encodes like `_delta`'s result, in a third of the time."""

    text: str
    tokens: tuple[int, ...]
    delivered: int


class Position(NamedTuple):
    """A position in a turn's output: numbers of tokens and of characters of text. It is the same wherever the turn is
    computed, although its deltas may differ."""

    tokens: int = 0
    characters: int = 0

    @staticmethod
    def of_id(number: int) -> Position:
        """Returns the position after the event with this id."""
        return Position(*divmod(number, CHARACTERS))

    @property
    def id(self) -> int:
        """The id of an event that ends here."""
        return self.tokens * CHARACTERS + self.characters

    def after(self, delta: Delta) -> Position:
        """Returns the position after a delta that begins here."""
        return Position(self.tokens + len(delta.tokens), self.characters + len(delta.text))

    def within(self, end: Position) -> bool:
        """Whether this position is at most `end`."""
        return self.tokens <= end.tokens and self.characters <= end.characters


class TurnAnswer(Answer):
    """An accepted turn, or its events after a position; from the beginning, `started` comes first."""

    def __init__(self, edge: Edge, turn: LiveTurn, after: Position = Position()) -> None:  # noqa: B008 - immutable
        super().__init__(edge, [turn])
        self._turn = turn
        self._after = after
        self._position = Position()  # after the last delta read
        self._reader = turn.reading.reader(turn.id) if turn.reading is not None else None
        self._called = 0  # number of calls so far

    async def whole(self) -> dict[str, Any]:
        await self._turn.finished()
        return turn_body(self._turn).model_dump()

    def opening(self) -> bytes:
        assert self._turn.ticket is not None
        return _started(self._turn, self._turn.ticket) if self._after == (0, 0) else b""

    def news(self, _: int, deltas: list[Delta]) -> bytes:
        return self._event(deltas[0]) if len(deltas) == 1 else b"".join(map(self._event, deltas))

    def failed(self, error: TenutoError) -> bytes:
        return event("error", Failure.of(error).body)

    def _event(self, delta: Delta) -> bytes:
        """Returns a delta's event. The event of a result may follow one with text that was held back."""
        delta, reader, told = self._new_in(delta), self._reader, b""
        if reader is None and delta.tokens and delta.result is None and not delta.logprobs:
            return event("delta", Plain(delta.text, delta.tokens, delta.delivered), self._position.id)
        if delta.tokens or delta.text:
            said = reader.push(delta.text) if reader is not None else None
            told = self._calls(said) + event("delta", _delta(delta, said), self._position.id)
        if delta.result is not None:
            if reader is not None and (rest := reader.finish()):
                told += self._calls(rest) + event("delta", _delta(Delta(delivered=delta.delivered), rest))
            ended = turn_body(self._turn).model_dump(exclude={"text", "tokens", "logprobs"}, exclude_none=True)
            told += event("committed" if delta.result.committed else "aborted", ended, self._position.id)
        return told

    def _new_in(self, delta: Delta) -> Delta:
        """Returns the part of the next delta that is after the position from which to tell events."""
        before, self._position = self._position, self._position.after(delta)
        if before.tokens >= self._after.tokens and before.characters >= self._after.characters:
            return delta
        tokens = max(0, self._after.tokens - before.tokens)
        characters = max(0, self._after.characters - before.characters)
        if self._reader is not None:
            self._called += len(self._reader.push(delta.text[:characters]).calls)
        return msgspec.structs.replace(
            delta,
            tokens=delta.tokens[tokens:],
            text=delta.text[characters:],
            logprobs=delta.logprobs[tokens:],
            input_logprobs=(),
        )

    def _calls(self, said: AnswerPart | None) -> bytes:
        """Returns an event for each call whose arguments are now complete. They come before the delta with the call, so
        that a stream which breaks in between repeats them when it is resumed."""
        made = b""
        for call in said.calls if said is not None else ():
            made += event("call", {"index": self._called, **call.body()})
            self._called += 1
        return made


def _started(turn: LiveTurn, ticket: Ticket) -> bytes:
    body: dict[str, Any] = {
        "turn_id": turn.id,
        "session_id": ticket.session,
        "version": ticket.version,
        **ticket.counts,
    }
    if turn.reading is not None:
        body["reading"] = turn.reading
    return event("started", body)


def _delta(delta: Delta, said: AnswerPart | None) -> dict[str, Any]:
    """Returns a delta's body. `said`: the parts that the delta adds to the message, if the answer is parsed."""
    body: dict[str, Any] = {"text": delta.text, "tokens": delta.tokens, "delivered": delta.delivered}
    if said:
        message = said.message()
        body |= {name: message[name] for name in ("content", "reasoning", "tool_calls") if message.get(name)}
    if delta.logprobs:
        body["logprobs"] = [_logprob(entry) for entry in delta.logprobs]
    return body


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    """Returns a token's log-probability, with the likeliest tokens at its position."""
    shown = {**_candidate(entry), "top": [_candidate(other) for other in entry.top]}
    return {**shown, "named": [_candidate(other) for other in entry.named]} if entry.named else shown


def _candidate(entry: TokenLogprob | Candidate) -> dict[str, Any]:
    return {"token": entry.token, "text": entry.raw.decode(errors="replace"), "logprob": entry.logprob}
