"""Answers in Ollama's form, whole or as lines of JSON."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from tenuto.base.errors import TenutoError
from tenuto.base.sampling import TokenLogprob
from tenuto.base.tools.answer_part import AnswerPart
from tenuto.base.tools.answers import AnswerReader
from tenuto.base.turns import Delta, EndReason, TurnResult, joined
from tenuto.serve.ollama.errors import FORM
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.errors import Failure
from tenuto.serve.shared.live_turn import LiveTurn
from tenuto.serve.shared.samples import check_end, committed
from tenuto.serve.shared.scores import scored
from tenuto.serve.shared.sse import LINES, Answer, line
from tenuto.serve.shared.timings import Timings

NANOSECONDS = 1_000_000_000


def now() -> str:
    """Returns the time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaAnswer(Answer):
    """The answer of one turn. `reader`: parses the answer; `None`: it is shown as it is. `chat`: the answer is a
    message. `context`: the answer comes with its tokens and those of the prompt."""

    media_type = LINES

    def __init__(
        self, edge: Edge, turn: LiveTurn, model: str, reader: AnswerReader | None, *, chat: bool, context: bool = False
    ) -> None:
        super().__init__(edge, [turn])
        self._turn = turn
        self._model = model
        self._reader = reader
        self._chat = chat
        self._context = context
        self._calls = 0

    async def whole(self) -> dict[str, Any]:
        result, reply = await committed(self._edge, self._turn), self._turn.reply()
        return {**self._part(self._read(reply.text, ended=True), reply.logprobs), **self._end(result)}

    # -- the answer as lines

    def news(self, _: int, deltas: list[Delta]) -> bytes:
        delta = joined(deltas)
        said = self._read(delta.text, ended=delta.result is not None)
        shows = said or delta.logprobs
        part = line(self._part(said, delta.logprobs)) if shows else b""
        if delta.result is not None:
            check_end(self._edge, delta.result)
            part += line({**self._part(AnswerPart(), ()), **self._end(delta.result)})
        return part

    def failed(self, error: TenutoError) -> bytes:
        return line(FORM.body(Failure.of(error), ""))

    def _read(self, text: str, *, ended: bool) -> AnswerPart:
        return self._reader.read(text, ended=ended) if self._reader is not None else AnswerPart(text)

    def _part(self, said: AnswerPart, scores: Sequence[TokenLogprob]) -> dict[str, Any]:
        thought = {"thinking": said.reasoning} if said.reasoning else {}
        shown: dict[str, Any] = {"response": said.text, **thought}
        if self._chat:
            shown = {"message": {"role": "assistant", "content": said.text, **thought}}
            if said.calls:
                calls = [
                    {
                        "id": call.id,
                        "function": {"index": self._calls + i, "name": call.name, "arguments": call.parsed()},
                    }
                    for i, call in enumerate(said.calls)
                ]
                self._calls += len(calls)
                shown["message"]["tool_calls"] = calls
        if scores:
            shown["logprobs"] = list(map(scored, scores))
        return {"model": self._model, "created_at": now(), **shown, "done": False}

    def _end(self, result: TurnResult) -> dict[str, Any]:
        timings = Timings.of(self._turn, result.usage.generated)
        ticket = self._turn.ticket
        assert ticket is not None
        context = {"context": [*ticket.prompt, *self._turn.reply().tokens]} if self._context else {}
        return {
            "done": True,
            "done_reason": "length" if result.reason is EndReason.LENGTH else "stop",
            **context,
            "total_duration": round(timings.total * NANOSECONDS),
            "load_duration": 0,
            "prompt_eval_count": result.usage.prompt,
            "prompt_eval_duration": round(timings.prompt * NANOSECONDS),
            "eval_count": result.usage.generated,
            "eval_duration": round(timings.output * NANOSECONDS),
        }
