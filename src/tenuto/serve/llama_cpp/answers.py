"""Completions in llama.cpp's form, whole or streamed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tenuto.base.errors import TenutoError
from tenuto.base.options import TurnParams
from tenuto.base.turns import Delta, EndReason, TurnResult, joined
from tenuto.serve.llama_cpp.schemas import NEVER, Completing
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.errors import Failure
from tenuto.serve.shared.live_turn import LiveTurn
from tenuto.serve.shared.samples import check_end, committed
from tenuto.serve.shared.scores import scored
from tenuto.serve.shared.sse import Answer, data
from tenuto.serve.shared.timings import shown_times

NO_SLOT = -1
"""The slot of answers: turns have none of their own."""


class Completions(Answer):
    """The completions of one request. `several`: a whole answer is a list. `params`: the options of all turns."""

    def __init__(
        self, edge: Edge, turns: Sequence[LiveTurn], body: Completing, params: TurnParams, *, several: bool
    ) -> None:
        super().__init__(edge, turns)
        self._body = body
        self._params = params
        self._several = several
        self._generated = [0] * len(turns)  # tokens so far of a streamed completion

    async def whole(self) -> Any:
        answers = []
        for index, turn in enumerate(self.turns):
            result, reply = await committed(self._edge, turn), turn.reply()
            told = {**self._head(index, reply), **self._end(turn, result, reply.text), **self._scores(reply)}
            told["tokens"] = list(reply.tokens) if self._body.return_tokens else []
            answers.append(self._chosen(told))
        return answers if self._several else answers[0]

    # -- the answer as server-sent events

    def news(self, index: int, deltas: list[Delta]) -> bytes:
        delta, turn = joined(deltas), self.turns[index]
        self._generated[index] += len(delta.tokens)
        event = b""
        if delta.tokens or delta.text:
            times = {"timings": shown_times(turn, self._generated[index])} if self._body.timings_per_token else {}
            chunk = {**self._head(index, delta), "stop": False, **self._scores(delta), **times}
            chunk["tokens_predicted"] = self._generated[index]
            event = data(chunk)
        if delta.result is not None:
            check_end(self._edge, delta.result)
            event += data({**self._head(index, Delta()), **self._end(turn, delta.result, turn.reply().text)})
        return event

    def failed(self, error: TenutoError) -> bytes:
        return data(Failure.of(error).body)

    def _head(self, index: int, delta: Delta) -> dict[str, Any]:
        return {"index": index, "content": delta.text, "tokens": list(delta.tokens), "id_slot": NO_SLOT}

    def _end(self, turn: LiveTurn, result: TurnResult, text: str) -> dict[str, Any]:
        """Returns the fields of an answer that is complete."""
        ticket, usage = turn.ticket, result.usage
        assert ticket is not None
        by_limit = result.reason in (EndReason.LENGTH, EndReason.APPENDED)
        kind = "limit" if by_limit else "word" if isinstance(result.stop, str) else "eos"
        return {
            "stop": True,
            "stop_type": kind,
            "stopping_word": result.stop if isinstance(result.stop, str) else "",
            "model": self._edge.name_of(turn.request.adapter),
            "prompt": ticket.text or "",
            "has_new_line": "\n" in text,
            "truncated": kind == "limit" and usage.prompt + usage.generated >= self._edge.model.context_length,
            "tokens_predicted": usage.generated,
            "tokens_evaluated": usage.prompt,
            "tokens_cached": usage.prompt + usage.generated,
            "generation_settings": self._settings(result),
            "timings": shown_times(turn, usage.generated),
        }

    def _settings(self, result: TurnResult) -> dict[str, Any]:
        """Returns the options of the turns, under llama.cpp's names."""
        params, sampling = self._params, self._params.sampling
        most = -1 if params.max_new_tokens is None else result.max_new_tokens
        return {
            "n_predict": most,
            "max_tokens": most,
            "seed": sampling.seed,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repeat_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "logit_bias": [
                {"token": token, "bias": bias if bias > NEVER else None} for token, bias in sampling.logit_bias
            ],
            "stop": params.stop,
            "ignore_eos": params.ignore_eos,
            "n_probs": params.logprobs or 0,
            "stream": bool(self._body.stream),
            "timings_per_token": bool(self._body.timings_per_token),
        }

    def _scores(self, delta: Delta) -> dict[str, Any]:
        if not self._params.scores_output:
            return {}
        return {"completion_probabilities": [scored(entry, ids=True) for entry in delta.logprobs]}

    def _chosen(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Returns the fields that the request asks for, or all."""
        if not self._body.response_fields:
            return answer
        chosen = {}
        for name in self._body.response_fields:
            value: Any = answer
            for part in name.split("/"):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                chosen[name] = value
        return chosen
