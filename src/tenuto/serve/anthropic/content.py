"""Messages in Anthropic's form, and their content."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from tenuto.base.tools.definitions import ToolCall
from tenuto.base.turns import Message
from tenuto.serve.shared.objects import ForeignObject
from tenuto.serve.shared.schemas import Messages


class Block(ForeignObject):
    """A block of a message's content."""

    has_kinds = True
    ignored = frozenset({"cache_control", "caller", "citations", "data", "is_error", "signature", "toolset_name"})
    undone: ClassVar[dict[str, tuple[Any, ...]]] = {"tool_changes": (None, []), "encrypted_content": (None,)}

    type: Literal["text", "tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking", "compaction"]
    text: str = ""
    thinking: str = ""
    id: str = Field("", max_length=256, description="Id of a `tool_use`.")
    name: str = Field("", max_length=256, description="Name of the function in a `tool_use`.")
    input: dict[str, Any] | None = None
    tool_use_id: str = Field("", max_length=256, description="In a `tool_result`, the id of the call that it answers.")
    content: str | Messages[Block] | None = Field(
        None, description="Content of a `tool_result`, or summary of a `compaction`."
    )
    tool_name: str = Field("", max_length=256, description="In a `tool_reference`, the name of a tool that was found.")


def text_of(content: str | list[Block] | None) -> str:
    """Returns the texts of content and the names of tools that were found, one per line."""
    if not isinstance(content, list):
        return content or ""
    found = ("text", "tool_reference")
    return "\n".join(block.text or block.tool_name for block in content if block.type in found)


class NewMessage(ForeignObject):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: str | Messages[Block]

    def rendered(self) -> list[Message]:
        """Returns the message in the engine's form, where results of calls are separate messages."""
        if isinstance(self.content, str):
            return [Message(self.role, self.content)]
        if self.role == "assistant":
            calls = [ToolCall(block.name, json.dumps(block.input or {}, ensure_ascii=False), block.id)
                     for block in self.content if block.type == "tool_use"]  # fmt: skip
            thoughts = "\n".join(block.thinking for block in self.content if block.type == "thinking")
            return [Message("assistant", text_of(self.content), tuple(calls), reasoning=thoughts)]
        if self.role == "system":
            return [Message("system", text_of(self.content))]
        results = [block for block in self.content if block.type == "tool_result"]
        messages = [Message("tool", text_of(block.content), tool_call_id=block.tool_use_id) for block in results]
        if len(results) < len(self.content) or not results:
            messages.append(Message("user", text_of(self.content)))
        return messages


INTRODUCTION = "The conversation before this was summarized:"
"""The first line of the message that stands for a summary."""


def since_compaction(messages: Sequence[NewMessage]) -> list[NewMessage]:
    """Returns the messages with the last summary in the place of all that it covers. A block whose compaction failed
    has no effect."""
    for place in range(len(messages) - 1, -1, -1):
        message = messages[place]
        blocks = message.content if message.role == "assistant" and isinstance(message.content, list) else []
        found = [number for number, block in enumerate(blocks) if block.type == "compaction" and block.content]
        if found:
            told = _text(f"{INTRODUCTION}\n\n{blocks[found[-1]].content}")
            rest, later = blocks[found[-1] + 1 :], list(messages[place + 1 :])
            if rest:
                return [_of("user", [told]), _of("assistant", rest), *later]
            if later and later[0].role == "user":  # many templates refuse two messages of the user
                return [_of("user", [told, *_blocks_of(later[0])]), *later[1:]]
            return [_of("user", [told]), *later]
    return list(messages)


def with_question(messages: Sequence[NewMessage], question: str) -> list[NewMessage]:
    """Returns the messages with a question of the user at the end, as a part of the last message if that is the
    user's."""
    last = messages[-1]
    if last.role != "user":
        return [*messages, _of("user", [_text(question)])]
    return [*messages[:-1], _of("user", [*_blocks_of(last), _text(question)])]


def _text(text: str) -> Block:
    return Block.model_validate({"type": "text", "text": text})


def _of(role: Literal["user", "assistant"], blocks: list[Block]) -> NewMessage:
    return NewMessage.model_construct(role=role, content=blocks)


def _blocks_of(message: NewMessage) -> list[Block]:
    return message.content if isinstance(message.content, list) else [_text(message.content)]
