"""SGLang-compatible answers of `/generate`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from tenuto.base.errors import TenutoError
from tenuto.base.turns import Delta, EndReason, TurnResult, joined
from tenuto.base.wire.messages import Detokenize
from tenuto.serve.sglang.requests import Requests, Running
from tenuto.serve.sglang.scores import entries, entry
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.errors import Failure
from tenuto.serve.shared.sse import DONE, Answer, Chunk, data
from tenuto.serve.shared.tasks import all_of

ABORT_MESSAGES = {
    EndReason.ABORT: "the request was aborted",
    EndReason.DEADLINE: "the request did not start or end by its deadline",
    EndReason.GRAMMAR: "the grammar is too complex to be followed further, or bad_words leave no token",
    EndReason.FAILED: "the steps with the request failed; try again",
}


class Answers(Answer):
    """The answers to a request. Each event of a stream has all output so far. `several`: the whole answer is a list."""

    def __init__(self, edge: Edge, requests: Requests, running: Sequence[Running], *, several: bool) -> None:
        super().__init__(edge, [each.accepted for each in running])
        self._requests = requests
        self._running = running
        self._several = several

    async def whole(self) -> Any:
        await all_of(running.accepted.finished() for running in self._running)
        answers = []
        for running in self._running:
            running.reply.take(running.accepted.reply())
            answers.append(await _answer(self._edge, running, running.accepted.result))
        return answers if self._several else answers[0]

    def leave(self) -> None:
        self._requests.leave(self._running)

    def news(self, index: int, deltas: list[Delta]) -> Chunk:
        delta, running = joined(deltas), self._running[index]
        running.reply.take(delta)
        if _asks(self._edge, running, delta.result):
            return partial(self._asked, index, delta)
        answer = _plain(self._edge, running, delta.result)
        if running.prompt_scores is not None:
            answer["meta_info"] |= _known_scores(running, running.prompt_scores)
        return self._event(index, answer)

    async def _asked(self, index: int, delta: Delta) -> bytes:
        return self._event(index, await _answer(self._edge, self._running[index], delta.result, delta.delivered))

    def closing(self) -> bytes:
        return DONE

    def failed(self, error: TenutoError) -> bytes:
        return data(Failure.of(error).body) + DONE

    def _event(self, index: int, answer: dict[str, Any]) -> bytes:
        return data({**answer, "index": index} if self._several else answer)


def _asks(edge: Edge, running: Running, result: TurnResult | None) -> bool:
    """Whether the answer needs texts from the engine."""
    output = running.item.output
    stop = result.stop if result is not None else None
    unknown = running.item.scored and running.prompt_scores is None
    return unknown or output.special_tokens or _differs(edge, stop, trim_stop=output.trim_stop)


async def _answer(edge: Edge, running: Running, result: TurnResult | None, delivered: int = 0) -> dict[str, Any]:
    """Returns a request's output so far. `result`: the result of its turn, once it has ended. `delivered`: until then,
    the number of tokens with delivered text."""
    answer = _plain(edge, running, result)
    if running.item.scored:
        answer["meta_info"] |= await _logprobs(edge, running)
    if _asks(edge, running, result):
        answer["text"] = await _text(edge, running, result, delivered)
    return answer


def _plain(edge: Edge, running: Running, result: TurnResult | None) -> dict[str, Any]:
    """Returns the part of `_answer` that needs nothing from the engine."""
    reply, ticket = running.reply, running.accepted.ticket
    assert ticket is not None
    meta: dict[str, Any] = {
        "id": running.rid,
        "finish_reason": _finish_reason(result, len(reply.token_ids)) if result is not None else None,
        "prompt_tokens": ticket.prompt_tokens,
        "weight_version": result.weight_versions[-1].weight_version if result is not None else edge.weights.version,
        "completion_tokens": len(reply.token_ids),
        "cached_tokens": _cached(running, result) if result is not None else None,
    }
    if result is not None:
        meta["e2e_latency"] = (running.ended or time.perf_counter()) - running.started
    return {"text": reply.text, "output_ids": reply.token_ids, "meta_info": meta}


def _finish_reason(result: TurnResult, generated: int) -> dict[str, Any]:
    if result.reason is EndReason.STOP:
        return {"type": "stop", "matched": result.stop}
    if result.reason in (EndReason.LENGTH, EndReason.APPENDED):
        return {"type": "length", "length": generated}
    return {"type": "abort", "message": ABORT_MESSAGES[result.reason], "status_code": None, "err_type": None}


def _cached(running: Running, result: TurnResult) -> int:
    """Returns the number of cached prompt tokens. Several samples compute the prompt once, which counts for the
    first."""
    if running.prompt is not None and running.prompt.result is not None and running.sample == 0:
        return running.prompt.result.usage.cached
    return result.usage.cached


# -- text


async def _text(edge: Edge, running: Running, result: TurnResult | None, delivered: int) -> str:
    """Returns the text of the output, with control tokens and the stop that ended it if the request asks for them."""
    output, reply = running.item.output, running.reply
    stop = result.stop if result is not None else None
    if not output.special_tokens and not _differs(edge, stop, trim_stop=output.trim_stop):
        return reply.text
    tokens = reply.token_ids if result is not None else reply.token_ids[:delivered]
    if output.trim_stop and isinstance(stop, int):
        tokens = tokens[:-1]
    text = await edge.link.call(Detokenize(tenant=running.tenant, tokens=tokens, special=output.special_tokens))
    if output.trim_stop and isinstance(stop, str):
        whole = await edge.link.call(Detokenize(tenant=running.tenant, tokens=tokens))
        cut = whole[len(reply.text) :]  # the matched text and all after it
        text = text[: text.rfind(cut)] if cut in text else text
    return text


def _differs(edge: Edge, stop: str | int | None, *, trim_stop: bool) -> bool:
    """Whether the requested text differs from the delivered text, which ends before a stop string, but after a stop
    id."""
    if isinstance(stop, str):
        return not trim_stop
    return trim_stop and stop is not None and stop not in edge.model.eos_ids


# -- log-probabilities


async def _logprobs(edge: Edge, running: Running) -> dict[str, Any]:
    """Returns lists of [log-probability, token id, text]. The prompt's first entry has no log-probability."""
    if running.prompt_scores is not None:
        return _known_scores(running, running.prompt_scores)
    output = running.item.output
    prompt = await _prompt_scores(edge, running) if output.logprob_start >= 0 else []
    shown: dict[str, list[Any]] = {"input_token_logprobs": [entry for entry, _, _ in prompt]}
    if running.item.params.logprobs:
        shown["input_top_logprobs"] = [top for _, top, _ in prompt]
    if running.item.params.logprob_ids:
        shown["input_token_ids_logprobs"] = [named for _, _, named in prompt]
    lists = {name: msgspec.Raw(msgspec.json.encode(entries)) for name, entries in shown.items()}
    if running.reply.token_ids:  # the prompt's have come with the first of these
        running.prompt_scores = lists
    return _known_scores(running, lists)


def _known_scores(running: Running, prompt: dict[str, msgspec.Raw]) -> dict[str, Any]:
    """Returns the lists of `_logprobs`, given those of the prompt."""
    item = running.item
    top, named = bool(item.params.logprobs), bool(item.params.logprob_ids)
    return prompt | running.output_scores.lists(running.reply, top=top, named=named, text=item.output.token_text)


async def _prompt_scores(edge: Edge, running: Running) -> list[tuple[list[Any], list[Any] | None, list[Any] | None]]:
    """Returns, for every prompt token from the first requested one on, its entry and those of the likeliest and of the
    named tokens at its position."""
    output = running.item.output
    source = running.prompt if running.prompt is not None else running.accepted
    logprobs = source.reply().input_logprobs if running.prompt is not None else running.reply.input_logprobs
    ticket = source.ticket
    if ticket is None or not logprobs or output.logprob_start >= ticket.history + len(logprobs):
        return []
    first = ticket.prompt[output.logprob_start]
    text, texts = None, output.token_text
    if texts:
        text = await edge.link.call(Detokenize(tenant=running.tenant, tokens=[first]))
    rest = [token for token in logprobs[output.logprob_start + 1 - ticket.history :] if token is not None]
    return [
        ([None, first, text], None, None),
        *((entry(one, text=texts), entries(one.top, text=texts), entries(one.named, text=texts)) for one in rest),
    ]
