"""Edits of a conversation's context: what a request asks to clear from its older messages. The client's own copy stays
whole, so each request describes the same edits again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from tenuto.base.checks import MAX_COUNT
from tenuto.base.tools.definitions import MAX_TOOLS
from tenuto.serve.anthropic.content import Block, NewMessage
from tenuto.serve.shared.objects import ForeignObject

CLEARED = "[the result of this call was cleared to save context]"
"""The content of a cleared result."""
TRIGGER = 100_000
"""Number of tokens above which results are cleared if the request does not say."""
KEPT_USES = 3
"""Number of the latest results that stay if the request does not say."""
COMPACT_TRIGGER = 150_000
"""Number of tokens above which messages are compacted if the request does not say."""
MAX_EDITS = 16
"""Maximum number of edits in one request."""

Messages = Sequence[NewMessage]
Count = Callable[[Messages], Awaitable[int]]
"""Returns the number of tokens of a prompt with these messages."""
_Number = Annotated[int, Field(ge=0, le=MAX_COUNT)]
_Names = Annotated[list[str], Field(max_length=MAX_TOOLS)]


class InputTokens(ForeignObject):
    """A number of tokens of the prompt."""

    has_kinds = True

    type: Literal["input_tokens"]
    value: _Number


class ToolUses(ForeignObject):
    """A number of calls of tools."""

    has_kinds = True

    type: Literal["tool_uses"]
    value: _Number


class Trigger(ForeignObject):
    """The number of calls, or of tokens of the prompt, above which an edit is made."""

    has_kinds = True

    type: Literal["input_tokens", "tool_uses"]
    value: _Number


class ThinkingTurns(ForeignObject):
    """A number of turns of the assistant."""

    has_kinds = True

    type: Literal["thinking_turns", "all"]
    value: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = Field(None, description="1 if not given.")


class ClearToolUses(ForeignObject):
    """Clears the results of older calls, and their arguments if `clear_tool_inputs`: `true`, or names of tools."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: Trigger | None = Field(None, description="100,000 tokens if not given.")
    keep: ToolUses | None = Field(None, description="The latest calls, which stay; 3 if not given.")
    clear_at_least: InputTokens | None = Field(None, description="If fewer can be cleared, nothing is.")
    clear_tool_inputs: bool | _Names | None = None
    exclude_tools: _Names | None = Field(None, description="Tools whose calls stay.")

    def edited(self, messages: Messages) -> tuple[list[NewMessage], int]:
        """Returns the messages without older results, and the number of calls cleared."""
        answered = {block.tool_use_id for block in _blocks(messages) if block.type == "tool_result"}
        excluded = self.exclude_tools or ()
        uses = [block for block in _uses(messages) if block.name not in excluded]
        older = uses[: max(0, len(uses) - (self.keep.value if self.keep is not None else KEPT_USES))]
        cleared = {block.id for block in older if block.id in answered}

        def edit(block: Block) -> Block:
            if block.type == "tool_result" and block.tool_use_id in cleared:
                return block.model_copy(update={"content": CLEARED})
            if block.type == "tool_use" and block.id in cleared and self._clears_input(block.name):
                return block.model_copy(update={"input": {}})
            return block

        return [_with(message, lambda blocks: list(map(edit, blocks))) for message in messages], len(cleared)

    def _clears_input(self, tool: str) -> bool:
        chosen = self.clear_tool_inputs
        return tool in chosen if isinstance(chosen, list) else bool(chosen)

    async def apply(self, messages: Messages, count: Count) -> tuple[Messages, dict[str, Any] | None]:
        """Returns the messages after the edit, and a report on it; `None` if it was not made."""
        edited, cleared = self.edited(messages)
        trigger = self.trigger or Trigger(type="input_tokens", value=TRIGGER)
        if not cleared or (trigger.type == "tool_uses" and len(_uses(messages)) <= trigger.value):
            return messages, None
        before = await count(messages)
        if trigger.type == "input_tokens" and before <= trigger.value:
            return messages, None
        saved = before - await count(edited)
        if saved < max(1, self.clear_at_least.value if self.clear_at_least is not None else 1):
            return messages, None
        return edited, {"type": self.type, "cleared_tool_uses": cleared, "cleared_input_tokens": saved}


class ClearThinking(ForeignObject):
    """Clears the thoughts of older turns of the assistant. A turn includes the calls in it and their results."""

    type: Literal["clear_thinking_20251015"]
    keep: ThinkingTurns | Literal["all"] | None = Field(None, description="The latest turns; 1 if not given.")

    def edited(self, messages: Messages) -> tuple[list[NewMessage], int]:
        """Returns the messages without older thoughts, and the number of turns cleared."""
        if self.keep == "all" or (isinstance(self.keep, ThinkingTurns) and self.keep.type == "all"):
            return list(messages), 0
        kept = self.keep.value or 1 if isinstance(self.keep, ThinkingTurns) else 1
        turns: list[list[int]] = [[]]  # of each turn, the numbers of its messages with thoughts
        for number, message in enumerate(messages):
            if _begins_turn(message):
                turns.append([])
            elif any(block.type in ("thinking", "redacted_thinking") for block in _blocks([message])):
                turns[-1].append(number)
        older = [turn for turn in turns if turn][:-kept]
        cleared = {number for turn in older for number in turn}
        edited = [_with(message, _unthought) if n in cleared else message for n, message in enumerate(messages)]
        return edited, len(older)

    async def apply(self, messages: Messages, count: Count) -> tuple[Messages, dict[str, Any] | None]:
        """Returns the messages after the edit, and a report on it; `None` if it was not made."""
        edited, cleared = self.edited(messages)
        if not cleared:
            return messages, None
        saved = await count(messages) - await count(edited)
        return edited, {"type": self.type, "cleared_thinking_turns": cleared, "cleared_input_tokens": saved}


class Compact(ForeignObject):
    """Replaces all messages by a summary, which the model writes."""

    type: Literal["compact_20260112"]
    trigger: InputTokens | None = Field(None, description="150,000 tokens if not given.")
    instructions: str | None = Field(None, min_length=1, description="What asks the model for the summary.")
    pause_after_compaction: bool | None = Field(None, description="The answer is the summary alone.")

    async def wanted(self, messages: Messages, count: Count) -> bool:
        """Whether the prompt has more tokens than the trigger."""
        return await count(messages) > (self.trigger.value if self.trigger is not None else COMPACT_TRIGGER)


Edit = ClearToolUses | ClearThinking | Compact


class ContextManagement(ForeignObject):
    """The edits that clear older messages, in the order in which they are made. A compaction comes last."""

    edits: Annotated[list[Edit], Field(fail_fast=True, max_length=MAX_EDITS)] | None = None

    @property
    def compact(self) -> Compact | None:
        """The compaction, which follows all other edits, if the request asks for one."""
        return next((edit for edit in self.edits or () if isinstance(edit, Compact)), None)

    async def apply(self, messages: Messages, count: Count) -> tuple[Messages, list[dict[str, Any]]]:
        """Returns the messages after the edits, and a report on each edit that was made."""
        reports: list[dict[str, Any]] = []
        for edit in self.edits or ():
            if not isinstance(edit, Compact):
                messages, report = await edit.apply(messages, count)
                reports += [report] if report is not None else []
        return messages, reports


def _blocks(messages: Messages) -> list[Block]:
    return [block for message in messages if isinstance(message.content, list) for block in message.content]


def _uses(messages: Messages) -> list[Block]:
    return [block for block in _blocks(messages) if block.type == "tool_use"]


def _begins_turn(message: NewMessage) -> bool:
    """Whether the assistant's answer to this message is a new turn, not one that goes on after results."""
    if message.role == "assistant":
        return False
    return isinstance(message.content, str) or any(block.type != "tool_result" for block in message.content)


def _unthought(blocks: list[Block]) -> list[Block]:
    return [block for block in blocks if block.type not in ("thinking", "redacted_thinking")]


def _with(message: NewMessage, edit: Callable[[list[Block]], list[Block]]) -> NewMessage:
    """Returns the message with edited content; one whose content is text as it is."""
    if isinstance(message.content, str):
        return message
    return message.model_copy(update={"content": edit(message.content)})
