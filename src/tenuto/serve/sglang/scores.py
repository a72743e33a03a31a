"""Log-probabilities in SGLang's form. Every event of a stream repeats all of them, so each is written only once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from tenuto.base.sampling import Candidate, TokenLogprob
from tenuto.base.turns import Transcript


class GrowingList:
    """A list that only grows, as JSON."""

    def __init__(self) -> None:
        self._json = bytearray(b"[")

    def extend(self, entries: Iterable[Any]) -> None:
        """Append entries."""
        more = msgspec.json.encode(list(entries))[1:-1]
        if more and len(self._json) > 1:
            self._json += b","
        self._json += more

    def whole(self) -> msgspec.Raw:
        """The list so far."""
        return msgspec.Raw(bytes(self._json) + b"]")


class OutputScores:
    """Those of a request's output so far: of its tokens, and of the likeliest in their places.

    Invariant: the lists have the first `_written` entries of the transcript.
    """

    def __init__(self) -> None:
        self._tokens, self._top = GrowingList(), GrowingList()
        self._written = 0

    def lists(self, reply: Transcript, *, top: bool, text: bool) -> dict[str, msgspec.Raw]:
        """The log-probabilities of an answer. `text`: with the tokens' texts."""
        new = reply.logprobs[self._written :]
        self._written += len(new)
        self._tokens.extend(entry(token, text=text) for token in new)
        lists = {"output_token_logprobs": self._tokens.whole()}
        if top:
            self._top.extend(likeliest(token, text=text) for token in new)
            lists["output_top_logprobs"] = self._top.whole()
        return lists


def entry(token: TokenLogprob | Candidate, *, text: bool) -> list[Any]:
    """A token's log-probability, id and text."""
    return [token.logprob, token.token, token.raw.decode(errors="replace") if text else None]


def likeliest(token: TokenLogprob, *, text: bool) -> list[Any]:
    """The entries of the likeliest tokens in a token's place."""
    return [entry(candidate, text=text) for candidate in token.top]
