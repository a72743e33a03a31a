"""Routes of vLLM and SGLang about tokens, and about the server as such."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from tenuto.base.errors import InvalidRequest
from tenuto.base.messages import Detokenize, Tokenize
from tenuto.base.tools import MAX_TOOLS, NO_TOOLS, Tools
from tenuto.base.variables import Variables
from tenuto.serve.openai.schemas import ChatMessage
from tenuto.serve.openai.tools import Tool
from tenuto.serve.shared.bodies import JsonRoute
from tenuto.serve.shared.edge import Caller, Edge, EdgeOf
from tenuto.serve.shared.objects import NOTHING, ForeignObject
from tenuto.serve.shared.schemas import REFUSALS, Items, Messages, Prompts, TokenId

router = APIRouter(route_class=JsonRoute, tags=["tokens"])


class TokenizeBody(ForeignObject):
    """A text, several, or messages."""

    not_supported = dict.fromkeys(("chat_template", "continue_final_message", "mm_processor_kwargs"), NOTHING)

    model: str | None = Field(None, description="If given: as listed by `/v1/models`, or `default`.")
    prompt: str | Prompts[str] | None = None
    messages: Messages[ChatMessage] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = Field(None, description="With the token a text begins with; true if not given.")
    add_generation_prompt: bool | None = Field(None, description="Messages end where the assistant begins to speak.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template.")
    return_token_strs: bool | None = None


class DetokenizeBody(ForeignObject):
    """Tokens, or several lists of them."""

    ignored = frozenset({"skip_special_tokens"})

    model: str | None = None
    tokens: Items[TokenId] | Prompts[Items[TokenId]]


@router.post("/tokenize", responses=REFUSALS)
async def tokenize(edge: EdgeOf, _: Caller, body: TokenizeBody) -> dict[str, Any]:
    """The tokens of a text as a prompt, or of messages."""
    if body.model is not None:
        edge.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("there are both prompt and messages, or neither; allowed: one of them", param="prompt")
    if body.messages is not None:
        tools = Tools.of([tool.function.told() for tool in body.tools]) if body.tools else NO_TOOLS
        generate = body.add_generation_prompt is not False
        variables = Variables.of(body.chat_template_kwargs or {})
        messages = [one.rendered() for one in body.messages]
        given = Tokenize(input=messages, tools=tools, variables=variables, generate=generate)
        tokens: Any = await edge.link.call(given)
    elif isinstance(body.prompt, str):
        tokens = await _tokens(edge, body, body.prompt)
    else:
        tokens = [await _tokens(edge, body, prompt) for prompt in body.prompt or ()]
    several = bool(tokens) and isinstance(tokens[0], list)
    count = [len(each) for each in tokens] if several else len(tokens)
    answer = {"tokens": tokens, "count": count, "max_model_len": edge.model.context_length}
    if body.return_token_strs and not several:
        answer["token_strs"] = [await edge.link.call(Detokenize(tokens=[token])) for token in tokens]
    return answer


async def _tokens(edge: Edge, body: TokenizeBody, prompt: str) -> list[int]:
    tokens = await edge.link.call(Tokenize(input=prompt, generate=False))
    begun = edge.model.adds_bos and tokens[:1] == [edge.model.bos_id]
    return tokens[1:] if begun and body.add_special_tokens is False else tokens


@router.post("/detokenize", responses=REFUSALS)
async def detokenize(edge: EdgeOf, _: Caller, body: DetokenizeBody) -> dict[str, Any]:
    """The text of tokens, control tokens written out; as `prompt`, as vLLM has it, and as `text`, as SGLang has it."""
    if body.model is not None:
        edge.check_model(body.model)
    lists: list[Any] = body.tokens if body.tokens and isinstance(body.tokens[0], list) else [body.tokens]
    texts = [await edge.link.call(Detokenize(tokens=tokens)) for tokens in lists]
    told: Any = texts if lists is body.tokens else texts[0]
    return {"prompt": told, "text": told}


@router.get("/version", responses=REFUSALS)
async def server_version(edge: EdgeOf, _: Caller) -> dict[str, str]:
    """The server's version."""
    edge.require_engine()
    return {"version": version("tenuto")}


@router.get("/ping", response_class=Response)
@router.post("/ping", response_class=Response)
async def ping(edge: EdgeOf) -> Response:
    """As `/health`."""
    return Response(status_code=503 if edge.draining or edge.link.stopped is not None else 200)
