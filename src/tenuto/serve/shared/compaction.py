"""Compaction of sessions by the edge, which carries out the requests of a `base.compaction.Compaction`."""

from __future__ import annotations

from typing import Any

from tenuto.base.compaction import Compaction, Ended, Idle, Span
from tenuto.base.errors import TenutoError
from tenuto.base.tools.answers import Reading
from tenuto.base.turns import TurnInput
from tenuto.base.views import Compacted
from tenuto.base.wire.messages import StartTurn
from tenuto.base.wire.request import Request
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.samples import committed
from tenuto.serve.shared.settings import Tenant


async def compact(
    edge: Edge,
    tenant: Tenant,
    session: str,
    span: Span,
    summary: TurnInput | None,
    asking: StartTurn,
    reading: Reading,
) -> Compacted:
    """Compacts a session; see `Compaction.run`."""
    compaction = Compaction(tenant.name, session, span, tenant.limits)
    steps = compaction.run(summary, asking, reading)
    try:
        wanted = next(steps)
        while True:
            try:
                answer = await _carried(edge, tenant, session, wanted)
            except TenutoError as error:
                wanted = steps.throw(error)
            else:
                wanted = steps.send(answer)
    except StopIteration as end:
        done: Compacted = end.value
        return done
    finally:
        for hidden in compaction.hidden:
            edge.spawn(edge.turns.close_if_open((tenant.name, hidden)))


async def _carried(edge: Edge, tenant: Tenant, session: str, wanted: Request[Any] | Idle) -> Any:
    """Returns the answer to a request; see `base.compaction.Steps`."""
    if isinstance(wanted, StartTurn):
        turn = await edge.start(tenant, wanted)
        result = await committed(edge, turn)
        return Ended(result, turn.reply().text, turn.id)
    if not isinstance(wanted, Idle):
        return await edge.link.call(wanted)
    running = edge.turns.queues.open_turn((tenant.name, session))
    if running is not None:
        await running.over()
    return None
