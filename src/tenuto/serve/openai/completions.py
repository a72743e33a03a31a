"""Choices of completions, with logprobs and the echo of the prompt."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tenuto.base.options import TurnParams
from tenuto.base.sampling import Candidate, TokenLogprob
from tenuto.base.turns import Delta
from tenuto.base.wire.messages import Detokenize
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.samples import Samples
from tenuto.serve.shared.scores import in_place_of, written_id


@dataclass(frozen=True, slots=True)
class Echo:
    """The echo of a prompt. `first` and `first_id`: its first token, which has no logprob. `scores`: logprobs of its
    tokens, unless they come with the answer."""

    text: str
    first: bytes = b""
    first_id: int = 0
    scores: Sequence[TokenLogprob | None] = ()


async def echo_of(edge: Edge, prompt: str | list[int], samples: Samples, params: TurnParams) -> Echo:
    """Returns the echo of a prompt whose turns were started with `echo` and `params`."""
    turn = samples.input_turn
    ticket = turn.ticket
    assert ticket is not None
    text = prompt if isinstance(prompt, str) else ticket.text or ""
    if params.logprobs is None or not ticket.prompt:
        return Echo(text)
    first = await edge.link.call(Detokenize(tokens=ticket.prompt[:1]))
    scores = turn.reply().input_logprobs if samples.prompt is not None else ()
    return Echo(text, first.encode(), ticket.prompt[0], scores)


class CompletionWriter:
    """Writes one choice; see `answers.Writer`. `silent`: tokens without text in the output. `ids`: log-probabilities
    name tokens by their ids."""

    def __init__(
        self, params: TurnParams, echo: Echo | None = None, silent: Iterable[int] = (), *, ids: bool = False
    ) -> None:
        self._text = _id_of if ids else _text_of
        self._logprobs = params.scores_output
        self._echo = echo  # until it is written
        self._silent = frozenset(silent)
        self._characters = Characters()

    called = False

    def opening(self) -> dict[str, Any] | None:
        """Returns the echo, unless its logprobs come with the answer."""
        if self._echo is None or (self._logprobs and not self._echo.scores):
            return None
        return self.piece(Delta())

    def piece(self, delta: Delta) -> dict[str, Any]:
        echo, self._echo = self._echo, None
        text = delta.text if echo is None else echo.text + delta.text
        return {"text": text, "logprobs": self._logprobs_of(delta, echo) if self._logprobs else None}

    def closing(self) -> dict[str, Any]:
        return {"text": "" if self._echo is None else self._echo.text, "logprobs": None}

    def whole(self, delta: Delta) -> dict[str, Any]:
        return self.piece(delta)

    def _logprobs_of(self, delta: Delta, echo: Echo | None) -> dict[str, Any]:
        shown: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if echo is not None:
            text, position = echo.text.encode(), 0
            for entry in delta.input_logprobs or echo.scores:
                raw = entry.raw if entry is not None else echo.first
                written = raw if text.startswith(raw, position) else b""
                position += len(written)
                first = Candidate(echo.first_id, 0.0, raw)
                self._add(shown, first if entry is None else entry, entry, self._characters.take(written))
            self._characters = Characters(len(echo.text))
        for entry in delta.logprobs:
            written = b"" if entry.token in self._silent else entry.raw
            self._add(shown, entry, entry, self._characters.take(written))
        return shown

    def _add(
        self, shown: dict[str, list[Any]], said: TokenLogprob | Candidate, entry: TokenLogprob | None, offset: int
    ) -> None:
        """Adds the token `said`. `entry`: the token with its log-probability, if it is known."""
        shown["tokens"].append(self._text(said))
        shown["text_offset"].append(offset)
        shown["token_logprobs"].append(entry.logprob if entry is not None else None)
        likeliest: dict[str, float] | None = None
        if entry is not None:  # the token itself comes first, as in vLLM's answers
            likeliest = {self._text(said): entry.logprob}
            likeliest |= {self._text(other): other.logprob for other in in_place_of(entry)}
        shown["top_logprobs"].append(likeliest)


class Characters:
    """Counts the characters of a text that arrives as bytes."""

    def __init__(self, count: int = 0) -> None:
        self._count = count
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def take(self, raw: bytes) -> int:
        """Counts the characters of `raw`. Returns the number of characters before it."""
        before = self._count
        self._count += len(self._decoder.decode(raw))
        return before


def _text_of(entry: TokenLogprob | Candidate) -> str:
    return token_text(entry.raw)


def _id_of(entry: TokenLogprob | Candidate) -> str:
    return written_id(entry.token)


def token_text(raw: bytes) -> str:
    """Returns a token in OpenAI's form: its text, or its bytes if they are not complete characters."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
