"""The relevance of documents to queries: by their embeddings, or by asking the model."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp

from tenuto.base.errors import InvalidRequest, Unsupported
from tenuto.base.options import ONE_TOKEN
from tenuto.base.sampling import LEAST_LOGPROB, MAX_LOGPROBS, Sampling, TokenLogprob
from tenuto.base.tools.variables import Variables
from tenuto.base.turns import Message
from tenuto.base.wire.messages import StartTurn, Tokenize
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.embeddings import MAX_INPUTS, embed, run_all, unit
from tenuto.serve.shared.settings import Tenant

TASK = "Given a web search query, retrieve relevant passages that answer the query"
"""The instruction of a request without one, which Qwen3-Reranker (arXiv:2506.05176) was trained with."""
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
_ASKED = "<Instruct>: {}\n\n<Query>: {}\n\n<Document>: {}"
_FORCED = 100.0
"""The bias with which a token is sampled whatever the logits. Log-probabilities do not include it."""

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Relevance:
    """The score of each pair, and the number of tokens of all prompts."""

    scores: Sequence[float]
    tokens: int


async def relevance(
    edge: Edge, tenant: Tenant, pairs: Sequence[Pair], task: str | None = None, adapter: str | None = None
) -> Relevance:
    """Scores pairs of a query and a document. An embedding model gives the cosine of their vectors, -1 to 1. Another
    model with a chat template judges, by the instruction `task`, whether the document is relevant; the score is the
    probability of "yes" rather than "no". `adapter`: as in `StartTurn`. Raises `InvalidRequest`, `Unsupported` and the
    errors of turns."""
    if not 1 <= len(pairs) <= MAX_INPUTS:
        raise InvalidRequest(f"there are {len(pairs)} documents; allowed: 1 to {MAX_INPUTS}", param="input")
    if edge.model.embedding.declared:
        return await _by_vectors(edge, tenant, pairs, adapter)
    if edge.model.has_chat:
        return await _by_asking(edge, tenant, pairs, task or TASK, adapter)
    raise Unsupported(
        "this model has no chat template, and its files describe no embeddings; allowed: a model of these"
    )


async def _by_vectors(edge: Edge, tenant: Tenant, pairs: Sequence[Pair], adapter: str | None) -> Relevance:
    """Queries and documents get the prompts of these names, if the model has them."""
    names = [name for name, _ in edge.model.embedding.prompts]
    vectors, tokens = [], 0
    for side, name in enumerate(("query", "document")):
        texts = list(dict.fromkeys(pair[side] for pair in pairs))
        found = await embed(edge, tenant, texts, prompt=name if name in names else None, adapter=adapter)
        vectors.append(dict(zip(texts, unit(found.vectors), strict=True)))
        tokens += found.tokens
    queries, documents = vectors
    return Relevance([float(queries[query] @ documents[document]) for query, document in pairs], tokens)


async def _by_asking(edge: Edge, tenant: Tenant, pairs: Sequence[Pair], task: str, adapter: str | None) -> Relevance:
    """The prompts are those of Qwen3-Reranker, in the model's own chat template."""
    yes, no = [await _token(edge, tenant, word) for word in ("yes", "no")]
    variables = Variables.of({"enable_thinking": False})

    def ask(pair: Pair, token: int) -> StartTurn:
        sampling = Sampling(logit_bias=((token, _FORCED),))
        params = replace(ONE_TOKEN, logprobs=MAX_LOGPROBS, sampling=sampling)
        messages = [Message("system", _JUDGE), Message("user", _ASKED.format(task, *pair))]
        return StartTurn(
            kind="turn",
            tenant=tenant.name,
            limits=tenant.limits,
            input=messages,
            params=params,
            variables=variables,
            adapter=adapter,
        )

    turns = await run_all(edge, tenant, (ask(pair, yes) for pair in pairs), len(pairs))
    entries = [turn.reply().logprobs[0] for turn in turns]
    unlikely = [number for number, entry in enumerate(entries) if _logprob(entry, no) is None]
    again = await run_all(edge, tenant, (ask(pairs[number], no) for number in unlikely), len(unlikely))
    found = dict(zip(unlikely, (turn.reply().logprobs[0] for turn in again), strict=True))
    scores = []
    for number, entry in enumerate(entries):
        of_yes, of_no = _logprob(entry, yes), _logprob(found.get(number, entry), no)
        behind = (LEAST_LOGPROB if of_no is None else of_no) - (LEAST_LOGPROB if of_yes is None else of_yes)
        scores.append(1 / (1 + exp(min(behind, 700.0))))
    return Relevance(scores, sum(turn.result.usage.prompt for turn in turns if turn.result is not None))


def _logprob(entry: TokenLogprob, token: int) -> float | None:
    """Returns the log-probability of a token, if it was sampled or is among the likeliest."""
    known = {other.token: other.logprob for other in entry.top} | {entry.token: entry.logprob}
    return known.get(token)


async def _token(edge: Edge, tenant: Tenant, word: str) -> int:
    """Returns the first token of an answer."""
    asked = Tokenize(tenant=tenant.name, input=word, generate=False)
    tokens = array("i", await edge.link.call(asked)).tolist()
    begun = edge.model.adds_bos and tokens[:1] == [edge.model.bos_id]
    return int(tokens[1 if begun else 0])
