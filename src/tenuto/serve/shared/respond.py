"""Answers to requests that start turns, streamed or whole."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Request, Response

from tenuto.serve.shared.sse import Answer, EventStream, while_connected


async def respond(request: Request, answer: Answer, *, stream: bool | None) -> Response:
    """Returns the response with an answer, streamed or whole."""
    if stream:
        return EventStream(answer)
    try:
        whole = await while_connected(request, answer.whole())
    finally:
        answer.leave()
    return Response(msgspec.json.encode(whole), media_type="application/json")


def streamed(description: str) -> dict[int | str, dict[str, Any]]:
    """Returns the documentation of a route's answer, whole or streamed."""
    content = {"application/json": {"schema": {}}, "text/event-stream": {"schema": {"type": "string"}}}
    return {200: {"description": description, "content": content}}
