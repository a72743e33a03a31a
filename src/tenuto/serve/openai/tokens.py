"""Routes of vLLM and SGLang for tokens, the server's version and its health."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from importlib.metadata import version
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Response
from pydantic import Field

from tenuto.base.errors import InvalidRequest
from tenuto.base.tools.definitions import MAX_TOOLS, NO_TOOLS, Tools
from tenuto.base.wire.messages import DescribeTokenizer, Detokenize, Tokenize, TokenTexts
from tenuto.serve.openai.schemas import ChatMessage, check_continuing
from tenuto.serve.openai.templates import Templated
from tenuto.serve.openai.tools import Tool
from tenuto.serve.shared.bodies import JsonRoute, of_many
from tenuto.serve.shared.edge import Caller, Edge, EdgeOf
from tenuto.serve.shared.objects import NOTHING, ForeignObject
from tenuto.serve.shared.schemas import REFUSALS, Items, Messages, ModelName, Prompts, TokenId
from tenuto.serve.shared.settings import Tenant

T = TypeVar("T")
router = APIRouter(route_class=JsonRoute, tags=["tokens"])

PIECE = 2**14
"""Number of tokens encoded at once."""
TOKENS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The tokens", "content": {"application/json": {"schema": {"type": "object"}}}}
}


class MessagesBody(Templated):
    """Messages to render."""

    not_supported = dict.fromkeys(("chat_template", "mm_processor_kwargs"), NOTHING)

    model: ModelName = None
    messages: Messages[ChatMessage] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = Field(
        None, description="End messages where the assistant's answer begins; true if not given."
    )
    continue_final_message: bool | None = Field(
        None, description="With `add_generation_prompt` false: end messages with the last one's content."
    )

    def check(self) -> None:
        """Raises `InvalidRequest` for conflicting fields."""
        check_continuing(self.continue_final_message, self.add_generation_prompt, self.messages)


class TokenizeBody(MessagesBody):
    """One or several texts, or messages. With `content`, the request and its answer have llama.cpp's form."""

    prompt: str | Prompts[str] | None = None
    add_special_tokens: bool | None = Field(
        None, description="Include the token that begins a text; true if not given."
    )
    return_token_strs: bool | None = None
    content: str | None = Field(None, description="llama.cpp's field for a text.")
    add_special: bool | None = Field(None, description="Include the token that begins `content`; false if not given.")
    parse_special: bool | None = Field(None, description="Control tokens in `content` are such; true if not given.")
    with_pieces: bool | None = Field(None, description="Show each token of `content` with its text.")


class DetokenizeBody(ForeignObject):
    """One list of tokens, or several."""

    ignored = frozenset({"skip_special_tokens"})

    model: str | None = None
    tokens: Items[TokenId] | Prompts[Items[TokenId]]


@router.post("/tokenize", response_model=None, responses=REFUSALS | TOKENS)
async def tokenize(edge: EdgeOf, tenant: Caller, body: TokenizeBody) -> Response:
    """Returns the tokens of texts or messages as prompts."""
    edge.adapter(body.model)
    if body.content is not None:
        return await _of_content(edge, tenant, body)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("there are both prompt and messages, or neither; allowed: one of them", param="prompt")
    if body.messages is not None:
        lists = [await tokens_of_messages(edge, tenant, body)]
    else:
        prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt or ()
        bos = body.add_special_tokens is not False
        lists = [await _tokens(edge, tenant, prompt, bos=bos) for prompt in prompts]
    several = isinstance(body.prompt, list)
    written = bytearray(b'{"tokens":')
    written += await _list(lists, _numbers) if several else await _numbers(lists[0])
    counts: object = [len(each) for each in lists] if several else len(lists[0])
    written += b',"count":%b,"max_model_len":%d' % (msgspec.json.encode(counts), edge.model.context_length)
    strings = await _texts(edge, tenant, lists[0]) if body.return_token_strs and not several else b"null"
    written += b',"token_strs":' + strings
    return Response(bytes(written + b"}"), media_type="application/json")


async def tokens_of_messages(edge: Edge, tenant: Tenant, body: MessagesBody) -> array[int]:
    """Returns the tokens of messages that open a conversation."""
    tools = Tools.of([tool.definition() for tool in body.tools]) if body.tools else NO_TOOLS
    generate, continues = body.add_generation_prompt is not False, bool(body.continue_final_message)
    body.check()
    many = body.messages or []
    messages = await of_many(len(many), lambda: [one.rendered() for one in many])
    given = Tokenize(
        tenant=tenant.name,
        input=messages,
        tools=tools,
        variables=body.variables(),
        generate=generate,
        closed=not continues,
    )
    return array("i", await edge.link.call(given))


async def _of_content(edge: Edge, tenant: Tenant, body: TokenizeBody) -> Response:
    """Returns the tokens of a text in llama.cpp's form."""
    if body.prompt is not None or body.messages is not None:
        raise InvalidRequest("content is given with prompt or messages; allowed: one of them", param="content")
    markup = body.parse_special is not False
    tokens = await _tokens(edge, tenant, body.content or "", bos=bool(body.add_special), markup=markup)
    written = await (
        _list(_pieces(tokens), partial(_with_texts, edge, tenant)) if body.with_pieces else _numbers(tokens)
    )
    return Response(b'{"tokens":' + written + b"}", media_type="application/json")


async def _with_texts(edge: Edge, tenant: Tenant, piece: array[int]) -> bytes:
    texts = await edge.link.call(TokenTexts(tenant=tenant.name, tokens=piece.tolist()))
    shown = [{"id": token, "piece": text} for token, text in zip(piece, texts, strict=True)]
    return msgspec.json.encode(shown)[1:-1]


async def _tokens(edge: Edge, tenant: Tenant, prompt: str, *, bos: bool, markup: bool = False) -> array[int]:
    asked = Tokenize(tenant=tenant.name, input=prompt, generate=False, markup=markup)
    tokens = array("i", await edge.link.call(asked))
    begun = edge.model.adds_bos and tokens[:1].tolist() == [edge.model.bos_id]
    return tokens[1:] if begun and not bos else tokens


async def _list(parts: Iterable[T], write: Callable[[T], Awaitable[bytes]]) -> bytes:
    """Writes a JSON list of the parts' entries."""
    return b"[" + b",".join([await write(part) for part in parts]) + b"]"


async def _numbers(tokens: array[int]) -> bytes:
    """Writes a JSON list of tokens, even of millions, without holding up other requests."""

    async def write(piece: array[int]) -> bytes:
        await asyncio.sleep(0)
        return msgspec.json.encode(piece.tolist())[1:-1]

    return await _list(_pieces(tokens), write)


async def _texts(edge: Edge, tenant: Tenant, tokens: array[int]) -> bytes:
    """Writes a JSON list of the tokens' entries in the vocabulary."""

    async def write(piece: array[int]) -> bytes:
        asked = TokenTexts(tenant=tenant.name, tokens=piece.tolist(), entries=True)
        return msgspec.json.encode(await edge.link.call(asked))[1:-1]

    return await _list(_pieces(tokens), write)


def _pieces(tokens: array[int]) -> list[array[int]]:
    return [tokens[at : at + PIECE] for at in range(0, len(tokens), PIECE)]


@router.post("/detokenize", responses=REFUSALS)
async def detokenize(edge: EdgeOf, tenant: Caller, body: DetokenizeBody) -> dict[str, Any]:
    """Returns the text of tokens, including control tokens, under the names of vLLM (`prompt`), SGLang (`text`) and
    llama.cpp (`content`)."""
    edge.adapter(body.model)
    lists: list[Any] = body.tokens if body.tokens and isinstance(body.tokens[0], list) else [body.tokens]
    texts = [await edge.link.call(Detokenize(tenant=tenant.name, tokens=tokens)) for tokens in lists]
    told: Any = texts if lists is body.tokens else texts[0]
    return {"prompt": told, "text": told, "content": told}


@router.get("/tokenizer_info", responses=REFUSALS)
async def tokenizer_info(edge: EdgeOf, _: Caller) -> dict[str, Any]:
    """Returns the tokenizer's control tokens, chat template and limits, as in its files for `transformers`."""
    told = await edge.link.call(DescribeTokenizer())
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": edge.model.adds_bos,
        "bos_token": told.bos,
        "eos_token": told.eos,
        "pad_token": told.eos,
        "chat_template": told.chat_template,
        "model_max_length": edge.model.max_context,
        "vocab_size": told.vocab_size,
    }


@router.get("/version", responses=REFUSALS)
async def server_version(edge: EdgeOf, _: Caller) -> dict[str, str]:
    """Returns the server's version."""
    edge.require_engine()
    return {"version": version("tenuto")}


@router.get("/load", responses=REFUSALS)
async def load(edge: EdgeOf, _: Caller) -> dict[str, int]:
    """Returns the number of open turns."""
    edge.require_engine()
    return {"server_load": len(edge.turns.open_turns())}


@router.get("/ping", response_class=Response)
@router.post("/ping", response_class=Response)
async def ping(edge: EdgeOf) -> Response:
    """Answers like `/health`."""
    return Response(status_code=200 if edge.healthy else 503)
