"""The one route by which hosts of models, such as SageMaker, call every model."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Discriminator, Tag

from tenuto.serve.openai.routes import STREAMED, StoredOf, chat, complete
from tenuto.serve.openai.schemas import ChatBody, CompletionBody
from tenuto.serve.shared.bodies import JsonRoute
from tenuto.serve.shared.edge import Caller, EdgeOf
from tenuto.serve.shared.schemas import REFUSALS

router = APIRouter(route_class=JsonRoute, tags=["openai"], responses=REFUSALS)


def _kind(given: Any) -> str:
    return "completion" if isinstance(given, dict) and "prompt" in given else "chat"


Body = Annotated[Annotated[ChatBody, Tag("chat")] | Annotated[CompletionBody, Tag("completion")], Discriminator(_kind)]


@router.post("/invocations", response_model=None, responses=STREAMED)
async def invoke(edge: EdgeOf, tenant: Caller, body: Body, request: Request, stored: StoredOf) -> Response:
    """Answers like `/v1/chat/completions`, or, if there is a `prompt`, like `/v1/completions`."""
    if isinstance(body, ChatBody):
        return await chat(edge, tenant, body, request, stored)
    return await complete(edge, tenant, body, request)
