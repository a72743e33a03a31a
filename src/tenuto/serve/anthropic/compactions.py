"""Compaction of a request's messages: the model writes a summary, which takes their place in this and later prompts."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tenuto.base.compaction import ASKED, SUMMARY_TOKENS
from tenuto.base.errors import TenutoError
from tenuto.base.turns import Delta, Usage, last_role
from tenuto.serve.anthropic.content import NewMessage, since_compaction, with_question
from tenuto.serve.anthropic.edits import Compact
from tenuto.serve.anthropic.errors import FORM
from tenuto.serve.anthropic.schemas import MessagesBody, ToolChoice
from tenuto.serve.anthropic.usage import usage_of
from tenuto.serve.shared.edge import Edge
from tenuto.serve.shared.errors import Failure
from tenuto.serve.shared.live_turn import LiveTurn
from tenuto.serve.shared.run_turns import start_in_run
from tenuto.serve.shared.samples import committed
from tenuto.serve.shared.settings import Tenant
from tenuto.serve.shared.sse import Answer, event
from tenuto.serve.shared.volatile import without_volatile_lines


@dataclass(frozen=True, slots=True)
class Compaction:
    """A summary that the model wrote in `turn`. `content`: the summary; `None` if the model wrote none, and the
    messages stay. `pauses`: the answer is the summary alone."""

    turn: LiveTurn
    content: str | None
    usage: Usage
    pauses: bool

    @property
    def block(self) -> dict[str, Any]:
        """The block that stands for the earlier messages."""
        return {"type": "compaction", "content": self.content, "encrypted_content": None}

    def events(self, index: int) -> bytes:
        """Returns the events of the block in a stream."""
        begun = {"type": "content_block_start", "index": index, "content_block": {**self.block, "content": None}}
        delta = {**self.block, "type": "compaction_delta"}
        told = {"type": "content_block_delta", "index": index, "delta": delta}
        stopped = {"type": "content_block_stop", "index": index}
        return b"".join(event(str(each["type"]), each) for each in (begun, told, stopped))

    def iteration(self, edge: Edge) -> dict[str, Any]:
        """Returns the counts of tokens of the summary's turn."""
        return {"type": "compaction", **usage_of(edge, self.usage)}

    def messages(self, before: Sequence[NewMessage]) -> list[NewMessage]:
        """Returns the messages of the prompt; `before`: those of the request."""
        block = NewMessage.model_validate({"role": "assistant", "content": [self.block]})
        return since_compaction([*before, block]) if self.content else list(before)


async def compacted(
    edge: Edge, tenant: Tenant, body: MessagesBody, edit: Compact, adapter: str | None, run: Sequence[bytes]
) -> Compaction:
    """Lets the model summarize the messages of a request. Raises the engine's refusals."""
    asking = body.model_copy(
        update={
            "messages": with_question(body.messages, edit.instructions or ASKED),
            "max_tokens": SUMMARY_TOKENS,
            "temperature": 0.0,
            "stop_sequences": None,
            "output_config": None,
            "tool_choice": ToolChoice(type="none"),
            "expect_within": None,
        }
    )
    asking.__dict__.pop("tool_use", None)  # that of the request, whose rules differ
    given = without_volatile_lines(edge, asking.rendered(edge.model.habits))
    habits = edge.model.habits.after(last_role(given))
    start = asking.start(tenant, given, habits, adapter=adapter)
    reading = asking.tool_use.reading(habits, start.params.grammar)
    turn = await start_in_run(edge, tenant, run, start, reading) or await edge.start(tenant, start)
    try:
        result = await committed(edge, turn)
    except BaseException:
        edge.turns.abandon(turn)
        raise
    text = reading.reader(turn.id).read(turn.reply().text, ended=True).text.strip()
    return Compaction(turn, text or None, result.usage, bool(edit.pause_after_compaction))


class PausedAnswer(Answer):
    """An answer that consists of a compaction alone, so that the client decides what follows it."""

    def __init__(self, edge: Edge, compaction: Compaction, adapter: str | None, request_id: str) -> None:
        super().__init__(edge, [compaction.turn])
        self._compaction = compaction
        self._request_id = request_id
        self._head: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": edge.name_of(adapter),
        }
        self._end = {"stop_reason": "compaction", "stop_sequence": None}
        self._usage = {
            **dict.fromkeys(usage_of(edge, compaction.usage), 0),
            "iterations": [compaction.iteration(edge)],
        }

    async def whole(self) -> dict[str, Any]:
        return {**self._head, "content": [self._compaction.block], **self._end, "usage": self._usage}

    def opening(self) -> bytes:
        begun = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage}
        return event("message_start", {"type": "message_start", "message": begun})

    def news(self, _: int, deltas: list[Delta]) -> bytes:  # noqa: ARG002 - the turn has ended
        return b""

    def closing(self) -> bytes:
        last = {"type": "message_delta", "delta": self._end, "usage": self._usage}
        stop = event("message_stop", {"type": "message_stop"})
        return self._compaction.events(0) + event("message_delta", last) + stop

    def failed(self, error: TenutoError) -> bytes:
        return event("error", FORM.body(Failure.of(error), self._request_id))
