"""Compaction of responses: the model summarizes a conversation, and the summary takes its place."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tenuto.base.turns import Usage
from tenuto.base.views import hidden_session_id
from tenuto.base.wire.messages import Tokenize
from tenuto.serve.openai.response_schemas import RESULTS, Item, ResponseBody
from tenuto.serve.openai.response_sessions import start_response
from tenuto.serve.openai.summaries import MAX_AFTER, Summary
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.samples import committed
from tenuto.serve.shared.settings import Tenant
from tenuto.serve.shared.volatile import without_volatile_lines

SAID = ("function_call", "custom_tool_call", "reasoning", "compaction")
"""Types of items, besides messages of the assistant, that a response may have as output."""


async def summarized(
    edge: Edge, tenant: Tenant, asking: ResponseBody, items: Sequence[Item], adapter: str | None, after: int = 0
) -> tuple[Summary, Usage]:
    """Lets the model summarize a conversation that ends with `items`, after the response that `asking` names, if any.
    `asking`: the request for the summary. `after`: see `Summary`. Raises the engine's refusals."""
    name, habits = hidden_session_id(), edge.model.habits
    start = asking.start(tenant, (), habits, adapter=adapter, variables=asking.variables())
    reading = asking.tool_use.reading(habits, start.params.grammar)
    try:
        turn = await start_response(edge, tenant, asking, start, name, items, stores=True)
        result = await committed(edge, turn)
    finally:
        edge.spawn(edge.turns.close_if_open((tenant.name, name)))  # also aborts its turn
    said = reading.reader(turn.id).read(turn.reply().text, ended=True)
    return Summary(said.text.strip(), after), result.usage


def compaction_item(summary: Summary) -> dict[str, Any]:
    """Returns the item that stands for a summary."""
    return {"id": f"cmp_{secrets.token_hex(12)}", "type": "compaction", "encrypted_content": summary.content()}


@dataclass(frozen=True, slots=True)
class Compaction:
    """A compacted conversation. `item`: the item that the response begins with. `body`: the request with all items in
    its input, the compaction at their end."""

    item: dict[str, Any]
    body: ResponseBody


async def compacted(
    edge: Edge, tenant: Tenant, body: ResponseBody, before: Sequence[Item], adapter: str | None
) -> Compaction | None:
    """Compacts the conversation of a request if it has more tokens than the request allows. `before`: the items before
    its input. Returns `None` if it is short, or there is nothing to summarize, or the model writes no summary."""
    items = [*before, *body.items]
    first = _current(items)
    threshold = body.compact_threshold
    if threshold is None or not first or await _count(edge, tenant, body, items) <= threshold:
        return None
    goes_on = body.previous_response_id is not None and first == len(before)
    asking = body.asking() if goes_on else body.asking().model_copy(update={"previous_response_id": None})
    asking = asking.model_copy(update={"temperature": 0.0, "conversation": None})
    after = min(len(items) - first, MAX_AFTER)
    summary, _ = await summarized(edge, tenant, asking, () if goes_on else items[:first], adapter, after)
    if not summary.text:
        return None
    item = compaction_item(summary)
    update = {"input": [*items, Item.model_validate(item)], "previous_response_id": None}
    anew = body.model_copy(update=update)
    anew.__dict__.pop("items", None)
    return Compaction(item, anew)


def _current(items: Sequence[Item]) -> int:
    """Returns the place of the first item that must stay: what follows the last output and, if that has results, the
    calls that they answer."""
    said = [item.type in SAID or (item.type == "message" and item.role == "assistant") for item in items]
    first = len(items) - next((n for n, was in enumerate(reversed(said)) if was), len(items))
    answered = {item.call_id for item in items[first:] if item.type in RESULTS}
    calls = (n for n, item in enumerate(items[:first]) if item.type in SAID and item.call_id in answered)
    return min(next(calls, first), first)


async def _count(edge: Edge, tenant: Tenant, body: ResponseBody, items: Sequence[Item]) -> int:
    """Returns the number of tokens of the prompt with these items."""
    prompt = body.model_copy(update={"input": list(items)})
    prompt.__dict__.pop("items", None)
    given = Tokenize(
        tenant=tenant.name,
        input=without_volatile_lines(edge, prompt.rendered(edge.model.habits)),
        tools=body.tool_use.definitions,
        variables=body.variables(),
    )
    return len(array("i", await edge.link.call(given)))
