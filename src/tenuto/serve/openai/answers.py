"""Answers in OpenAI's form, whole or streamed: code shared by completions and chat completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Protocol

from tenuto.base.errors import TenutoError
from tenuto.base.tools.answers import Reading
from tenuto.base.turns import Delta, EndReason, TurnResult, joined
from tenuto.serve.openai.prompts import prompt_fields
from tenuto.serve.openai.schemas import Generation
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.errors import Failure
from tenuto.serve.shared.samples import Samples, check_end, close_all, committed
from tenuto.serve.shared.sse import DONE, Answer, Chunk, data
from tenuto.serve.shared.timings import shown_times

FINISH_REASONS = {
    EndReason.STOP: "stop",
    EndReason.ABORT: "stop",
    EndReason.LENGTH: "length",
    EndReason.APPENDED: "length",
}
"""OpenAI's finish reason for each reason of a committed turn. A barge-in is a stop."""


UNUSED = {"service_tier": None, "kv_transfer_params": None}
"""Fields of whole answers that other servers use; their clients read them."""


class Writer(Protocol):
    """Writes one choice, without its index and finish reason. Used once, for a stream or a whole answer."""

    def opening(self) -> dict[str, Any] | None:
        """Returns the choice for a chunk before any text, or `None` for no such chunk."""
        ...

    @property
    def called(self) -> bool:
        """Whether tools have been called."""
        ...

    def piece(self, delta: Delta) -> dict[str, Any] | None:
        """Returns the choice for a chunk with new output, or `None` if the output is held back."""
        ...

    def closing(self) -> dict[str, Any]:
        """Returns the choice for the last chunk."""
        ...

    def whole(self, delta: Delta) -> dict[str, Any]:
        """Returns the choice for a whole answer."""
        ...


class Choices(Answer):
    """The choices of one request, in the order of its prompts. `kind`: the `object` of a whole answer. `reading`: how
    they are parsed, if they are."""

    def __init__(
        self,
        edge: Edge,
        kind: str,
        samples: Sequence[Samples],
        writers: Sequence[Writer],
        body: Generation,
        reading: Reading | None = None,
    ) -> None:
        super().__init__(edge, [turn for answers in samples for turn in answers.turns])
        self._samples = samples
        self._writers = writers
        self._reading = reading
        self._usage_at_end = body.usage_at_end
        self._usage_always = body.usage_always
        self._body = body
        self._shows_ids = bool(body.return_token_ids)
        self._timed = bool(body.timings_per_token)
        self._session_id = body.session_id
        self._generated = [0] * len(writers)  # tokens so far of a streamed choice
        self._unsent: list[list[int]] = [[] for _ in writers]  # token ids for the choice's next chunk
        self._begun: set[int] = set()  # choices with a chunk
        self._kind = kind
        self._head: dict[str, Any] = {
            "id": f"{'cmpl' if kind == 'text_completion' else 'chatcmpl'}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": edge.name_of(samples[0].turns[0].request.adapter),
            "system_fingerprint": edge.fingerprint,
        }

    async def whole(self) -> dict[str, Any]:
        for turn in self.turns:
            await committed(self._edge, turn)
        return self.written(self._writers)

    def written(self, writers: Sequence[Writer]) -> dict[str, Any]:
        """Returns the whole answer, written by new `writers`, once all turns have been committed."""
        choices = []
        for index, (turn, writer) in enumerate(zip(self.turns, writers, strict=True)):
            reply = turn.reply()
            choice = self._choice(index, writer.whole(reply), turn.result)
            choice["token_ids"] = reply.tokens if self._shows_ids else None
            choices.append(choice)
        whole = {
            **self._head,
            "object": self._kind,
            **UNUSED,
            "choices": choices,
            "usage": self._usage(),
            **self._session(),
            **self._times(0),
        }
        for index, choice in enumerate(choices):
            self._tell_prompt(index, choice, whole)
        return whole

    def leave(self) -> None:
        close_all(self._samples)

    # -- the answer as server-sent events

    def opening(self) -> bytes:
        self._head["object"] = "text_completion" if self._kind == "text_completion" else f"{self._kind}.chunk"
        if self._usage_at_end:
            self._head["usage"] = None
        openings = [(index, writer.opening()) for index, writer in enumerate(self._writers)]
        return b"".join(self._chunk(index, opening) for index, opening in openings if opening is not None)

    def news(self, index: int, deltas: list[Delta]) -> bytes:
        delta, writer = joined(deltas), self._writers[index]
        event = b""
        self._generated[index] += len(delta.tokens)
        if self._shows_ids:
            self._unsent[index] += delta.tokens
        if delta.text or delta.scores:
            piece = writer.piece(delta)
            event = self._chunk(index, piece) if piece is not None else b""
        if delta.result is not None:
            check_end(self._edge, delta.result)
            event += self._chunk(index, writer.closing(), delta.result)
        return event

    def closing(self) -> Chunk:
        return self.end()

    def end(self) -> bytes:
        """Returns the events at the end of a stream."""
        if not self._usage_at_end:
            return DONE
        return data({**self._head, "choices": [], "usage": self._usage(), **self._session(), **self._times(0)}) + DONE

    def failed(self, error: TenutoError) -> bytes:
        return data(Failure.of(error).body) + DONE

    def _chunk(self, index: int, written: dict[str, Any], result: TurnResult | None = None) -> bytes:
        choice = self._choice(index, written, result)
        chunk = {**self._head, "choices": [choice], **(self._session() if result is not None else {})}
        if self._shows_ids:
            choice["token_ids"], self._unsent[index] = self._unsent[index], []
            if index not in self._begun:
                self._tell_prompt(index, choice, chunk)
                self._begun.add(index)
        if self._usage_always:
            ticket, generated = self.turns[index].ticket, self._generated[index]
            assert ticket is not None
            chunk["usage"] = _counts(ticket.prompt_tokens, generated)
        if self._generated[index]:
            chunk |= self._times(index)
        return data(chunk)

    def _choice(self, index: int, written: dict[str, Any], result: TurnResult | None) -> dict[str, Any]:
        choice = {"index": index, **written, "finish_reason": None}
        if result is not None:
            reason = FINISH_REASONS[result.reason]
            called = self._writers[index].called and reason == "stop"
            eos = result.stop in self._edge.model.eos_ids
            choice["finish_reason"] = "tool_calls" if called else reason
            choice["matched_stop"] = result.stop
            choice["stop_reason"] = None if eos else result.stop
        return choice

    def _tell_prompt(self, index: int, choice: dict[str, Any], answer: dict[str, Any]) -> None:
        """Adds what the request asks for about the prompt of a choice. Chats, which have one prompt, have it in the
        answer, and completions in the choice."""
        samples = self._samples[index * len(self._samples) // len(self._writers)]
        fields = prompt_fields(samples, self._body)
        (choice if self._kind == "text_completion" else answer).update(fields)

    def _session(self) -> dict[str, Any]:
        """Returns the fields about the client's session, if it named one."""
        result = self.turns[0].result
        if self._session_id is None or result is None:
            return {}
        return {"session_id": self._session_id, "version": result.version}

    def _times(self, index: int) -> dict[str, Any]:
        """Returns the times of a choice, if the client asked for times. A whole answer has those of the first."""
        turn = self.turns[index]
        generated = turn.result.usage.generated if turn.result is not None else self._generated[index]
        return {"timings": shown_times(turn, generated)} if self._timed else {}

    def _usage(self) -> dict[str, Any]:
        prompt = sum(samples.prompt_tokens for samples in self._samples)
        completion = sum(samples.generated_tokens for samples in self._samples)
        usage: dict[str, Any] = {
            **_counts(prompt, completion),
            "prompt_tokens_details": {"cached_tokens": sum(samples.cached_tokens for samples in self._samples)},
        }
        guessed = [samples.guessed_tokens for samples in self._samples]
        details = {
            "accepted_prediction_tokens": sum(accepted for accepted, _ in guessed),
            "rejected_prediction_tokens": sum(rejected for _, rejected in guessed),
        }
        if self._reading is not None:
            details["reasoning_tokens"] = sum(self._reading.thought_tokens(turn.pieces) for turn in self.turns)
        return {**usage, "completion_tokens_details": details}


def _counts(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
