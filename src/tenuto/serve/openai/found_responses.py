"""Stored responses of a fleet: each can be read at whatever replica its session has come to."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec

from tenuto.base.errors import NotFound, SessionBusy, TenutoError
from tenuto.base.wire.messages import FindTurn, GetSession, StartTurn
from tenuto.serve.openai.kept_responses import KeptResponses, Origin
from tenuto.serve.openai.response_answers import Form, ResponseAnswer
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.live_turn import LiveTurn
from tenuto.serve.shared.settings import Tenant

MAX_BYTES = 2**18
"""The most bytes of `About` that are kept with a turn. If input items make it larger, only the replica that made the
response can list them."""


@dataclass(frozen=True, slots=True)
class About:
    """The parts of a response that are not in its turn. `head`, `form`: see `ResponseAnswer`. `items`: its input items
    as JSON. `background`: whether it is written in the background."""

    head: dict[str, Any]
    form: Form
    items: bytes | None
    background: bool

    def encoded(self) -> bytes:
        """Returns this as bytes for `StartTurn.about`; empty if they are too many even without the items."""
        for items in (self.items, None):
            about = msgspec.msgpack.encode(About(self.head, self.form, items, self.background))
            if len(about) <= MAX_BYTES:
                return about
        return b""


def with_about(edge: Edge, start: StartTurn, name: str, about: About | None) -> StartTurn:
    """Returns the request of the turn that writes the response `name`. In a fleet, the replicas to which its session
    comes find both. `about`: `None` if the response is not stored."""
    if about is None or not edge.in_fleet:
        return start
    return msgspec.structs.replace(start, name=_turn_name(name), about=about.encoded())


def _turn_name(response: str) -> str:
    return f"turn-{response.removeprefix('resp_')[:24]}"


async def found(edge: Edge, tenant: Tenant, kept: KeptResponses, name: str) -> tuple[bytes, Origin]:
    """Returns a stored response, which in a fleet may have been begun at another replica. Raises `NotFound`."""
    response, origin = kept.find(name), kept.origins.get(name)
    if edge.in_fleet and (response is None or origin is None or await _is_gone(edge, tenant, name, response)):
        kept.forget(name)
        await _adopt(edge, tenant, kept, name)
        response, origin = kept.find(name), kept.origins.get(name)
    if response is None or origin is None:
        raise NotFound(f"Response with id {name!r} not found. It was not stored, is too old, or is too large")
    return response, origin


async def fate(edge: Edge, tenant: Tenant, name: str) -> list[dict[str, Any]] | None:
    """Returns the output of a response that a replica was writing which is gone; `None` if it will never have any.
    Raises `SessionBusy` while it is being written, and the errors of asking another replica."""
    told = await edge.elsewhere_knows(tenant.name, name)
    found: list[dict[str, Any]] | None = msgspec.json.decode(
        told if told is not None else await fate_here(edge, tenant.name, name)
    )
    return found


async def fate_here(edge: Edge, tenant: str, name: str) -> bytes:
    """Returns the result of `fate` as JSON, for a response whose session is not at another replica."""
    try:
        response, _ = await found(edge, Tenant(tenant), edge.part(KeptResponses, tenant=tenant), name)
    except NotFound:
        return b"null"
    view = msgspec.json.decode(response)
    if view["status"] == "in_progress":
        raise SessionBusy(f"response {name} is not complete yet")
    return msgspec.json.encode(view["output"] if view["status"] in ("completed", "incomplete") else None)


async def _is_gone(edge: Edge, tenant: Tenant, name: str, response: bytes) -> bool:
    """Whether a response was deleted, perhaps at another replica: its session is closed. Those of responses that have
    failed are closed at once."""
    if msgspec.json.decode(response)["status"] in ("failed", "cancelled"):
        return False
    try:
        await edge.link.call(GetSession(tenant=tenant.name, session=name))
    except NotFound:
        return True
    return False


async def _adopt(edge: Edge, tenant: Tenant, kept: KeptResponses, name: str) -> None:
    """Stores a response that another replica has begun, if its turn is here."""
    turn_name = _turn_name(name)
    try:
        turn = await edge.turns.recall(tenant.name, name, turn_name)
    except NotFound:
        return
    about = turn.request.about
    if not about and turn.committed:  # it has ended here
        asked = await edge.link.call(FindTurn(tenant=tenant.name, session=name, name=turn_name))
        about = asked.turn.about if asked.turn is not None else b""
    if not about or kept.find(name) is not None:  # another request has found it meanwhile
        return
    told = msgspec.msgpack.decode(about, type=About)
    if not (told.background or turn.committed):
        return

    async def keep(response: dict[str, Any]) -> None:
        kept.end(name, msgspec.json.encode(response))

    def end() -> None:
        if not turn.committed:
            edge.spawn(edge.turns.close_if_open((tenant.name, name)))

    origin = Origin(turn.id, told.form, asyncio.Event() if told.background else None)
    answer = ResponseAnswer(edge, turn, told.head, told.form, keep, end)
    kept.begin(name, msgspec.json.encode(answer.view("in_progress")), origin, told.items)
    writing = write(kept, name, turn, answer, origin)
    if turn.ended:
        await writing
    else:
        edge.spawn(writing)


async def write(kept: KeptResponses, name: str, turn: LiveTurn, answer: ResponseAnswer, origin: Origin) -> None:
    """Writes a response without a reader. If its turn has moved to another replica and is lost here, that one knows
    how it has ended."""
    try:
        await answer.whole()
    except TenutoError as error:
        if turn.elsewhere is not None and turn.result is None:
            kept.forget(name)
        else:
            kept.end(name, msgspec.json.encode(answer.ended_by(error)))
    finally:
        answer.leave()
        if origin.ended is not None:
            origin.ended.set()
