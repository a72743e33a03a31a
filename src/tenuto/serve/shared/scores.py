"""Log-probabilities in the form that several interfaces share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tenuto.base.sampling import Candidate, TokenLogprob


def scored(entry: TokenLogprob, *, ids: bool = False, by_id: bool = False) -> dict[str, Any]:
    """Returns a token with its log-probability and others in its place. `ids`: each with its token id. `by_id`: each
    written as its id."""
    others = [_token(other, ids, by_id) for other in in_place_of(entry)]
    return {**_token(entry, ids, by_id), "top_logprobs": others}


def in_place_of(entry: TokenLogprob) -> Sequence[Candidate]:
    """Returns the likeliest tokens in place of a token; if the request names some, the token and these instead."""
    if not entry.named:
        return entry.top
    all_of_them = Candidate(entry.token, entry.logprob, entry.raw), *entry.named
    return list({each.token: each for each in all_of_them}.values())


def written_id(token: int) -> str:
    """Returns a token's id as vLLM writes it in place of its text."""
    return f"token_id:{token}"


def _token(entry: TokenLogprob | Candidate, ids: bool, by_id: bool) -> dict[str, Any]:
    text = written_id(entry.token) if by_id else entry.raw.decode(errors="replace")
    shown = {"token": text, "logprob": entry.logprob, "bytes": list(entry.raw)}
    return {"id": entry.token, **shown} if ids else shown
