"""Log-probabilities in SGLang's form. Every event of a stream repeats all of them, so each one is encoded only once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from tenuto.base.sampling import Candidate, TokenLogprob
from tenuto.base.turns import Transcript


class GrowingList:
    """JSON text of a growing list."""

    def __init__(self) -> None:
        self._json = bytearray(b"[")

    def extend(self, entries: Iterable[Any]) -> None:
        """Appends entries."""
        more = msgspec.json.encode(list(entries))[1:-1]
        if more and len(self._json) > 1:
            self._json += b","
        self._json += more

    def whole(self) -> msgspec.Raw:
        """Returns the list so far."""
        return msgspec.Raw(bytes(self._json) + b"]")


class OutputScores:
    """Log-probabilities of a request's output tokens so far, and of the likeliest and the named tokens at their
    positions.

    Invariant: the lists have the first `_written` entries of the transcript.
    """

    def __init__(self) -> None:
        self._tokens, self._top, self._named = GrowingList(), GrowingList(), GrowingList()
        self._written = 0

    def lists(self, reply: Transcript, *, top: bool, named: bool, text: bool) -> dict[str, msgspec.Raw]:
        """Returns the lists of log-probabilities for an answer. `text`: include the tokens' texts."""
        new = reply.logprobs[self._written :]
        self._written += len(new)
        self._tokens.extend(entry(token, text=text) for token in new)
        lists = {"output_token_logprobs": self._tokens.whole()}
        if top:
            self._top.extend(entries(token.top, text=text) for token in new)
            lists["output_top_logprobs"] = self._top.whole()
        if named:
            self._named.extend(entries(token.named, text=text) for token in new)
            lists["output_token_ids_logprobs"] = self._named.whole()
        return lists


def entry(token: TokenLogprob | Candidate, *, text: bool) -> list[Any]:
    """Returns a token's log-probability, id and, with `text`, text."""
    return [token.logprob, token.token, token.raw.decode(errors="replace") if text else None]


def entries(others: Iterable[Candidate], *, text: bool) -> list[Any]:
    """Returns the entries of other tokens at a token's position."""
    return [entry(candidate, text=text) for candidate in others]
