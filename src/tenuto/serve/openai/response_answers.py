"""Responses in OpenAI's form, whole or streamed."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from tenuto.base.errors import TenutoError, TurnAborted
from tenuto.base.sampling import TokenLogprob
from tenuto.base.tools.answer_part import AnswerPart
from tenuto.base.tools.answers import Reading
from tenuto.base.tools.definitions import ToolCall
from tenuto.base.turns import Delta, EndReason, TurnResult, Usage
from tenuto.serve.openai.tools import input_of
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.errors import Failure
from tenuto.serve.shared.live_turn import LiveTurn
from tenuto.serve.shared.samples import check_end, committed
from tenuto.serve.shared.scores import scored
from tenuto.serve.shared.sse import Answer, Chunk, event

TEXT, THOUGHT = "output_text", "reasoning_text"
LISTED_TEXT: dict[str, Any] = {"annotations": [], "logprobs": []}
"""Further fields of a text part in lists of items."""


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a response's items. `reading`: how its text is parsed. `customs`: names of custom tools. `scores`:
    log-probabilities are shown. `first`: complete items that come before the answer."""

    reading: Reading
    customs: frozenset[str] = frozenset()
    scores: bool = False
    first: tuple[dict[str, Any], ...] = ()


def head_of(model: str, name: str, echoed: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a response that stay the same while it is written. `model`: its name in the answer.
    `echoed`: the fields that repeat the request."""
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        "incomplete_details": None,
        **echoed,
    }


def usage_of(usage: Usage, thoughts: int = 0) -> dict[str, Any]:
    """Returns a turn's counts of tokens in the form of Responses. `thoughts`: output tokens that are thoughts."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.generated,
        "output_tokens_details": {"reasoning_tokens": thoughts},
        "total_tokens": usage.prompt + usage.generated,
    }


async def _nowhere(_: dict[str, Any]) -> None:
    """Keeps a response nowhere."""


class ResponseAnswer(Answer):
    """The response of one turn. `keep` is called with the response once it is complete, and `end` at the end of the
    answer. Answers with the same turn, `head` and `form` have the same events, of which those after number `after` are
    sent."""

    def __init__(
        self,
        edge: Edge,
        turn: LiveTurn,
        head: dict[str, Any],
        form: Form,
        keep: Callable[[dict[str, Any]], Awaitable[None]] = _nowhere,
        end: Callable[[], None] = lambda: None,
        after: int = -1,
    ) -> None:
        super().__init__(edge, [turn])
        self._turn = turn
        self._reading = form.reading
        self._reader = form.reading.reader(turn.id)
        self._customs = form.customs
        self._scores: list[TokenLogprob] | None = [] if form.scores else None  # of tokens whose text is to be written
        self._ends = {*edge.model.eos_ids, *turn.request.params.stop_ids}  # tokens without text that end the turn
        self._keep = keep
        self._end = end
        self._after = after
        self._first = form.first
        self._output: list[dict[str, Any]] = []
        self._open = ""  # type of the part being written; empty for none
        self._number = 0  # number of the next event
        self._head = head

    async def whole(self) -> dict[str, Any]:
        result = await committed(self._edge, self._turn)
        self._begin_with_first()
        for delta in self._turn.deltas:
            self._read(delta)
        self._parts(self._reader.finish())
        self._close()
        return await self._done(result)

    def leave(self) -> None:
        super().leave()
        self._end()

    # -- the response as server-sent events

    def opening(self) -> bytes:
        begun = self.view("in_progress")
        names = ("response.created", "response.in_progress")
        return b"".join([*(self._event(name, response=begun) for name in names), *self._begin_with_first()])

    def _begin_with_first(self) -> list[bytes]:
        """Adds the items that come before the answer."""
        parts: list[bytes] = []
        for item in self._first:
            self._output.append(item)
            parts += [self._of_item(f"response.output_item.{name}", item=item) for name in ("added", "done")]
        return parts

    def news(self, _: int, deltas: list[Delta]) -> bytes:
        return b"".join([part for delta in deltas for part in self._read(delta)])

    def closing(self) -> Chunk:
        return self._closing

    async def _closing(self) -> bytes:
        result = self._turn.result
        assert result is not None
        check_end(self._edge, result)
        parts = [*self._parts(self._reader.finish()), *self._close()]
        response = await self._done(result)
        return b"".join([*parts, self._event(f"response.{response['status']}", response=response)])

    def failed(self, error: TenutoError) -> bytes:
        return self._event("response.failed", response=self.ended_by(error))

    def ended_by(self, error: TenutoError) -> dict[str, Any]:
        """Returns the response of a turn that ended with an error. One in the background that was aborted counts as
        cancelled."""
        failure, cancelled = Failure.of(error), self._head.get("background") and isinstance(error, TurnAborted)
        told = {"code": failure.code, "message": failure.message}
        return {**self.view("cancelled" if cancelled else "failed"), "error": None if cancelled else told}

    def view(self, status: str) -> dict[str, Any]:
        """Returns the response as it is so far."""
        return {**self._head, "status": status, "output": list(self._output), "usage": None}

    async def _done(self, result: TurnResult) -> dict[str, Any]:
        whole = result.reason not in (EndReason.LENGTH, EndReason.APPENDED)
        response = self.view("completed" if whole else "incomplete")
        if not whole:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["usage"] = usage_of(result.usage, self._reading.thought_tokens(self._turn.pieces))
        await self._keep(response)
        return response

    # -- items and their events

    def _event(self, name: str, /, **fields: Any) -> bytes:
        self._number += 1
        if self._number - 1 <= self._after:
            return b""
        return event(name, {"type": name, "sequence_number": self._number - 1, **fields})

    def _id(self, kind: str) -> str:
        """Returns the id of the next item, which follows from the response's id and the item's place."""
        place = f"{self._head['id']} {len(self._output)}"
        return f"{kind}_{blake2b(place.encode(), digest_size=12).hexdigest()}"

    def _of_item(self, name: str, /, **fields: Any) -> bytes:
        """Returns an event about the last item."""
        return self._event(name, output_index=len(self._output) - 1, **fields)

    def _read(self, delta: Delta) -> list[bytes]:
        """Reads deltas one at a time, so that the events are always the same."""
        if self._scores is not None:
            ends = delta.logprobs and delta.logprobs[-1].token in self._ends
            self._scores += delta.logprobs[:-1] if ends else delta.logprobs
        return self._parts(self._reader.push(delta.text))

    def _parts(self, said: AnswerPart) -> list[bytes]:
        parts: list[bytes] = []
        if said.reasoning:
            parts += self._write(THOUGHT, said.reasoning)
            if not said.text:
                self._scored("")  # its tokens are not shown
        if said.text:
            parts += self._write(TEXT, said.text)
        for call in said.calls:
            parts += self._close()
            parts += self._call(call)
        return parts

    def _call(self, call: ToolCall) -> list[bytes]:
        """Adds the item of a call."""
        self._scored("")
        if call.name in self._customs:
            kind, field, given, prefix, named = "custom_tool_call", "input", input_of(call), "ctc", {}
        else:
            kind, field, given, prefix, named = "function_call", "arguments", call.arguments, "fc", {"name": call.name}
        about = {"item_id": self._id(prefix)}
        item = {"id": about["item_id"], "type": kind, "call_id": call.id, "name": call.name}
        done = {**item, field: given, "status": "completed"}
        self._output.append(done)
        return [
            self._of_item("response.output_item.added", item={**item, field: "", "status": "in_progress"}),
            self._of_item(f"response.{kind}_{field}.delta", delta=given, **about),
            self._of_item(f"response.{kind}_{field}.done", **{field: given}, **named, **about),
            self._of_item("response.output_item.done", item=done),
        ]

    def _write(self, kind: str, text: str) -> list[bytes]:
        """Adds text to the last item, or begins an item of this kind."""
        parts: list[bytes] = []
        scores = self._scored(text, fresh=bool(self._output) and self._open != kind) if kind == TEXT else []
        if self._open != kind:
            parts += self._close() + self._begin(kind)
        item = self._output[-1]
        item["content"][0]["text"] += text
        about: dict[str, Any] = {"item_id": item["id"], "content_index": 0, "delta": text}
        if kind == TEXT:
            about["logprobs"] = scores
            if self._scores is not None:
                item["content"][0]["logprobs"] += scores
        parts.append(self._of_item(f"response.{kind}.delta", **about))
        return parts

    def _scored(self, text: str, *, fresh: bool = False) -> list[dict[str, Any]]:
        """Returns the scores of the tokens that came since the last call. With `fresh`, tokens of thoughts or calls may
        have come before `text`, and only the last ones are its own."""
        if self._scores is None:
            return []
        scores, self._scores = self._scores, []
        left = len(text.encode())
        if left and not fresh:
            return [scored(entry) for entry in scores]
        begin = len(scores)
        while left > 0 and begin > 0:
            begin -= 1
            left -= len(scores[begin].raw)
        return [scored(entry) for entry in scores[begin:]]

    def _begin(self, kind: str) -> list[bytes]:
        self._open = kind
        part: dict[str, Any] = {"type": kind, "text": ""}
        item: dict[str, Any] = {"id": self._id("rs"), "type": "reasoning", "summary": []}
        if kind == TEXT:
            part["annotations"] = []
            if self._scores is not None:
                part["logprobs"] = []
            item = {"id": self._id("msg"), "type": "message", "role": "assistant"}
        item |= {"status": "in_progress", "content": []}
        self._output.append(item)
        added = self._of_item("response.output_item.added", item={**item, "content": []})
        item["content"].append(part)
        about = {"item_id": item["id"], "content_index": 0}
        return [added, self._of_item("response.content_part.added", part=dict(part), **about)]

    def _close(self) -> list[bytes]:
        """Completes the last item."""
        if not self._open:
            return []
        kind, self._open = self._open, ""
        item = self._output[-1]
        item["status"] = "completed"
        part, about = item["content"][0], {"item_id": item["id"], "content_index": 0}
        logprobs: dict[str, Any] = {"logprobs": part.get("logprobs", [])} if kind == TEXT else {}
        return [
            self._of_item(f"response.{kind}.done", text=part["text"], **about, **logprobs),
            self._of_item("response.content_part.done", part=dict(part), **about),
            self._of_item("response.output_item.done", item=dict(item)),
        ]
