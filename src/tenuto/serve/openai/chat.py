"""Choices of chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tenuto.base.options import TurnParams
from tenuto.base.sampling import TokenLogprob
from tenuto.base.tools.answer_part import AnswerPart
from tenuto.base.tools.answers import AnswerReader
from tenuto.base.tools.definitions import ToolCall
from tenuto.base.turns import Delta
from tenuto.serve.openai.tools import input_of
from tenuto.serve.shared.scores import scored


@dataclass(frozen=True, slots=True)
class Shown:
    """How choices are shown: with their thoughts, with tokens as `ids` (see `scored`), after the text `echo`."""

    reasoning: bool = True
    ids: bool = False
    echo: str = ""


ANSWER = Shown()
REASONING = ("reasoning_content", "reasoning")
"""The names of an answer's thoughts: DeepSeek's, and the one of vLLM and OpenRouter."""


class ChatWriter:
    """Writes one choice; see `answers.Writer`. `reader`: parses the answer. `customs`: names of custom tools."""

    def __init__(
        self,
        reader: AnswerReader,
        params: TurnParams,
        customs: frozenset[str] = frozenset(),
        form: Shown = ANSWER,
    ) -> None:
        self._form = form
        self._reader = reader
        self._customs = customs
        self._logprobs = params.scores_output
        self._calls = 0

    @property
    def called(self) -> bool:
        """Whether the answer has calls so far."""
        return self._calls > 0

    def opening(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": self._form.echo}, "logprobs": None}

    def piece(self, delta: Delta) -> dict[str, Any] | None:
        said, logprobs = self._shown(self._reader.push(delta.text)), self._logprobs_of(delta.logprobs)
        return {"delta": self._delta(said), "logprobs": logprobs} if said or logprobs else None

    def closing(self) -> dict[str, Any]:
        return {"delta": self._delta(self._shown(self._reader.finish())), "logprobs": None}

    def whole(self, delta: Delta) -> dict[str, Any]:
        said = self._shown(self._reader.read(delta.text, ended=True))
        said.text = self._form.echo + said.text
        self._calls = len(said.calls)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if said.calls and not said.text else said.text,
            "refusal": None,
        }
        if said.reasoning:
            message |= dict.fromkeys(REASONING, said.reasoning)
        if said.calls:
            message["tool_calls"] = [self._call(call) for call in said.calls]
        return {"message": message, "logprobs": self._logprobs_of(delta.logprobs)}

    def _shown(self, said: AnswerPart) -> AnswerPart:
        """Returns the part of an answer that the request wants to see."""
        return said if self._form.reasoning else replace(said, reasoning="")

    def _delta(self, said: AnswerPart) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if said.text:
            delta["content"] = said.text
        if said.reasoning:
            delta |= dict.fromkeys(REASONING, said.reasoning)
        if said.calls:
            delta["tool_calls"] = [
                {"index": index, **self._call(call)} for index, call in enumerate(said.calls, self._calls)
            ]
            self._calls += len(said.calls)
        return delta

    def _logprobs_of(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        return {"content": [scored(entry, by_id=self._form.ids) for entry in entries], "refusal": None}

    def _call(self, call: ToolCall) -> dict[str, Any]:
        if call.name in self._customs:
            return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": input_of(call)}}
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
