"""How choices of chat completions are written."""

from __future__ import annotations

from typing import Any

from tenuto.base.messages import Candidate, LogprobView
from tenuto.serve.turns import Reply


class ChatWriter:
    """Writes one choice; see `openai_answers.Writer`."""

    def __init__(self, *, logprobs: bool) -> None:
        self._logprobs = logprobs

    def opening(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def piece(self, said: Reply) -> dict[str, Any]:
        return {"delta": {"content": said.text}, "logprobs": self._shown(said.logprobs)}

    def closing(self) -> dict[str, Any]:
        return {"delta": {}, "logprobs": None}

    def whole(self, said: Reply) -> dict[str, Any]:
        message = {"role": "assistant", "content": said.text, "refusal": None}
        return {"message": message, "logprobs": self._shown(said.logprobs)}

    def _shown(self, entries: list[LogprobView]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = [{**_token(entry), "top_logprobs": [_token(other) for other in entry.top]} for entry in entries]
        return {"content": content, "refusal": None}


def _token(entry: LogprobView | Candidate) -> dict[str, Any]:
    return {"token": entry.raw.decode(errors="replace"), "logprob": entry.logprob, "bytes": list(entry.raw)}
