"""Answers in Anthropic's form, whole or streamed."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from tenuto.base.errors import TenutoError
from tenuto.base.tools.answer_part import AnswerPart
from tenuto.base.tools.answers import AnswerReader
from tenuto.base.turns import Delta, EndReason, TurnResult, joined
from tenuto.serve.anthropic.compactions import Compaction
from tenuto.serve.anthropic.errors import FORM
from tenuto.serve.anthropic.usage import usage_of
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.errors import Failure
from tenuto.serve.shared.live_turn import LiveTurn
from tenuto.serve.shared.samples import check_end, committed
from tenuto.serve.shared.sse import Answer, event


class MessageAnswer(Answer):
    """The answer of one turn. `name`: its id, if a thread keeps it. `end` is called at the end of the answer.
    `applied`: reports on the edits made to the request's messages, `None` if it asked for none.
    `compaction`: that of the request's messages, if they were compacted."""

    def __init__(
        self,
        edge: Edge,
        turn: LiveTurn,
        reader: AnswerReader,
        request_id: str,
        name: str | None = None,
        end: Callable[[], None] = lambda: None,
        applied: list[dict[str, Any]] | None = None,
        compaction: Compaction | None = None,
    ) -> None:
        super().__init__(edge, [turn])
        self._ended = end
        self._compaction = compaction
        self._edits = {"context_management": {"applied_edits": applied}} if applied is not None else {}
        self._turn = turn
        self._reader = reader
        self._request_id = request_id
        self._called = False
        self._block: str | None = None  # the type of the block that is open in a stream
        self._index = -1
        self._head: dict[str, Any] = {
            "id": name or f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": edge.name_of(turn.request.adapter),
        }

    async def whole(self) -> dict[str, Any]:
        result = await committed(self._edge, self._turn)
        said = self._reader.read(self._turn.reply().text, ended=True)
        self._called = bool(said.calls)
        content: list[dict[str, Any]] = [self._compaction.block] if self._compaction is not None else []
        if said.reasoning:
            content.append({"type": "thinking", "thinking": said.reasoning, "signature": ""})
        if said.text:
            content.append({"type": "text", "text": said.text})
        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": call.parsed()} for call in said.calls
        ]
        return {**self._head, "content": content, **self._end(result), "usage": self._usage(result), **self._edits}

    def leave(self) -> None:
        super().leave()
        self._ended()

    # -- the answer as server-sent events

    def opening(self) -> bytes:
        ticket = self._turn.ticket
        usage = {"input_tokens": ticket.prompt_tokens if ticket is not None else 0, "output_tokens": 0}
        opened = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        begun = event("message_start", {"type": "message_start", "message": opened})
        if self._compaction is None:
            return begun
        self._index += 1
        return begun + self._compaction.events(self._index)

    def news(self, _: int, deltas: list[Delta]) -> bytes:
        delta = joined(deltas)
        return b"".join(self._parts(self._reader.read(delta.text, ended=delta.result is not None)))

    def closing(self) -> bytes:
        result = self._turn.result
        assert result is not None
        check_end(self._edge, result)
        last = {"type": "message_delta", "delta": self._end(result), "usage": self._usage(result), **self._edits}
        return b"".join([*self._close(), event("message_delta", last), event("message_stop", {"type": "message_stop"})])

    def failed(self, error: TenutoError) -> bytes:
        return event("error", FORM.body(Failure.of(error), self._request_id))

    def _parts(self, said: AnswerPart) -> list[bytes]:
        """Returns the events for thoughts, then text, then calls."""
        parts: list[bytes] = []
        if said.reasoning:
            parts += self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            parts.append(self._delta({"type": "thinking_delta", "thinking": said.reasoning}))
        if said.text:
            parts += self._open("text", {"type": "text", "text": ""})
            parts.append(self._delta({"type": "text_delta", "text": said.text}))
        for call in said.calls:
            self._called = True
            parts += self._close()
            parts += self._open("tool_use", {"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            parts.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
        return parts

    def _open(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        if self._block == kind:
            return []
        parts = self._close()
        self._block = kind
        self._index += 1
        started = {"type": "content_block_start", "index": self._index, "content_block": block}
        return [*parts, event("content_block_start", started)]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event("content_block_delta", {"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> list[bytes]:
        if self._block is None:
            return []
        self._block = None
        return [event("content_block_stop", {"type": "content_block_stop", "index": self._index})]

    def _end(self, result: TurnResult) -> dict[str, Any]:
        stop = result.stop if isinstance(result.stop, str) else None
        reason = "end_turn" if stop is None else "stop_sequence"
        if result.reason in (EndReason.LENGTH, EndReason.APPENDED):
            reason = "max_tokens"
        elif self._called:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _usage(self, result: TurnResult) -> dict[str, Any]:
        counts = usage_of(self._edge, result.usage)
        if self._compaction is None:
            return counts
        return {**counts, "iterations": [self._compaction.iteration(self._edge), {"type": "message", **counts}]}
