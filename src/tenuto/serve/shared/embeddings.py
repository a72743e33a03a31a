"""Embeddings of texts: each is the vector of a turn on an ephemeral session."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field

from tenuto.base.checks import shown
from tenuto.base.embedding import EmbeddingHabits
from tenuto.base.errors import InvalidRequest, Unsupported
from tenuto.base.options import ONE_TOKEN, Pooling
from tenuto.base.turns import TurnInput, Usage
from tenuto.base.wire.messages import StartTurn
from tenuto.serve.shared.edge import Edge, Start
from tenuto.serve.shared.live_turn import LiveTurn
from tenuto.serve.shared.samples import check_end
from tenuto.serve.shared.schemas import Items, TokenId
from tenuto.serve.shared.settings import Tenant
from tenuto.serve.shared.tasks import all_of

MAX_INPUTS = 2048
"""Maximum number of inputs of a request, as in OpenAI's API."""
MAX_TOKENS = 300_000
"""Maximum number of tokens of all inputs of a request, as in OpenAI's API."""
TURNS_AT_ONCE = 32
"""Most turns that one request has open at a time."""

Texts = Annotated[list[str], Field(fail_fast=True, max_length=MAX_INPUTS)]
TokenLists = Annotated[list[Items[TokenId]], Field(fail_fast=True, max_length=MAX_INPUTS)]
"""Fields of requests."""

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Embedded:
    """The embeddings of inputs, in order, float32 [inputs, dimensions], and the usage of each, prompts included."""

    vectors: Vectors
    usages: Sequence[Usage]

    @property
    def tokens(self) -> int:
        """The number of tokens of all inputs."""
        return sum(usage.prompt for usage in self.usages)

    @property
    def cached(self) -> int:
        """The number of these that were in memory."""
        return sum(usage.cached for usage in self.usages)


async def embed(
    edge: Edge,
    tenant: Tenant,
    inputs: Sequence[TurnInput],
    *,
    dimensions: int | None = None,
    normalize: bool | None = None,
    pooling: Pooling | None = None,
    prompt: str | None = None,
    adapter: str | None = None,
) -> Embedded:
    """Embeds texts, lists of token ids, or messages. The model's habits stand in for what is `None`. `dimensions`: cut
    vectors to so many numbers. `normalize`: scale them to length 1, after the cut. `prompt`: the name of the prompt
    that precedes texts; "": none. `adapter`: as in `StartTurn`. If cancelled, this leaves no turn behind. Raises
    `InvalidRequest`, `Unsupported`, and the errors of turns."""
    habits = edge.model.embedding
    _check(habits, inputs, dimensions)
    before = _prompt(habits, prompt)
    params = replace(ONE_TOKEN, pooling=pooling or habits.pooling)

    def starts() -> Iterator[StartTurn]:
        for given in inputs:
            told = before + given if isinstance(given, str) else given
            yield StartTurn(
                kind="turn", tenant=tenant.name, limits=tenant.limits, input=told, params=params, adapter=adapter
            )

    turns = await run_all(edge, tenant, starts(), len(inputs))
    usages = [turn.result.usage for turn in turns if turn.result is not None]
    vectors = np.stack([np.frombuffer(turn.reply().vector, "<f4") for turn in turns])
    if dimensions is not None:
        vectors = vectors[:, :dimensions]
    if habits.normalized if normalize is None else normalize:
        vectors = unit(vectors)
    return Embedded(vectors, usages)


def unit(vectors: Vectors) -> Vectors:
    """Scales vectors, float32 [n, dimensions], to length 1; a vector of zeros stays."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    scaled: Vectors = (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
    return scaled


def _check(habits: EmbeddingHabits, inputs: Sequence[TurnInput], dimensions: int | None) -> None:
    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise InvalidRequest(f"there are {len(inputs)} inputs; allowed: 1 to {MAX_INPUTS}", param="input")
    if any(not len(given) for given in inputs):
        raise InvalidRequest("an input is empty; allowed: at least one token", param="input")
    given = sum(len(given) for given in inputs if not isinstance(given, str))
    _check_tokens(given)
    if dimensions is None or dimensions == habits.width:
        return
    if habits.shorter == ():
        raise Unsupported(
            f"dimensions is {dimensions}, but the files of this model do not say that its vectors can be cut "
            f"(is_matryoshka in config.json); allowed: {habits.width}",
            param="dimensions",
        )
    if dimensions > habits.width or (habits.shorter is not None and dimensions not in habits.shorter):
        allowed = f"1 to {habits.width}" if habits.shorter is None else f"one of {[*habits.shorter, habits.width]}"
        raise InvalidRequest(f"dimensions is {dimensions}; allowed: {allowed}", param="dimensions")


def _check_tokens(tokens: int) -> None:
    if tokens > MAX_TOKENS:
        raise InvalidRequest(f"the inputs have {tokens} tokens or more; allowed: {MAX_TOKENS} in all", param="input")


def _prompt(habits: EmbeddingHabits, name: str | None) -> str:
    """Returns the text of a prompt."""
    prompts = dict(habits.prompts)
    chosen = habits.default if name is None else name
    if chosen and chosen not in prompts:
        names = ", ".join(map(repr, prompts)) or "none, as this model has no prompts"
        raise InvalidRequest(f"prompt_name is {shown(name)}; allowed: {names}", param="prompt_name")
    return prompts.get(chosen, "")


async def run_all(edge: Edge, tenant: Tenant, requests: Iterator[StartTurn], count: int) -> list[LiveTurn]:
    """Runs `count` turns, at most `TURNS_AT_ONCE` and no more than the tenant may have open at a time. Returns them in
    order once all are committed. If cancelled, or if one fails, this leaves no turn behind."""
    at_once = min(count, TURNS_AT_ONCE, tenant.limits.turns or TURNS_AT_ONCE)
    turns: dict[int, LiveTurn] = {}
    numbered, tokens = enumerate(requests), 0

    async def worker(start: Start) -> None:
        nonlocal tokens
        for number, request in numbered:
            turn = turns[number] = await start(request)
            try:
                tokens += turn.ticket.prompt_tokens if turn.ticket is not None else 0
                _check_tokens(tokens)
                check_end(edge, await turn.finished())
            finally:
                edge.turns.abandon(turn)
            await asyncio.sleep(0)

    with edge.places(tenant, at_once) as start:
        await all_of(worker(start) for _ in range(at_once))
    return [turns[number] for number in range(count)]
