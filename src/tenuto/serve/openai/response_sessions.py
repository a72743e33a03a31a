"""The sessions of responses: a new one, or a fork of the previous response's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256

import msgspec

from tenuto.base.errors import InvalidRequest, NotFound, SessionBusy
from tenuto.base.tools.answers import Reading
from tenuto.base.views import SessionInfo
from tenuto.base.wire.messages import Fork, GetSession, StartTurn
from tenuto.serve.openai.response_schemas import Item, ResponseBody
from tenuto.serve.shared.edge import Edge, open_message
from tenuto.serve.shared.live_turn import LiveTurn
from tenuto.serve.shared.run_turns import Named, start_in_run
from tenuto.serve.shared.settings import Tenant
from tenuto.serve.shared.volatile import without_volatile_lines

INSTRUCTIONS = "instructions"
"""Key in the metadata of a response's session: a digest of its instructions."""


async def start_response(
    edge: Edge,
    tenant: Tenant,
    body: ResponseBody,
    start: StartTurn,
    name: str,
    earlier: Sequence[Item],
    run: Sequence[bytes] = (),
    reading: Reading | None = None,
    *,
    stores: bool,
    whole: Callable[[], Sequence[Item] | None] = lambda: None,
) -> LiveTurn:
    """Starts the turn and returns it once the engine has accepted it. It runs in the session `name`, or in an ephemeral
    one if no state has to be kept. `start`: its options. `run`: the names of its run. `reading`: how the answer is
    parsed. `stores`: whether later requests may continue the response. `whole`: returns all items before the response,
    if they are known; where its instructions or tools differ from those of the previous response, they are computed
    again."""
    previous = body.previous_response_id
    state = await _state(edge, tenant, previous) if previous is not None else None
    instructed = state is not None and _instructed(body, state)
    if state is not None and not instructed and (items := whole()) is not None:
        return await _start_anew(edge, tenant, body, start, name, items, run, reading)
    given = body.rendered(edge.model.habits, earlier, instructed=instructed)
    given = without_volatile_lines(edge, given)
    start = msgspec.structs.replace(start, session=name if stores or previous is not None else None, input=given)
    told = ((INSTRUCTIONS, _digest(body.instructions)),) if body.instructions else ()
    if state is None and reading is not None:
        named, continues = Named(name, told) if stores else None, bool(body.background)
        turn = await start_in_run(edge, tenant, run, start, reading, named=named, continues=continues)
        if turn is not None:
            return turn
    if start.session is None:
        return await edge.start(tenant, start)
    if state is not None:
        others = tuple((key, value) for key, value in state.metadata.items() if key != INSTRUCTIONS)
        fork = Fork(
            tenant=tenant.name, session=state.session_id, child=name, metadata=others + told, limits=tenant.limits
        )
        await edge.link.call(fork)
    else:
        ttl = edge.settings.ttl(None, named=True)
        await edge.link.call(open_message(tenant, name, ttl=ttl, adapter=start.adapter, metadata=told))
    try:
        return await edge.start(tenant, start, continues=bool(body.background))
    except InvalidRequest as error:
        await edge.turns.close_if_open((tenant.name, name))
        items = whole() if error.param == "tools" and state is not None else None
        if items is None:
            raise
    except BaseException:
        edge.spawn(edge.turns.close_if_open((tenant.name, name)))
        raise
    return await _start_anew(edge, tenant, body, start, name, items, run, reading)


async def _start_anew(
    edge: Edge,
    tenant: Tenant,
    body: ResponseBody,
    start: StartTurn,
    name: str,
    items: Sequence[Item],
    run: Sequence[bytes],
    reading: Reading | None,
) -> LiveTurn:
    """Starts a turn that computes the whole conversation, `items` and the input, and not from a previous response."""
    anew = body.model_copy(update={"previous_response_id": None})
    return await start_response(edge, tenant, anew, start, name, items, run, reading, stores=True)


async def _state(edge: Edge, tenant: Tenant, previous: str) -> SessionInfo:
    """Returns the session of the previous response. Raises `NotFound`, or `SessionBusy` while that response is being
    written."""
    try:
        state = await edge.link.call(GetSession(tenant=tenant.name, session=previous))
    except NotFound:
        raise NotFound(
            f"there is no response {previous!r}; it was not stored, or is too old", param="previous_response_id"
        ) from None
    if state.turn is not None:
        raise SessionBusy(f"response {previous} is not complete yet", param="previous_response_id")
    return state


def _instructed(body: ResponseBody, state: SessionInfo) -> bool:
    """Whether the previous response had the same instructions, or also none, as its session has."""
    return state.metadata.get(INSTRUCTIONS) == (_digest(body.instructions) if body.instructions else None)


def _digest(instructions: str) -> str:
    return sha256(instructions.encode(errors="surrogatepass")).hexdigest()[:32]
