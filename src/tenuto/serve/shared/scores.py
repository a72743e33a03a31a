"""Log-probabilities in the form that several interfaces share."""

from __future__ import annotations

from typing import Any

from tenuto.base.sampling import Candidate, TokenLogprob


def scored(entry: TokenLogprob, *, ids: bool = False) -> dict[str, Any]:
    """Returns a token with its log-probability and the likeliest tokens in its place. `ids`: each with its token id."""
    return {**_token(entry, ids=ids), "top_logprobs": [_token(other, ids=ids) for other in entry.top]}


def _token(entry: TokenLogprob | Candidate, *, ids: bool) -> dict[str, Any]:
    shown = {"token": entry.raw.decode(errors="replace"), "logprob": entry.logprob, "bytes": list(entry.raw)}
    return {"id": entry.token, **shown} if ids else shown
