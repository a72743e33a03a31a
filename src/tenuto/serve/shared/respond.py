"""Answers to requests that start turns, streamed or whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
from fastapi import Request, Response

from tenuto.serve.shared.live_turn import LiveTurn
from tenuto.serve.shared.sse import Events, EventStream, while_connected


class Answer(Events, Protocol):
    """An answer in some API's form. Used once, for a stream or as a whole."""

    async def whole(self) -> Any:
        """Returns the whole answer once the turns have ended. Raises the error that a turn ended with."""
        ...


async def respond(
    request: Request, turns: Sequence[LiveTurn], answer: Answer, leave: Callable[[], None], *, stream: bool | None
) -> Response:
    """Returns the response for these turns. `leave` is called once, when the answer is complete or the client has
    gone."""
    if stream:
        return EventStream(turns, answer, leave)
    try:
        whole = await while_connected(request, answer.whole())
    finally:
        leave()
    return Response(msgspec.json.encode(whole), media_type="application/json")


def streamed(description: str) -> dict[int | str, dict[str, Any]]:
    """Returns the documentation of a route's answer, whole or streamed."""
    content = {"application/json": {"schema": {}}, "text/event-stream": {"schema": {"type": "string"}}}
    return {200: {"description": description, "content": content}}
