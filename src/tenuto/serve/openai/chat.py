"""Writes the choices of chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tenuto.base.sampling import Candidate, TokenLogprob
from tenuto.base.turns import Delta


class ChatWriter:
    """Writes one choice; see `answers.Writer`."""

    def __init__(self, *, logprobs: bool) -> None:
        self._logprobs = logprobs

    def opening(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def piece(self, delta: Delta) -> dict[str, Any]:
        return {"delta": {"content": delta.text}, "logprobs": self._logprobs_of(delta.logprobs)}

    def closing(self) -> dict[str, Any]:
        return {"delta": {}, "logprobs": None}

    def whole(self, delta: Delta) -> dict[str, Any]:
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs_of(delta.logprobs)}

    def _logprobs_of(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = [{**_token(entry), "top_logprobs": [_token(other) for other in entry.top]} for entry in entries]
        return {"content": content, "refusal": None}


def _token(entry: TokenLogprob | Candidate) -> dict[str, Any]:
    return {"token": entry.raw.decode(errors="replace"), "logprob": entry.logprob, "bytes": list(entry.raw)}
