"""vLLM's fields of answers about their prompts: token ids and log-probabilities."""

from __future__ import annotations

from typing import Any

from tenuto.base.sampling import TokenLogprob
from tenuto.serve.openai.schemas import Generation
from tenuto.serve.shared.samples import Samples


def prompt_fields(samples: Samples, body: Generation) -> dict[str, Any]:
    """Returns what a request asks for about a prompt, or `None` where it does not: token ids, and log-probabilities,
    which are complete once its turns have ended. Tokens of a session's history have none."""
    turn = samples.input_turn
    ticket = turn.ticket
    assert ticket is not None
    fields: dict[str, Any] = {
        "prompt_token_ids": ticket.prompt if body.return_token_ids else None,
        "prompt_logprobs": None,
    }
    if body.verbose:
        fields["__verbose"] = {"prompt": ticket.text}
    if body.prompt_logprobs is not None:
        scores = [_scores(entry, body.prompt_logprobs) for entry in turn.reply().input_logprobs]
        fields["prompt_logprobs"] = [None] * ticket.history + scores
    return fields


def _scores(entry: TokenLogprob | None, most: int) -> dict[str, Any] | None:
    """Returns the log-probabilities of a token and of the `most` likeliest in its place, by id. A token that is not
    among these has no rank."""
    if entry is None:
        return None
    scores = {str(entry.token): _score(entry.logprob, None, entry.raw)}
    for rank, other in enumerate(entry.top[:most], 1):
        scores[str(other.token)] = _score(other.logprob, rank, other.raw)
    return scores


def _score(logprob: float, rank: int | None, raw: bytes) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": raw.decode(errors="replace")}
